"""Slots and their holders: incarnations, generations, refusals, fencing, and replicas that lost a member."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from members import TIMEOUT, assign_all, in_thread
from small_run import GRACE, LEASE, Run, closed

from hetero_pp.core.errors import IncarnationOver, Refused, StoreError, Suspended
from hetero_pp.messages.messages_pb2 import (
    INCARNATION_OVER,
    SILENT,
    SUSPENDED,
    HeartbeatReply,
    KeptSteps,
    Report,
    RoundRecord,
)
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.rounds.coordinator import REFORM_SECONDS

MIXED = {"dc": 1, "home": 2}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, MIXED, lease=LEASE)
    run.assign(0)
    return run


# ---- incarnations ----


def test_a_process_that_asks_twice_has_one_incarnation(tmp_path: Path) -> None:
    run = Run(tmp_path, MIXED)
    run.exchange.died("dc", "its host said so")
    assert [run.exchange.join("dc", "", process="a process") for _ in range(3)] == [2, 2, 2]
    assert run.exchange.log.incarnations()["dc"] == 2


def test_a_second_process_is_refused_while_the_first_is_there(run: Run) -> None:
    with pytest.raises(Refused, match="found a second process of `dc`"):
        run.exchange.join("dc", "", process="another")
    assert run.exchange.heartbeat(Caller("dc", 1)) == HeartbeatReply()
    assert run.exchange.log.incarnations()["dc"] == 1


def test_a_vacant_slot_is_taken_with_the_next_incarnation(run: Run) -> None:
    """The cause of the vacancy does not matter. Calls of the previous incarnation are refused."""
    for incarnation in (2, 3):
        run.exchange.died("dc", "its host said so")
        assert run.exchange.join("dc", "", process=f"process {incarnation}") == incarnation
    assert run.exchange.log.incarnations() == {"dc": 3, "home.0": 1, "home.1": 1}
    for work in (
        partial(run.exchange.assign, Caller("dc", 2), 0),
        partial(run.deposit, 1, "dc", incarnation=2),
        partial(run.exchange.record, 1, Caller("dc", 2)),
    ):
        with pytest.raises(IncarnationOver, match="another process holds this slot now"):
            work()
    assert run.exchange.heartbeat(Caller("dc", 2)).is_over
    assert not run.exchange.heartbeat(Caller("dc", 3)).is_over
    failed = Report(member="dc")
    failed.failure.cause = "a frozen process that resumes"
    run.exchange.report([failed], Caller("dc", 2))
    run.exchange.runner.require_alive()
    run.exchange.broken(Caller("dc", 2), 2, "an old one's complaint")
    run.exchange.left("dc", incarnation=2)
    assert run.exchange.coordinator.holds("dc", 3)


def test_of_two_that_wait_for_a_slot_the_later_one_gets_it(run: Run) -> None:
    """The earlier one may have ended in the meantime. If it has not, it is refused."""
    run.passes(LEASE.least / 2, heard=("home.0", "home.1"))
    first = in_thread(lambda: run.exchange.join("dc", "", process="first"))
    slot = run.exchange.coordinator.slots["dc"]
    run.exchange.runner.wait_until(lambda: slot.applicant == "first")
    second = in_thread(lambda: run.exchange.join("dc", "", process="second"))
    with pytest.raises(Refused, match="dc: another process has requested this slot in the meantime"):
        first.result(TIMEOUT)
    assert not second.done()
    run.passes(LEASE.least / 2 + 1, heard=("home.0", "home.1"))
    assert second.result(TIMEOUT) == 2


def test_another_process_takes_the_slot_of_a_silent_member(run: Run) -> None:
    run.passes(LEASE.least + 1, heard=("home.0", "home.1"))
    assert run.exchange.join("dc", "", process="another") == 2
    with pytest.raises(IncarnationOver):
        run.exchange.record(1, Caller("dc", 1))


def test_who_comes_after_somebody_silent_waits_for_the_end_of_its_lease(run: Run) -> None:
    """A restarted machine need not be refused, and a slow member keeps its slot."""
    run.passes(LEASE.least / 2, heard=("home.0", "home.1"))
    waits = in_thread(lambda: run.exchange.join("dc", "", process="another"))
    run.exchange.runner.wait_until(lambda: run.exchange.coordinator.slots["dc"].applicant == "another")
    assert not waits.done()
    run.passes(LEASE.least / 2 + 1, heard=("home.0", "home.1"))
    assert waits.result(TIMEOUT) == 2
    silent = [one for one in run.told() if one.what == SILENT]
    assert [(one.slot, one.incarnation) for one in silent] == [("dc", 1)]
    assert "no heartbeat arrived for 15 s" in silent[0].cause


@pytest.mark.parametrize(
    ("gaps", "lease"),
    [((10.0, 14.0), LEASE.factor * 14.0), ((2.7 * LEASE.least,), LEASE.factor * LEASE.least)],
    ids=["a slow link", "a freeze"],
)
def test_a_lease_is_three_times_the_longest_silence_that_ended_with_a_heartbeat(
    run: Run, gaps: tuple[float, ...], lease: float
) -> None:
    """A slow link is not a death. A silence longer than a lease counts as one: a freeze makes no round wait longer."""
    others = ("home.0", "home.1")
    for gap in gaps:
        run.passes(gap, heard=others)
        run.exchange.heartbeat("dc")
    run.passes(lease - 1, heard=others)
    assert run.exchange.coordinator.slots["dc"].is_heard
    run.passes(2, heard=others)
    assert not run.exchange.coordinator.slots["dc"].is_heard


def test_a_lost_connection_is_no_death_but_is_waited_for_less_long(run: Run) -> None:
    others = ("home.0", "home.1")
    for gap in (10.0, 14.0):
        run.passes(gap, heard=others)
        run.exchange.heartbeat("dc")
    run.exchange.left("dc", incarnation=1)
    run.passes(LEASE.least - 1, heard=others)
    assert run.exchange.coordinator.slots["dc"].is_heard
    run.exchange.heartbeat("dc")  # it is heard again
    run.passes(LEASE.factor * 10.0, heard=others)
    assert run.exchange.coordinator.slots["dc"].is_heard
    run.exchange.heartbeat("dc")
    run.exchange.left("dc", incarnation=1)
    run.passes(LEASE.least + 1, heard=others)
    assert not run.exchange.coordinator.slots["dc"].is_heard


def test_a_silent_stage_is_not_waited_for_and_continues_its_round_once_it_is_heard(run: Run) -> None:
    """It was frozen or cut off for less than three leases. Nobody of its group returns to the start of the round."""
    run.deposit(1, "home.0", generation=2)
    run.passes(2 * LEASE.least, heard=("dc", "home.0"))
    assert run.exchange.coordinator.waited_for == ["dc"]
    assert (
        run.exchange.heartbeat(Caller("home.1", 1), 1, 2)
        == run.exchange.heartbeat(Caller("home.0", 1), 1, 2)
        == HeartbeatReply()
    )
    assert run.exchange.coordinator.waited_for == ["dc", "home"]
    run.deposit(1, "home.1", generation=2)
    run.deposit(1, "dc")
    assert run.counted(1) == {"dc": 1, "home": 2}
    assert not run.told()


def test_a_round_closes_without_a_silent_member_which_applies_it_and_takes_the_next(run: Run) -> None:
    run.passes(LEASE.least + 1, heard=("home.0", "home.1"))
    run.deposit(1, "home.0", "home.1", generation=2)
    assert (run.counted(1), run.late(1)) == ({"home": 2}, ["dc"])
    run.deposit(1, "dc", incarnation=1)
    assert run.exchange.record(1, Caller("dc", 1)).round == 1
    assert run.exchange.coordinator.holds("dc", 1)


def test_a_stage_that_cannot_reach_a_silent_neighbour_reforms_its_replica_at_once(run: Run) -> None:
    """It has given the round up. It would train the same round of the same generation again, and again in vain."""
    run.passes(LEASE.least + 1, heard=("dc", "home.0"))
    assert run.exchange.coordinator.holds("home.1", 1)
    run.exchange.broken(Caller("home.0", 1), 2, "home.1 does not answer")
    assert not run.exchange.coordinator.holds("home.1", 1)
    assert run.exchange.heartbeat(Caller("home.0", 1)).suspended == 2
    assert [(one.slot, one.cause) for one in run.told() if one.what == SILENT] == [
        ("home.1", "no heartbeat arrived for 15 s")
    ]


def test_silence_of_three_leases_ends_an_incarnation_and_who_is_heard_keeps_its_slot(run: Run) -> None:
    others = ("home.0", "home.1")
    run.passes(20 * LEASE.most, heard=("dc", *others))
    assert all(run.exchange.coordinator.slots[member].held for member in run.roster.members)
    run.passes(3 * LEASE.least - 1, heard=others)
    assert run.exchange.coordinator.holds("dc", 1)
    run.passes(2, heard=others)
    assert not run.exchange.coordinator.holds("dc", 1)
    silent = [(one.slot, one.cause) for one in run.told() if one.what == SILENT]
    assert silent == [("dc", "no heartbeat arrived for 45 s")]


# ---- a group that lost a stage ----


def test_the_others_of_a_replica_return_and_it_is_formed_anew(run: Run) -> None:
    """It gets a new generation and the new member's address. Contributions of the old generation are void."""
    run.deposit(1, "home.0", generation=2)
    waits = in_thread(lambda: run.exchange.record(1, Caller("home.0", 1)))
    run.exchange.died("home.1", "killed by a test")
    with pytest.raises(Suspended, match=r"home\.1: killed by a test"):
        waits.result(TIMEOUT)
    membership_event = run.exchange.heartbeat(Caller("home.0", 1))
    assert (membership_event.is_over, membership_event.suspended) == (False, 2)
    run.exchange.join("home.1", "")
    with pytest.raises(Suspended, match="home has a new generation"):
        run.deposit(1, "home.0", generation=2)
    assert run.exchange.heartbeat("dc") == HeartbeatReply()
    work = assign_all(run.exchange, 0, ["home.0", "home.1"])
    assert {(one.round, one.generation) for one in work.values()} == {(1, 3)}
    assert run.exchange.heartbeat(Caller("home.0", 1)) == HeartbeatReply()
    run.deposit(1, "dc", "home.0", "home.1")
    assert run.counted(1) == {"dc": 1, "home": 3}
    told = [(one.what, one.slot) for one in run.told()]
    assert told == [(INCARNATION_OVER, "home.1"), (SUSPENDED, "home.1")]


