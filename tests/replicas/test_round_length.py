"""How many inner steps a round has: counted, by a clock that the test moves, and as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from replica_groups.round_length import AsRecorded, AsTold, RoundLength, SoManySteps, SoMuchTime
from replica_groups.steps_taken import StepsTaken


class Watch:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def _steps(length: RoundLength, clock: Watch, round_: int, a_step: float | list[float], elapsed: float = 0.0) -> int:
    """That a round of it has, where steps take so long, one after the other; it was opened before it begins here."""
    length.begin(elapsed)
    step, is_over = 0, False
    while not is_over:
        told = bool(length.is_last(round_, step))
        clock.time += a_step[step] if isinstance(a_step, list) else a_step
        is_over = length.is_over(step, told)
        step += 1
    return step


@pytest.mark.parametrize(
    ("a_step", "expected"), [(1.0, 10), (2.5, 4), (3.0, 3), (0.3, 33), (10.0, 1), (10.5, 1), (1000.0, 1)]
)
def test_as_many_steps_as_fit(a_step: float, expected: int) -> None:
    """From the second round on; the first ends as soon as it is known how long a step is."""
    clock = Watch()
    length = SoMuchTime(10.0, clock)
    assert _steps(length, clock, 1, a_step) == max(2, expected)
    clock.time += 77.0  # the outer round is no part of it
    assert _steps(length, clock, 2, a_step) == expected
    assert _steps(length, clock, 3, a_step) == expected


def test_a_round_follows_the_time_that_its_steps_take() -> None:
    clock = Watch()
    length = SoMuchTime(10.0, clock)
    assert _steps(length, clock, 1, 1.0) == 10
    assert _steps(length, clock, 2, [1.0, 1.0, 4.0, 2.0, 2.0]) == 5  # after three steps 6 s are over: two of 2 s fit
    assert _steps(length, clock, 3, [5.0, 1.0]) == 2  # after one of 5 s only one fits
    assert _steps(length, clock, 4, [3.0, 3.0, 3.0]) == 3  # it begins with what it knows of the round before


def test_who_comes_late_or_contributes_slowly_takes_fewer_steps() -> None:
    """So that all have contributed at about the same time."""
    clock = Watch()
    length = SoMuchTime(10.0, clock)
    assert _steps(length, clock, 1, 1.0) == 10
    assert _steps(length, clock, 2, 1.0, elapsed=4.0) == 6
    assert _steps(length, clock, 3, 1.0, elapsed=400.0) == 1
    length.contributed(3.0)
    assert _steps(length, clock, 4, 1.0) == 7
    assert _steps(length, clock, 5, 1.0, elapsed=4.0) == 3
    length.contributed(0.0)
    assert _steps(length, clock, 6, 1.0) == 10


def test_counted_steps_tell_nobody() -> None:
    length = SoManySteps(3)
    assert [length.is_last(1, step) for step in range(3)] == [None] * 3
    assert [length.is_over(step, False) for step in range(3)] == [False, False, True]
    assert not length.is_over(0, True), "a neighbour does not end a round that is counted"


def test_recorded_steps_and_those_of_the_stage_before() -> None:
    taken = {("home", 1): 1, ("home", 2): 3, ("dc", 2): 7}
    recorded = AsRecorded("home", lambda replica, round_: taken[replica, round_])
    assert [_steps(recorded, Watch(), round_, 1.0) for round_ in (1, 2)] == [1, 3]
    assert AsTold().is_last(1, 0) is None
    assert [AsTold().is_over(5, told) for told in (False, True)] == [False, True]


def test_steps_taken_are_part_of_a_state_where_they_do_not_follow_from_the_round(tmp_path: Path) -> None:
    counted, timed = StepsTaken(4), StepsTaken(None)
    for steps in (4, 4):
        counted.end_round(steps)
    for steps in (2, 9):
        timed.end_round(steps)
    assert [counted.before(round_) for round_ in (1, 2, 9)] == [0, 4, 32]
    assert (timed.before(3), timed.last) == (11, 9)
    counted.save(tmp_path)
    assert not list(tmp_path.iterdir())
    timed.save(tmp_path)
    again = StepsTaken(None)
    assert (again.before(1), again.last) == (0, None)
    again.load(tmp_path)
    assert (again.before(3), again.last) == (11, 9)
