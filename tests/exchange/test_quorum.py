"""When a round closes: with all replicas, with a quorum after the grace window, or at the limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from deposits import deposit
from members import TIMEOUT
from small_run import GRACE, LIMIT, Run, closed

from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import LATE, NOT_AWAITED, PAUSED, WENT_ON
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.exchange_service import Caller

THREE = {"a": 1, "b": 1, "c": 1}
FOUR = {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of four replicas, of which two are a quorum."""
    run = Run(tmp_path, FOUR)
    run.assign(0)
    return run


def test_all_who_are_there_are_enough_at_once(run: Run) -> None:
    run.deposit(1, "a", "b", "c")
    assert closed(run) == 0
    run.deposit(1, "d")
    assert run.counted(1).keys() == FOUR.keys()
    assert run.late(1) == []


def test_a_quorum_waits_for_the_others_as_long_as_the_grace_window_is(run: Run) -> None:
    """The grace window starts at its maximum."""
    run.deposit(1, "a")
    run.passes(5 * GRACE.most)  # below a quorum the round stays open, however long it takes
    assert closed(run) == 0
    run.deposit(1, "b")
    run.passes(GRACE.most - 1)
    assert closed(run) == 0
    run.passes(1)
    assert run.counted(1).keys() == {"a", "b"}
    assert run.late(1) == ["c", "d"]


def test_the_window_follows_what_was_seen(run: Run) -> None:
    """The window is `factor` times the 90th percentile of lateness, and at least `least`."""
    run.deposit(1, "a", "b")
    run.passes(20)
    run.deposit(1, "c", "d")
    assert closed(run) == 1
    run.assign(1)
    run.deposit(2, "a", "b")
    run.passes(GRACE.factor * 20 - 1)
    assert closed(run) == 1
    run.passes(1)
    assert run.counted(2).keys() == {"a", "b"}


def test_who_comes_too_late_is_waited_for_longer_the_next_time(run: Run) -> None:
    """Otherwise a replica that is always a little later than the window would never be included."""
    run.deposit(1, "a", "b", "c")
    run.passes(GRACE.most)
    assert run.counted(1).keys() == {"a", "b", "c"}
    assert run.exchange.coordinator.lateness.grace == GRACE.least  # because no included replica was late
    run.passes(5)
    run.deposit(1, "d")
    assert run.exchange.runner.refusals.counts.total() == 0
    assert run.counted(1).keys() == {"a", "b", "c"}
    assert run.exchange.coordinator.lateness.grace == GRACE.most
    assert run.assign(1) == dict.fromkeys(FOUR, 2)
    run.deposit(2, "a", "b", "c")
    run.passes(5 * GRACE.least)
    run.deposit(2, "d")
    assert run.counted(2).keys() == FOUR.keys()


def test_what_comes_late_is_told_once_however_many_blobs_it_has(run: Run) -> None:
    run.deposit(1, "a", "b", "c")
    run.passes(GRACE.most)
    for _ in range(2):
        run.deposit(1, "d")
    run.deposit(1, "a")  # it is included, and is sent once more
    assert [(one.what, one.replica, one.round) for one in run.told()] == [(LATE, "d", 1)]


@pytest.mark.parametrize("later", [-5, 1])
def test_at_the_limit_and_beyond_a_quorum_is_enough_at_once(run: Run, later: int) -> None:
    run.deposit(1, "a")
    run.passes(LIMIT + later)
    assert closed(run) == 0
    run.deposit(1, "b")
    if later < 0:
        assert closed(run) == 0
        run.passes(-later)
    assert run.counted(1).keys() == {"a", "b"}


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 1), (0.3, 1), (0.5, 2), (1.0, 3)])
def test_a_quorum_is_a_share_of_all_replicas(tmp_path: Path, quorum: float, needed: int) -> None:
    """The number is rounded up, and is at least one."""
    run = Run(tmp_path, THREE, quorum)
    run.assign(0)
    for count, replica in enumerate(THREE, 1):
        run.deposit(1, replica)
        run.passes(GRACE.most)
        assert closed(run) == (1 if count >= needed else 0)
        if closed(run):
            break


def test_a_group_counts_once_it_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, {"dc": 1, "home": 2}, quorum=1.0)
    run.assign(0)
    run.deposit(1, "dc", "home.0")
    run.passes(LIMIT + 1)
    assert closed(run) == 0
    run.deposit(1, "home.1")
    assert run.counted(1) == {"dc": 1, "home": 2}


def test_below_a_quorum_the_run_pauses_says_so_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, THREE, quorum=0.6)
    run.assign(0)
    run.deposit(1, "a")
    for replica in "bc":
        run.exchange.died(replica, "its host said so")
    run.passes(3 * LIMIT)
    assert closed(run) == 0
    run.exchange.join("b", "")
    run.assign(0, "b")
    run.deposit(1, "b")
    assert run.counted(1) == {"a": 1, "b": 2}
    told = [(one.what, one.round) for one in run.told() if one.what in (PAUSED, WENT_ON)]
    assert told == [(PAUSED, 1), (WENT_ON, 1)]


def test_who_joins_late_waits_for_the_next_round(run: Run) -> None:
    """This keeps all replicas in step. Within the grace window, or without a quorum, it takes part at once."""
    for replica in "cd":
        run.exchange.died(replica, "its host said so")
    run.passes(GRACE.most)
    run.exchange.join("c", "")
    assert run.assign(0, "c") == {"c": 1}
    run.passes(1)
    run.exchange.join("d", "")
    waits = run.ask_in_thread("d", 0)
    run.deposit(1, "a", "b", "c")
    assert run.counted(1).keys() == {"a", "b", "c"}
    assert waits.result(TIMEOUT).round == 2
    for replica in "bcd":
        run.exchange.died(replica, "its host said so")
    run.assign(1, "a")
    run.passes(GRACE.most + 1)
    run.exchange.join("b", "")
    assert run.assign(1, "b") == {"b": 2}