def test_the_return_of_a_replica_is_told_once(tmp_path: Path) -> None:
    """Each heartbeat of a member that trains on repeats the order to it, and not the report to everybody."""
    run = Run(tmp_path, {"dc": 1, "home": 3})
    run.assign(0)
    run.exchange.died("home.2", "killed by a test")
    for _ in range(2):
        for member in ("home.0", "home.1"):
            assert run.exchange.heartbeat(Caller(member, 1), 1, 3).suspended == 3
    assert [(one.what, one.slot) for one in run.told()] == [(INCARNATION_OVER, "home.2"), (SUSPENDED, "home.2")]


@pytest.mark.parametrize("cause", ["killed by a test", "home.1: killed by a test"])
def test_a_cause_names_its_slot_once(run: Run, cause: str) -> None:
    run.exchange.died("home.1", cause)
    with pytest.raises(Suspended, match=r"^home\.1: killed by a test$"):
        run.exchange.record(1, Caller("home.0", 1))


def test_who_asks_learns_where_the_stage_after_listens_now(run: Run) -> None:
    run.exchange.died("home.1", "killed by a test")
    run.exchange.join("home.1", "")
    waits = in_thread(lambda: run.exchange.assign("home.0", 0, "here:1"))
    run.exchange.assign("home.1", 0, "there:2")
    found = waits.result(TIMEOUT)
    assert (found.upstream, found.downstream) == ("", "there:2")


