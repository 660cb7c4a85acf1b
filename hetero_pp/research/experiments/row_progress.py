"""Progress of rows in training: a bar per row on a terminal, otherwise occasional lines, and a line at each end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Queue

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from hetero_pp.core.progress import NowAndThen
from hetero_pp.program.report.output import tell
from hetero_pp.research.experiments.jobs import Job
from hetero_pp.rpc.exchange_service import MOST_BETWEEN

FIRST_LINE = 60.0
"""Seconds before a row's first line without a terminal; most rows of small tables finish earlier."""

Told = tuple[int, int, float] | None
"""(index of the job, its round, its validation loss); None at the end."""


class RowProgress:
    """Shows the rounds of rows, also of rows in other processes, and the rows that are finished."""

    def __init__(self, jobs: Sequence[Job], console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (TextColumn("{task.description}", table_column=Column()), BarColumn(20), MofNCompleteColumn())
        self._jobs, self._console, self._clock = jobs, console, clock
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._all = self._progress.add_task("rows", total=len(jobs))
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._bars: dict[int, TaskID] = {}
        self._lines: dict[int, NowAndThen] = {}

    def __enter__(self) -> RowProgress:
        self._progress.start()
        return self

    def __exit__(self, *cause: object) -> None:
        self._progress.stop()

    def follow(self, told: Queue[Told]) -> None:
        """Show every round in the queue until it ends."""
        try:
            while (one := told.get()) is not None:
                self.round(*one)
        except (EOFError, OSError):  # the queue is gone, as after Ctrl-C
            return

    def round(self, index: int, round_: int, loss: float) -> None:
        """Show a completed round of a row, or round 0 at its start; ignore rounds that arrive after its end."""
        with self._lock:
            if index not in self._done:
                self._show(index, round_, loss)

    def _show(self, index: int, round_: int, loss: float) -> None:
        rounds = self._jobs[index].config.outer.rounds
        text = _name(self._jobs[index]) + (f": loss {loss:.4f}" if round_ else "")
        if self._console.is_terminal:
            if index not in self._bars:
                self._bars[index] = self._progress.add_task("", total=rounds)
            self._progress.update(self._bars[index], description=f"  {text}", completed=round_)
        else:
            if index not in self._lines:
                self._lines[index] = NowAndThen(lambda doing, _: self._say(doing), FIRST_LINE, _later, self._clock)
            self._lines[index](f"{text}, round {round_}/{rounds}", round_ / rounds)

    def finished(self, index: int, end: str) -> None:
        """Show that a row is trained, or has failed."""
        with self._lock:
            self._done.add(index)
            self._progress.advance(self._all)
            if index in self._bars:
                self._progress.remove_task(self._bars.pop(index))
        if not self._console.is_terminal:
            self._say(f"{len(self._done)}/{len(self._jobs)} {_name(self._jobs[index])}: {end}")

    def _say(self, line: str) -> None:
        tell(self._console, line)


def _name(job: Job) -> str:
    return f"{job.name}, seed {job.seed}"


def _later(seconds: float) -> float:
    return min(2 * seconds, MOST_BETWEEN)
