"""Shows how far a long reading is: a bar with a percentage on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hetero_pp.outer.exchange_service import FIRST_TOLD, MOST_BETWEEN
from hetero_pp.progress import OnProgress

_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def shown_reading(console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Give the block what to tell how far it is; `what` is shown until it does. Nothing is left on a terminal."""
    if not console.is_terminal:
        yield NowAndThen(
            lambda doing, share: console.print(f"{doing}: {100 * share:.0f} %", soft_wrap=True, highlight=False),
            FIRST_TOLD,
            lambda waited: min(2 * waited, MOST_BETWEEN),
            clock,
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield NowAndThen(
            lambda doing, share: progress.update(task, description=doing, total=1.0, completed=share),
            0.0,
            lambda _: _SECONDS_BETWEEN_LOOKS,
            clock,
        )


class NowAndThen:
    """Hands on what is told after `first` seconds, and then when as many have passed again as `later` makes of them."""

    def __init__(
        self, tell: OnProgress, first: float, later: Callable[[float], float], clock: Callable[[], float]
    ) -> None:
        self._tell, self._later, self._clock = tell, later, clock
        self._wait = first
        self._due = clock() + first

    def __call__(self, doing: str, share: float) -> None:
        """See OnProgress."""
        now = self._clock()
        if now >= self._due:
            self._tell(doing, share)
            self._wait = self._later(self._wait)
            self._due = now + self._wait