def test_the_stage_after_dials_where_only_the_one_before_is_reached(run: Run) -> None:
    """The exchange's knowledge of reachability holds for an address, not for a member at a new address."""
    for member, address, is_reached in (
        ("home.0", "here:2", True),
        ("home.1", "there:1", False),
        ("home.1", "there:2", True),
    ):
        run.exchange.dialled(member, address, is_reached)
        ways = _ways(run, "here:1", "there:2")
        assert ways == {"home.0": ("", "there:2"), "home.1": ("", "")}
    run.exchange.dialled("home.1", "there:2", False)
    assert _ways(run, "here:1", "there:2") == {"home.0": ("", ""), "home.1": ("here:1", "")}
    assert _ways(run, "here:1", "relay") == {"home.0": ("", ""), "home.1": ("here:1", "")}
    dials = {slot.name: slot.dials for slot in run.exchange.status().slots}
    assert dials == {"dc": "", "home.0": "", "home.1": "here:1"}


def _ways(run: Run, *addresses: str) -> dict[str, tuple[str, str]]:
    """Return the addresses that the stages of a group are to dial, upstream and downstream.

    Both stages have joined again and listen at these addresses.
    """
    told = dict(zip(("home.0", "home.1"), addresses, strict=True))
    for member, address in told.items():
        run.exchange.died(member, "killed by a test")
        run.exchange.join(member, address)
    waits = {member: in_thread(partial(run.exchange.assign, member, 0, told[member])) for member in told}
    found = {member: waiting.result(TIMEOUT) for member, waiting in waits.items()}
    return {member: (work.upstream, work.downstream) for member, work in found.items()}