@pytest.mark.parametrize("steps", [0, 2**62])
def test_steps_that_nobody_can_have_taken_are_refused(steps: int, tmp_path: Path) -> None:
    """With zero steps all weights could be zero and theta NaN.

    Very large counts overflow the record's field of tokens.
    """
    run = Run(tmp_path, THREE, quorum=1.0, weighs_tokens=True)
    run.assign(0)
    run.deposit(1, "b", "c")
    for block in sorted(run.roster.blocks["a"]):
        address = BlobAddress("run", 1, "a", block)
        with pytest.raises(Refused, match=f"`{block}`: found {steps} inner steps, expected 1 to 4294967296"):
            deposit(run.exchange, "a", address, run.blob(address), steps=steps)
    assert not list(tmp_path.glob("round-*/a")), "what is refused was kept"
    run.deposit(1, "a")
    assert list(tmp_path.glob("round-*/a"))
    assert [one.tokens for one in run.exchange.record(1).contributions] == [700, 700, 700]


# ---- replicas that take every round and contribute nothing ----


def _rounds_without(run: Run, absent: str, rounds: int) -> list[float]:
    """Let all replicas but one contribute in so many rounds. Return the seconds that each round takes."""
    found = []
    for round_ in range(closed(run) + 1, closed(run) + 1 + rounds):
        run.assign(round_ - 1)
        began = run.clock.time
        run.deposit(round_, *(name for name in run.roster.members if name != absent))
        while closed(run) < round_:
            run.passes(1)
        found.append(run.clock.time - began)
    return found


def test_who_contributes_nothing_is_waited_for_three_times_and_then_seldom(run: Run) -> None:
    assert _rounds_without(run, "d", 5) == [GRACE.most, GRACE.least, GRACE.least, 0, 0]
    assert run.late(5) == ["d"]
    told = [one for one in run.told() if one.what == NOT_AWAITED]
    assert [(one.replica, one.round, one.cause) for one in told] == [
        ("d", 3, "missed 3 rounds in a row: rounds of the next 1:40")
    ]


def test_who_contributes_is_waited_for_again(run: Run) -> None:
    """At once if it was in time, and seldom if it was late: a slightly slower replica would never be included."""
    _rounds_without(run, "d", 3)
    run.assign(3)
    run.passes(10 * GRACE.least)
    run.deposit(4, "a", "b", "c")
    assert run.counted(4).keys() == {"a", "b", "c"}
    assert _rounds_without(run, "d", 2) == [GRACE.least, 0]
    run.assign(6)
    run.deposit(7, "a", "b", "d", "c")
    assert run.counted(7).keys() == FOUR.keys()
    assert _rounds_without(run, "d", 1) == [GRACE.least]


def test_optional_replicas_that_contribute_nothing_keep_no_round_open(tmp_path: Path) -> None:
    """After the limit of one round they no longer belong to the quorum, until they contribute."""
    run = Run(tmp_path, {"dc": 1, "x": 1, "y": 1, "z": 1}, optional=["x", "y", "z"])
    run.assign(0)
    run.deposit(1, "dc")
    run.passes(LIMIT - 1)
    assert closed(run) == 0
    run.passes(1)
    assert run.counted(1).keys() == {"dc"}
    run.assign(1)
    run.deposit(2, "dc")
    run.passes(GRACE.most)
    assert run.counted(2).keys() == {"dc"}


def test_who_takes_a_round_and_contributes_nothing_does_not_keep_others_out_for_ever(tmp_path: Path) -> None:
    """A late replica waits for the next round, but not beyond the limit of the open one."""
    run = Run(tmp_path, {"x": 1, "dc": 1}, optional=["x", "dc"])
    run.exchange.died("dc", "its host said so")
    run.assign(0, "x")
    run.passes(GRACE.most + 1)
    run.exchange.join("dc", "")
    waits = run.ask_in_thread("dc", 0)
    run.passes(LIMIT - GRACE.most - 2)
    assert not waits.done()
    run.passes(1)
    assert run.assign(0, "dc") == {"dc": 1}  # it asks again, as every waiting member does
    run.deposit(1, "dc")
    run.passes(GRACE.most)
    assert run.counted(1).keys() == {"dc"}


# ---- the end ----


def _last_round(run: Run) -> None:
    for round_ in range(1, 10):
        run.assign(round_ - 1)
        run.deposit(round_, *run.roster.members)


def test_a_run_ends_though_a_member_only_sends_heartbeats(run: Run) -> None:
    """Members may use the longest grace window to fetch the last round, evaluate and leave."""
    _last_round(run)
    run.passes(GRACE.most - 1, heard=tuple(FOUR))
    assert not run.exchange.coordinator.is_through
    assert run.exchange.coordinator.holds("a", 1)
    run.passes(1, heard=tuple(FOUR))
    run.exchange.wait_until_finished()
    assert run.exchange.heartbeat(Caller("a", 1)).is_over
    run.exchange.join("a", "", process="again")  # nor can it keep the run open by joining again
    assert run.exchange.coordinator.is_through


def test_a_round_that_no_run_has_is_assigned_to_nobody(tmp_path: Path) -> None:
    """A stage that claims to train it would let the other stages of its group catch up without end."""
    run = Run(tmp_path, {"dc": 1, "home": 2})
    run.exchange.heartbeat("home.0", 2**32 - 1, run.exchange.coordinator.replicas["home"].generation)
    assert run.assign(0, "home.0", "home.1") == {"home.0": 1, "home.1": 1}
