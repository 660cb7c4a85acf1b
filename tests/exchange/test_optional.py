"""Optional replicas: the run starts and continues without them, and includes them while they are present."""

from __future__ import annotations

from pathlib import Path

import pytest
from members import TIMEOUT, in_thread
from small_run import GRACE, ROUNDS, SETTINGS, Run, closed

from hetero_pp.core.errors import RunOver
from hetero_pp.messages.messages_pb2 import JOINING, PAUSED, WENT_ON, Nothing, Report
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds.coordinator import REFORM_SECONDS
from replica_groups.rounds.rules import Rules

MIXED = {"dc": 1, "one": 2, "two": 2}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run in which all replicas are present at first and only `dc` is required."""
    return Run(tmp_path, MIXED, quorum=1.0, optional=["one", "two"])


@pytest.mark.parametrize(
    ("there", "needed"), [(set(), 1), ({"dc"}, 1), ({"one"}, 2), ({"dc", "one"}, 2), ({"dc", "one", "two"}, 3)]
)
def test_a_quorum_is_of_those_that_are_needed_and_those_that_are_there(there: set[str], needed: int) -> None:
    slots = {"dc": "dc", "one.0": "one", "two.0": "two"}
    rules = Rules(slots, dict.fromkeys(slots, frozenset()), 1.0, optional=frozenset({"one", "two"}))
    assert rules.needed_of(there) == needed
    assert rules.needed == 1
    assert Rules(slots, rules.blocks, 1.0).needed_of(there) == 3


def test_a_round_closes_without_who_has_gone_at_once(run: Run) -> None:
    run.assign(0)
    run.deposit(1, "dc", "one.0", "one.1")
    run.passes(5 * GRACE.most)
    assert closed(run) == 0  # all three are present, and the quorum is all
    run.exchange.died("two.1", "its host is off")
    run.passes(REFORM_SECONDS - 1)
    assert closed(run) == 0  # a process that is started again would resume
    run.passes(1)
    assert run.counted(1).keys() == {"dc", "one"}
    assert run.late(1) == ["two"]


def test_who_comes_back_counts_again(run: Run) -> None:
    run.assign(0)
    for slot in ("one.0", "two.0"):
        run.exchange.died(slot, "its host is off")
    run.passes(REFORM_SECONDS)
    run.deposit(1, "dc")
    assert run.counted(1).keys() == {"dc"}
    run.exchange.join("one.0", "")
    waits = [run.ask_in_thread(slot, 1) for slot in ("one.0", "one.1")]
    assert run.assign(1, "dc") == {"dc": 2}
    assert [one.result(TIMEOUT).round for one in waits] == [2, 2]
    run.deposit(2, "dc")
    assert closed(run) == 1
    run.deposit(2, "one.0", "one.1")
    assert run.counted(2) == {"dc": 1, "one": 3}


def test_the_run_pauses_while_nobody_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path, {"one": 1, "two": 1}, optional=["one", "two"])
    run.assign(0)
    for replica in ("one", "two"):
        run.exchange.died(replica, "its host is off")
    run.exchange.join("two", "")
    assert run.assign(0, "two") == {"two": 1}
    run.deposit(1, "two")
    assert run.counted(1) == {"two": 2}
    assert [one.what for one in run.told() if one.what in (PAUSED, WENT_ON)] == [PAUSED, WENT_ON]


@pytest.mark.parametrize(
    ("optional", "begins_with"), [(["one", "two"], ["dc"]), (["dc", "one", "two"], ["two.1", "two.0"])]
)
def test_a_run_begins_with_whom_it_needs_or_else_with_the_first_that_is_whole(
    optional: list[str], begins_with: list[str], tmp_path: Path
) -> None:
    """No other member is named as missing."""
    run = Run(tmp_path / "roster", MIXED, optional=optional)
    log = ContributionLog(FolderStore(tmp_path / "log"))
    exchange = Exchange("run", run.roster, None, SETTINGS, log, rules=run.rules)
    joined = in_thread(exchange.wait_until_joined)
    exchange.join("one.0", "")
    for member in begins_with:
        expected = exchange.expected()
        assert (expected.awaited, expected.missing) == (JOINING, ["dc"])
        assert not joined.done()
        exchange.join(member, "")
    assert joined.result(TIMEOUT).keys() == {"one.0", *begins_with}


def test_free_slots_are_told_by_how_much_their_replica_lacks(run: Run) -> None:
    for slot in ("dc", "one.0", "one.1", "two.0"):
        run.exchange.died(slot, "its host is off")
    assert run.exchange.vacant() == ["dc", "two.0", "one.0", "one.1"]


# ---- the end of the run ----


def finish(run: Run, *members: str) -> None:
    """Report that these members have finished all their rounds."""
    run.exchange.report([Report(member=member, finished=Nothing()) for member in members])


def train_to_the_end(run: Run, *members: str) -> None:
    """Let these members contribute to every remaining round."""
    for round_ in range(closed(run) + 1, ROUNDS + 1):
        run.deposit(round_, *members)
        assert closed(run) == round_
        if round_ < ROUNDS:
            run.assign(round_, *members)


def told_of_the_end(run: Run) -> list[tuple[int, int, list[str]]]:
    watching = run.exchange.watch()
    run.exchange.end_watching()
    return [(one.over.round, one.over.rounds, list(one.over.finishing)) for one in watching if one.HasField("over")]


def test_the_end_waits_for_no_group_that_is_incomplete_or_took_no_part(run: Run) -> None:
    """`one` has lost a member. `two` is complete, but its members have not asked for work yet."""
    run.assign(0)
    run.exchange.died("one.1", "its host is off")
    run.exchange.died("two.0", "its host is off")
    run.passes(REFORM_SECONDS)
    run.deposit(1, "dc")
    run.exchange.join("two.0", "")
    run.assign(1, "dc")
    train_to_the_end(run, "dc")
    assert not run.exchange.coordinator.is_through
    with pytest.raises(RunOver, match=r"the run is over \(round 9 of 9\); no round was left to train"):
        run.exchange.require_going_on()
    assert run.assign(0, "one.0", "two.0") == {"one.0": 0, "two.0": 0}
    finish(run, "dc")
    assert run.exchange.coordinator.is_through
    held = {slot.name for slot in run.exchange.status().slots if slot.held}
    assert held == {"one.0", "two.0", "two.1"}
    assert told_of_the_end(run) == [(9, 9, ["dc"])]


def test_the_end_waits_for_a_group_that_trained_the_last_round_as_long_as_it_is_complete(run: Run) -> None:
    run.assign(0)
    run.exchange.died("two.1", "its host is off")
    run.passes(REFORM_SECONDS)
    train_to_the_end(run, "dc", "one.0", "one.1")
    finish(run, "dc")
    assert not run.exchange.coordinator.is_through
    run.exchange.died("one.1", "its host is off")  # `one.0` cannot evaluate the last round without it
    assert run.exchange.coordinator.is_through
    assert told_of_the_end(run) == [(9, 9, ["dc", "one"])]