def test_what_is_whole_stays_counted_when_a_stage_is_gone(run: Run) -> None:
    """The other members wait for the record and need not train the round again."""
    run.deposit(1, "home.0", "home.1")
    run.exchange.died("home.1", "killed by a test")
    assert run.exchange.heartbeat(Caller("home.0", 1)) == HeartbeatReply()
    run.deposit(1, "dc")
    assert run.counted(1) == {"dc": 1, "home": 2}
    assert run.exchange.record(1, Caller("home.0", 1)).round == 1


def _leaves(run: Run, member: str) -> None:
    finished = Report(member=member)
    finished.finished.SetInParent()
    run.exchange.report([finished])
    assert not run.exchange.coordinator.slots[member].held


def _all_but_the_last_round(run: Run) -> None:
    for round_ in range(1, 10):
        run.deposit(round_, "dc", "home.0", "home.1")
        if round_ < 9:
            run.assign(round_)


def test_who_has_contributed_is_not_called_back_as_its_neighbour_leaves(run: Run) -> None:
    """The heartbeat was sent before the record of the last round and arrives after it. The member evaluates alone."""
    _all_but_the_last_round(run)
    run.assign(9, "home.0")
    _leaves(run, "home.0")
    assert run.exchange.heartbeat(Caller("home.1", 1), 9, 2) == HeartbeatReply()


def test_who_trains_what_was_contributed_before_is_called_back(run: Run) -> None:
    """A restarted exchange may not know of the contribution. No neighbour is left to train the round with."""
    _all_but_the_last_round(run)
    run.exchange.died("home.1", "killed by a test")
    run.exchange.join("home.1", "")
    run.assign(9, "home.1")
    _leaves(run, "home.1")
    assert run.exchange.heartbeat(Caller("home.0", 1), 9, 3).suspended == 3


def test_who_cannot_reach_a_neighbour_has_its_replica_formed_anew(run: Run) -> None:
    run.exchange.broken(Caller("home.0", 1), 2, "nothing came from home.1")
    assert run.exchange.heartbeat(Caller("home.0", 1)).is_over
    assert run.exchange.heartbeat(Caller("home.1", 1)).suspended == 2
    assert run.exchange.join("home.0", "") == 2
    run.exchange.broken(Caller("home.1", 1), 2, "nothing came from home.0")  # it means the generation before
    assert {one.generation for one in assign_all(run.exchange, 0, ["home.0", "home.1"]).values()} == {3}


# ---- another exchange takes over ----


