"""Shows the progress of a long reading: a bar with a percentage on a terminal, else an occasional line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from hetero_pp.core.progress import NowAndThen, OnProgress
from hetero_pp.program.report.output import tell
from hetero_pp.rpc.exchange_service import FIRST_TOLD, MOST_BETWEEN

_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def shown_reading(console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Yield a function for the block to report its progress. `what` is shown until the first report.

    Nothing is left on a terminal.
    """
    if not console.is_terminal:
        yield now_and_then(partial(tell, console), clock)
        return
    columns = (
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield NowAndThen(
            lambda doing, share: progress.update(task, description=doing, total=1.0, completed=share),
            0.0,
            lambda _: _SECONDS_BETWEEN_LOOKS,
            clock,
        )


def now_and_then(say: Callable[[str], None], clock: Callable[[], float]) -> NowAndThen:
    """Return a function that prints `encoding the corpus: 40 %` after some seconds, then at growing intervals."""
    return NowAndThen(
        lambda doing, share: say(reading_line(doing, share)),
        FIRST_TOLD,
        lambda waited: min(2 * waited, MOST_BETWEEN),
        clock,
    )


def reading_line(doing: str, share: float) -> str:
    """Format progress: `encoding the corpus: 40 %`."""
    return f"{doing}: {100 * share:.0f} %"
