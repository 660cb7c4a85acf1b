"""Number of inner steps of a round: a fixed count, by a clock that the test moves, and as recorded."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from replica_groups.engines.ranks import Ranks
from replica_groups.member.inner_loops import RoundLength, StepsTaken


class Watch:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def _steps(length: RoundLength, clock: Watch, round_: int, a_step: float | list[float], elapsed: float = 0.0) -> int:
    """Return the number of steps of a round in which each step takes `a_step` seconds.

    The round was opened `elapsed` seconds before it begins here.
    """
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
    """This holds from the second round on. The first round ends as soon as the duration of a step is known."""
    clock = Watch()
    length = RoundLength(seconds=10.0, clock=clock.now)
    assert _steps(length, clock, 1, a_step) == max(2, expected)
    clock.time += 77.0  # the outer round does not count
    assert _steps(length, clock, 2, a_step) == expected
    assert _steps(length, clock, 3, a_step) == expected


def test_a_round_follows_the_time_that_its_steps_take() -> None:
    clock = Watch()
    length = RoundLength(seconds=10.0, clock=clock.now)
    assert _steps(length, clock, 1, 1.0) == 10
    assert _steps(length, clock, 2, [1.0, 1.0, 4.0, 2.0, 2.0]) == 5  # 6 s are over after three steps: two of 2 s fit
    assert _steps(length, clock, 3, [5.0, 1.0]) == 2  # after one of 5 s only one fits
    assert _steps(length, clock, 4, [3.0, 3.0, 3.0]) == 3  # it starts with the estimate of the previous round


def test_who_comes_late_or_contributes_slowly_takes_fewer_steps() -> None:
    """All replicas then contribute at about the same time."""
    clock = Watch()
    length = RoundLength(seconds=10.0, clock=clock.now)
    assert _steps(length, clock, 1, 1.0) == 10
    assert _steps(length, clock, 2, 1.0, elapsed=4.0) == 6
    assert _steps(length, clock, 3, 1.0, elapsed=400.0) == 1
    length.contributed(3.0)
    assert _steps(length, clock, 4, 1.0) == 7
    assert _steps(length, clock, 5, 1.0, elapsed=4.0) == 3
    length.contributed(0.0)
    assert _steps(length, clock, 6, 1.0) == 10


def test_counted_steps_tell_nobody() -> None:
    length = RoundLength(3)
    assert [length.is_last(1, step) for step in range(3)] == [None] * 3
    assert [length.is_over(step, False) for step in range(3)] == [False, False, True]
    assert not length.is_over(0, True), "a neighbour does not end a round that is counted"


def test_recorded_steps_and_those_of_the_stage_before() -> None:
    taken = {("home", 1): 1, ("home", 2): 3, ("dc", 2): 7}
    recorded = RoundLength(steps_of=lambda round_: taken["home", round_])
    assert [_steps(recorded, Watch(), round_, 1.0) for round_ in (1, 2)] == [1, 3]
    assert RoundLength().is_last(1, 0) is None
    assert [RoundLength().is_over(5, told) for told in (False, True)] == [False, True]


class SideBySide(Ranks):
    """Ranks that take turns in one thread, the first before the others."""

    said: ClassVar[list[bytes]] = []

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert (data is None) == (not self.is_first)
        if data is not None:
            self.said.append(data)
        return self.said[-1]


def test_the_first_rank_decides_for_all() -> None:
    """The clocks of the other ranks do not matter."""
    first, other = Watch(), Watch()
    lengths = [
        RoundLength(seconds=10.0, clock=clock.now, ranks=SideBySide(rank=rank, world=2))
        for rank, clock in enumerate((first, other))
    ]
    for length in lengths:
        length.begin(0.0)
    decided = []
    for step in range(4):
        decided.append([length.is_last(1, step) for length in lengths])
        first.time += 3.0
        other.time += 1000.0
    assert decided == [[False, False], [False, False], [True, True], [True, True]]


def test_steps_taken_are_part_of_a_state_where_they_do_not_follow_from_the_round(tmp_path: Path) -> None:
    counted, timed = StepsTaken("home", 4), StepsTaken("home", None)
    for round_, steps in enumerate((2, 9), start=1):
        counted.end_round(4, _record(round_, home=4))
        timed.end_round(steps, _record(round_, dc=70, home=steps))
    assert [counted.before(round_) for round_ in (1, 2, 9)] == [0, 4, 32]
    assert (timed.before(3), timed.last) == (11, 9)
    counted.save(tmp_path)
    assert not list(tmp_path.iterdir())
    timed.save(tmp_path)
    again = StepsTaken("home", None)
    assert (again.before(1), again.last) == (0, None)
    again.load(tmp_path)
    assert (again.before(3), again.last) == (11, 9)


def _record(round_: int, **steps: int) -> RoundRecord:
    entries = [ContributionEntry(replica=replica, steps=own) for replica, own in steps.items()]
    return RoundRecord(round=round_, contributions=entries)


def test_members_of_a_replica_expect_as_many_steps_whatever_became_of_them(tmp_path: Path) -> None:
    """One member was present although a round excluded it, one has an old state, and one has no state."""
    records = [_record(1, dc=70, home=5), _record(2, dc=70), _record(3, home=8), _record(4, dc=70)]
    there, old, new = (StepsTaken("home", None) for _ in range(3))
    there.end_round(5, records[0])
    there.save(tmp_path)
    for taken, record in zip((6, 8, 7), records[1:], strict=True):
        there.end_round(taken, record)
    old.load(tmp_path)
    for one in (there, old, new):
        one.catch_up(4, lambda round_: records[round_ - 1])
    assert [one.last for one in (there, old, new)] == [8, 8, 8]
    assert [one.before(5) for one in (there, old, new)] == [5 + 6 + 8 + 7, 5 + 8, 5 + 8]


def test_where_steps_are_counted_no_record_is_asked_for() -> None:
    def nobody(round_: int) -> RoundRecord:
        raise AssertionError(f"asked for round {round_}")

    counted = StepsTaken("home", 4)
    counted.catch_up(9, nobody)
    assert counted.before(10) == 36
