"""Progress of rows in training: what they report and what is shown."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from queue import Queue

import pytest
from rich.console import Console

from hetero_pp.research.experiments.outcomes import read_outcomes
from hetero_pp.research.experiments.training import Job, RowProgress, Told, Training, train_job


@pytest.mark.starts_processes
def test_a_row_tells_that_it_begins_and_each_of_its_rounds(job: Job) -> None:
    told: list[tuple[int, float]] = []
    job.rows.parent.mkdir(exist_ok=True)
    train_job(job, Training(compiles=False), on_round=lambda round_, loss: told.append((round_, loss)))
    [outcome] = read_outcomes(job.rows).values()
    assert [round_ for round_, _ in told] == [0, 1, 2, 3]
    assert [loss for _, loss in told[1:]] == outcome["validation_loss"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_of_long_rows_where_there_is_no_terminal(job: Job) -> None:
    """The first line comes after a minute. A round that is reported after its row's end gives no line."""
    out, clock = io.StringIO(), Clock()
    progress = RowProgress([job, job], Console(file=out, width=80), clock)
    for clock.now, round_ in ((0.0, 0), (59.0, 1), (61.0, 2), (70.0, 3)):
        progress.round(0, round_, 4.25)
    progress.finished(0, "loss 4.0000, 70 s")
    clock.now = 1000.0
    progress.round(0, 3, 4.0)
    progress.finished(1, "failed")
    assert out.getvalue().splitlines() == [
        "all, seed 2: loss 4.2500, round 2/3",
        "1/2 all, seed 2: loss 4.0000, 70 s",
        "2/2 all, seed 2: failed",
    ]


def test_a_bar_a_row_on_a_terminal_until_it_is_finished(job: Job) -> None:
    told: Queue[Told] = Queue()
    for one in ((0, 0, math.nan), (0, 1, 4.5), (1, 2, 4.125), None):
        told.put(one)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    progress = RowProgress([job, job], console)
    progress.follow(told)

    def shown() -> list[tuple[str, float, float | None]]:
        return [(task.description.strip(), task.completed, task.total) for task in progress._progress.tasks]

    rows = [("all, seed 2: loss 4.5000", 1, 3), ("all, seed 2: loss 4.1250", 2, 3)]
    assert shown() == [("rows", 0, 2), *rows]
    progress.finished(0, "loss 4.0000, 1 s")
    assert shown() == [("rows", 1, 2), rows[1]]


def test_a_long_name_is_folded_and_no_number_of_a_row_is_cut(job: Job) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    progress = RowProgress([replace(job, name="SparseLoCo 3.12 % H = 15, parameter server")], console)
    progress.round(0, 2, 4.125)
    console.print(progress._progress.get_renderable())
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "loss 4.1250" in out.getvalue()
    assert " 2/3 0:00:00 " in out.getvalue()