def test_another_exchange_knows_who_holds_what_and_takes_contributions(run: Run) -> None:
    """Rounds and incarnations are in the log. Members report which round they train."""
    run.deposit(1, "dc", "home.0", "home.1")
    assert run.assign(1) == dict.fromkeys(run.roster.members, 2)
    run.deposit(2, "home.0")
    run.take_over()
    assert closed(run) == 1
    for member, generation in {"dc": 1, "home.0": 2, "home.1": 2}.items():
        assert run.exchange.heartbeat(member, 2, generation) == HeartbeatReply()
    run.deposit(2, "home.0", "home.1", "dc", incarnation=1)
    assert run.counted(2) == {"dc": 1, "home": 2}
    assert run.assign(2) == dict.fromkeys(run.roster.members, 3)


def test_a_incarnation_is_never_given_twice_by_two_exchanges(tmp_path: Path) -> None:
    """The store decides which exchange was first. The second process waits until the first has gone."""
    run = Run(tmp_path, MIXED)
    first = run.exchange
    run.take_over()
    first.died("dc", "as the first heard")
    run.exchange.died("dc", "as the second heard")
    assert first.join("dc", "", process="one") == 2
    waits = in_thread(lambda: run.exchange.join("dc", "", process="other"))
    run.exchange.runner.wait_until(lambda: run.exchange.coordinator.holds("dc", 2))
    assert not waits.done()
    run.exchange.died("dc", "as the second heard")
    assert waits.result(TIMEOUT) == 3


def test_who_trains_a_round_that_is_not_open_here_yet_takes_part_in_it(run: Run) -> None:
    """Another exchange assigned that round, and had closed the previous one without this member."""
    behind = run.exchange
    run.take_over()
    run.deposit(1, "home.0", "home.1")
    run.passes(GRACE.most, heard=("dc",))
    assert run.counted(1).keys() == {"home"}
    assert run.assign(1, "dc") == {"dc": 2}
    assert closed(run) == 1
    assert behind.coordinator.last_round == 0
    assert behind.heartbeat(Caller("dc", 1), 2, 1) == HeartbeatReply()
    assert behind.coordinator.last_round == 1
    assert behind.coordinator.open is not None
    assert "dc" in behind.coordinator.open.taking_part


@pytest.mark.parametrize("is_told_first", [False, True])
def test_another_exchange_waits_for_a_group_that_lost_a_stage(is_told_first: bool, run: Run) -> None:
    """It has not heard whether the group trains: the stage died with the exchange, and the others keep their steps."""
    run.take_over(*(["home.1"] if is_told_first else []))
    run.deposit(1, "dc")
    if not is_told_first:
        run.exchange.died("home.1", "its host died with the exchange")
    kept = KeptSteps(round=1, generation=2, applied=3)
    waits = in_thread(lambda: run.exchange.assign("home.0", 0, kept=kept))
    run.exchange.runner.wait_until(lambda: run.exchange.coordinator.slots["home.0"].asked is not None)
    run.exchange.join("home.1", "")
    resumption = run.exchange.assign("home.1", 0).resumption
    assert (resumption.step, [one.slot for one in resumption.restarts]) == (3, ["home.1"])
    assert waits.result(TIMEOUT).resumption == resumption
    run.deposit(1, "home.0", "home.1")
    assert run.counted(1) == {"dc": 1, "home": 3}


def test_another_exchange_does_not_wait_for_a_stage_that_stays_away(run: Run) -> None:
    run.take_over()
    run.deposit(1, "dc")
    run.exchange.died("home.1", "its host died with the exchange")
    run.passes(REFORM_SECONDS - 1, heard=("dc", "home.0"))
    assert closed(run) == 0
    run.passes(2, heard=("dc", "home.0"))
    assert run.counted(1) == {"dc": 1}


def test_another_exchange_begins_although_its_store_fails_for_a_moment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.deposit(1, "dc", "home.0", "home.1")
    read, failed = run.log.read_record, list[int]()

    def fails_once(round_: int) -> RoundRecord:
        if not failed:
            failed.append(round_)
            raise StoreError("unreachable")
        return read(round_)

    monkeypatch.setattr(run.log, "read_record", fails_once)
    monkeypatch.setattr("replica_groups.exchange.runner.FIRST_PAUSE", 0.001)
    run.take_over()
    assert (failed, closed(run)) == ([1], 1)
