"""The exchange: when rounds close, what it refuses, which waiting calls a failure ends, and that its log replays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from deposits import deposit
from log_files import folder_of
from members import assign_all, in_thread, patient
from three_members import (
    FIRST,
    GENERATIONS,
    LAST,
    ROSTER,
    ROUNDS,
    SETTINGS,
    SHAPE,
    TIMEOUT,
    _address,
    _blob,
    _counted,
    _deposit_all,
    _deposit_all_others,
    _deposits,
    _hashes,
    _in_threads,
    _reports,
    training,
)

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import Refused, RunFailed
from hetero_pp.messages.messages_pb2 import EXCLUDED, HEALED, BlobEntry, MembershipEvent, Report
from hetero_pp.outer.step import parameters_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, contribution_digest
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import Coordinator
from replica_groups.rounds.rules import Rules

# ---- rounds ----


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    return initial_checkpoint(SHAPE, rank=4, seed=1)


@pytest.fixture
def exchange(checkpoint: RunCheckpoint, tmp_path: Path) -> Iterator[Exchange]:
    with training(checkpoint, tmp_path / "log") as exchange:
        yield exchange


@pytest.mark.parametrize("turn", range(0, 10, 3))
def test_a_round_closes_with_the_last_blob_and_not_before(
    exchange: Exchange, checkpoint: RunCheckpoint, turn: int
) -> None:
    """Any blob may be the last one."""
    deposits = _deposits()
    assert len(deposits) == 10
    for member, address in deposits[turn:] + deposits[:turn]:
        with pytest.raises(FileNotFoundError):
            exchange.log.read_record(1)
        with pytest.raises(Refused, match="closed round"):
            exchange.fetch("dc", 1, address.replica, address.block)
        deposit(exchange, member, address, _blob(checkpoint, address))
    assert exchange.log.read_record(1).round == 1
    for member, address in deposits:
        assert exchange.fetch(member, 1, address.replica, address.block) == _blob(checkpoint, address)


def test_a_record_names_what_was_counted_in_replica_order_and_the_log_holds_it(
    exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    _deposit_all(exchange, checkpoint, steps=7)
    record, folder = exchange.record(1), folder_of(exchange.log) / "round-000001"
    assert exchange.log.read_record(1) == record
    assert (folder / "record.json").read_text().startswith("{")
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert len(files) == 1 + len(_deposits())
    assert [entry.replica for entry in record.contributions] == ["dc", "home"]  # home's blobs were deposited first
    for entry in record.contributions:
        assert (entry.weight, entry.generation, entry.steps) == (1.0, GENERATIONS[entry.replica], 7)
        assert entry.tokens == {"home": 700, "dc": 2100}[entry.replica]
        assert [blob.block for blob in entry.blobs] == sorted(FIRST | LAST)
        for blob in entry.blobs:
            data = _blob(checkpoint, _address(entry.replica, blob.block))
            assert (blob.sha256, blob.size) == (hashlib.sha256(data).digest(), len(data))
            name = f"{blob.block}.{blob.sha256.hex()[:16]}.blob"
            assert files[f"{entry.replica}/{entry.generation}/{name}"].read_bytes() == data
        assert entry.digest == contribution_digest(entry.blobs)
    assert record.contributions[0].digest != record.contributions[1].digest
    assert list(record.late) == []


# ---- refusals ----


def _expect_refusal(exchange: Exchange, match: str, work: Callable[[], object]) -> None:
    before = exchange.runner.refusals.counts.total()
    with pytest.raises(Refused, match=match):
        work()
    assert exchange.runner.refusals.counts.total() == before + 1


def test_deposits_that_are_refused_do_not_stop_the_run(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    good = _address("dc", "norm")
    blob = _blob(checkpoint, good)
    for match, member, address, data in (
        ("round 2", "dc", replace(good, round=2), _blob(checkpoint, replace(good, round=2))),
        ("round 0", "dc", replace(good, round=0), _blob(checkpoint, replace(good, round=0))),
        ("not belong to this member", "home.0", good, blob),
        ("not belong to this member", "home.0", _address("home", "norm"), _blob(checkpoint, _address("home", "norm"))),
        ("not belong to this member", "dc", replace(good, block="layers.9"), blob),
        ("not a member", "stranger", good, blob),
        ("not a blob", "dc", good, b"\xff" * 40),
        ("digest does not match the content", "dc", good, blob[:-1]),
        ("announced", "dc", good, b""),
        (r"replica='home'.*expected.*replica='dc'", "dc", good, _blob(checkpoint, _address("home", "norm"))),
        (r"round=2.*expected.*round=1", "dc", good, _blob(checkpoint, _address("dc", "norm", round_=2))),
        ("another run", "dc", replace(good, run="another run"), _blob(checkpoint, replace(good, run="another run"))),
    ):
        _expect_refusal(exchange, match, partial(deposit, exchange, member, address, data))
    assert exchange.runner.refusals.counts.total() == 12
    told = [report.refusal.sender for report in _reports(exchange) if report.HasField("refusal")]
    assert len(told) == 12 and set(told) == {"dc", "home.0", "stranger"}
    _deposit_all(exchange, checkpoint)
    assert len(exchange.record(1).contributions) == 2
    assert {path.name for path in folder_of(exchange.log).iterdir()} == {"round-000001", "incarnations"}


def test_the_same_blob_is_taken_once_and_a_second_different_one_leaves_it_in_the_log(
    exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    """The record names the first blob, so receivers must get the first blob."""
    address = _address("dc", "norm")
    for _ in range(3):
        deposit(exchange, "dc", address, _blob(checkpoint, address))
    assert exchange.runner.refusals.counts.total() == 0
    other = _blob(checkpoint, address, seed=1)
    _expect_refusal(exchange, "second, different", lambda: deposit(exchange, "dc", address, other))
    _deposit_all_others(exchange, checkpoint, address)
    named = next(blob for blob in exchange.record(1).contributions[0].blobs if blob.block == "norm")
    served = exchange.fetch("home.0", 1, "dc", "norm")
    assert named.sha256 == hashlib.sha256(_blob(checkpoint, address)).digest()
    assert hashlib.sha256(served).digest() == named.sha256


def test_joining_and_the_checkpoint(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    exchange.died("home.1", "its host said so")
    exchange.join("home.1", "127.0.0.1:5")
    _expect_refusal(exchange, "second process of `home.1`", lambda: exchange.join("home.1", "127.0.0.1:6"))
    _expect_refusal(exchange, "not a member", lambda: exchange.join("stranger", ""))
    _expect_refusal(exchange, "no tensor named", lambda: exchange.checkpoint(["norm.weight", "no.weight"]))
    given = exchange.checkpoint(["norm.weight", "subspace.basis"])
    assert given["norm.weight"].equal(checkpoint.parameters["norm.weight"])
    assert checkpoint.basis is not None
    assert given["subspace.basis"].equal(checkpoint.basis)


# ---- agreement and failure ----


def test_replicas_that_agree_are_told_with_their_hash(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    exchange.confirm("home.1", 1, _hashes(checkpoint, LAST))
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST))
    exchange.confirm("home.0", 1, _hashes(checkpoint, FIRST))
    verified = [report.round_verified for report in _reports(exchange) if report.HasField("round_verified")]
    expected = parameters_sha256(_hashes(checkpoint, FIRST | LAST))
    assert [(v.replica, v.round, v.parameters_sha256) for v in verified] == [("dc", 1, expected), ("home", 1, expected)]


WRONG = {"layers.1.attention.wk.weight": bytes(32)}


def _happened(exchange: Exchange) -> list[tuple[int, str, int]]:
    told = [report.membership_event for report in _reports(exchange) if report.HasField("membership_event")]
    return [(one.what, one.slot, one.round) for one in told]


def test_the_odd_one_out_is_told_to_heal(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """It is told once, with its next round. No other member is told, and the run continues."""
    _deposit_all(exchange, checkpoint)
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST))
    exchange.confirm("home.0", 1, _hashes(checkpoint, FIRST))
    exchange.confirm("home.1", 1, _hashes(checkpoint, LAST) | WRONG)
    exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    for round_, heals in ((2, {"home.1"}), (3, set())):
        work = assign_all(exchange, round_ - 1)
        assert {one.round for one in work.values()} == {round_}
        assert {member for member, one in work.items() if one.heals} == heals
        _deposit_all(exchange, checkpoint, round_)
    assert _happened(exchange) == [(HEALED, "home.1", 1)]


def test_guests_that_make_hashes_up_do_not_end_a_run(checkpoint: RunCheckpoint, tmp_path: Path) -> None:
    """The run log decides, even against a majority of guests.

    Each guest is told to recover once. After that it takes part in no round that a quorum can close without it.
    """
    roster = Roster({name: name for name in ("dc", "x", "y")}, dict.fromkeys(("dc", "x", "y"), FIRST | LAST))
    log = ContributionLog(FolderStore(tmp_path / "guests"))
    exchange = Exchange("run", roster, None, SETTINGS, log, rules=replace(patient(roster), quorum=0.3))
    for member in roster.members:
        exchange.join(Caller(member, holder=int(member != "dc")), "")
    exchange.begin(checkpoint)
    right = _hashes(checkpoint, FIRST | LAST)
    heals = [assign_all(exchange)]
    for round_ in (1, 2):
        for member in roster.members:
            if exchange.coordinator.replicas[member].round == round_:
                for block in sorted(FIRST | LAST):
                    address = BlobAddress("run", round_, member, block)
                    deposit(exchange, member, address, _blob(checkpoint, address))
        exchange.confirm(EXCHANGE, round_, right)
        for member in roster.members:
            exchange.confirm(member, round_, right if member == "dc" else right | WRONG)
        heals.append(assign_all(exchange, round_, None if round_ == 1 else ["dc"]))
    assert {member: work.heals for member, work in heals[1].items()} == {"dc": False, "x": True, "y": True}
    assert {member: work.round for member, work in heals[2].items()} == {"dc": 3}
    assert exchange.coordinator.waited_for == ["dc"]
    in_thread(lambda: exchange.assign("x", 2))
    own = exchange.coordinator.slots["x"]
    exchange.runner.wait_until(lambda: own.asked == 2 or exchange.coordinator.replicas["x"].round == 3)
    for block in sorted(FIRST | LAST):
        deposit(
            exchange, "dc", BlobAddress("run", 3, "dc", block), _blob(checkpoint, BlobAddress("run", 3, "dc", block))
        )
    assert [one.replica for one in exchange.record(3).contributions] == ["dc"]
    assert _happened(exchange) == [
        (HEALED, "x", 1),
        (HEALED, "y", 1),
        (HEALED, "x", 2),
        (EXCLUDED, "x", 2),
        (HEALED, "y", 2),
        (EXCLUDED, "y", 2),
    ]
    exchange.end_watching()


def test_a_member_that_differs_is_told_by_its_heartbeat(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    exchange.confirm("home.1", 1, _hashes(checkpoint, LAST) | WRONG)
    assert not exchange.heartbeat("home.1").differs
    exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    assert {member for member in exchange.roster.members if exchange.heartbeat(member).differs} == {"home.1"}
    for _ in range(2):  # the first answer may be lost
        work = assign_all(exchange, 1)
        assert {member for member, one in work.items() if one.heals} == {"home.1"}
    assert not exchange.heartbeat("home.1").differs


def test_a_coordinator_that_takes_over_heals_whoever_says_that_it_differs() -> None:
    """The coordinator that has found it out died before the member asked for work."""
    rules = Rules({"a": "a", "b": "b"}, dict.fromkeys("ab", FIRST))
    coordinator = Coordinator(rules, 0.0, {"a": 1, "b": 1}, goes_on=True)
    coordinator.step(e.Began(1, 5), 0.0)
    told = [coordinator.step(e.Asked(slot, 1, 1, differs=slot == "a"), 0.0) for slot in ("a", "b", "a")]
    heals = [(one.slot, one.round, one.heal) for effects in told for one in effects if isinstance(one, e.Assign)]
    assert heals == [("a", 2, True), ("b", 2, False), ("a", 2, True)]
    effects = coordinator.step(e.Confirmed("a", 1, 2, {"w": b"wrong"}), 0.0)
    effects += coordinator.step(e.Audited(2, {"w": b"right"}), 0.0)
    assert [one.what for one in effects if isinstance(one, MembershipEvent)] == [HEALED, EXCLUDED]


@pytest.mark.parametrize(("after", "is_barred"), [(-1, False), (0, True), (15, True), (16, False)])
def test_a_replica_is_barred_if_a_member_differs_again_within_16_rounds(after: int, is_barred: bool) -> None:
    coordinator = Coordinator(Rules({"a": "a", "b": "b"}, dict.fromkeys("ab", FIRST)))
    for slot in coordinator.slots.values():
        slot.take(1, None, 0.0, coordinator.rules)
    coordinator.slots["a"].healed_for = 20
    coordinator.step(e.Audited(20 + after, {"w": b"right"}), 0.0)
    effects = coordinator.step(e.Confirmed("a", 1, 20 + after, {"w": b"wrong"}), 0.0)
    assert any(isinstance(one, MembershipEvent) and one.what == EXCLUDED for one in effects) == is_barred


def test_a_member_that_was_assigned_an_old_generation_is_told_to_return() -> None:
    """A coordinator that knew less has assigned it. Its neighbours have contributed in the present one, and wait."""
    rules = Rules({"x.0": "x", "x.1": "x"}, {"x.0": FIRST, "x.1": LAST})
    coordinator = Coordinator(rules, 0.0, {"x.0": 2, "x.1": 1}, goes_on=True)
    coordinator.step(e.Began(0, 5), 0.0)
    coordinator.step(e.Deposited("x.0", 2, 1, 3, min(FIRST), BlobEntry(block=min(FIRST)), 10), 0.0)
    own, older = (coordinator.step(e.Heard("x.1", 1, 1, generation, 1, True), 0.0) for generation in (3, 2))
    assert own == []
    assert [(one.slot, one.generation) for one in older if isinstance(one, e.Suspend)] == [("x.1", 2)]


def test_if_all_replicas_of_the_operator_differ_the_run_ends(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """In that case the machine that replays the log may be at fault."""
    _deposit_all(exchange, checkpoint)
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST) | WRONG)
    exchange.confirm("home.0", 1, _hashes(checkpoint, FIRST))
    exchange.confirm("home.1", 1, _hashes(checkpoint, LAST) | WRONG)
    with pytest.raises(
        RunFailed, match=r"after round 1, dc, home hold a layers\.1\.attention\.wk\.weight that differs from"
    ):
        exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    address = _address("dc", "norm")
    for later in (
        lambda: exchange.record(1),
        lambda: deposit(exchange, "dc", address, _blob(checkpoint, address)),
        lambda: exchange.fetch("dc", 1, "home", "norm"),
        lambda: exchange.confirm("dc", 2, _hashes(checkpoint, FIRST | LAST)),
        lambda: exchange.assign("dc", 0),
        lambda: exchange.heartbeat("dc"),
        lambda: exchange.wait_until_finished(),
    ):
        with pytest.raises(RunFailed, match="wk"):
            later()


@pytest.mark.parametrize("left_out", [{"norm.weight"}, None], ids=["one", "all"])
def test_a_replica_that_leaves_out_a_parameter_is_refused(
    left_out: set[str] | None, exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    """The refusal ends no other member's run."""
    _deposit_all(exchange, checkpoint)
    hashes = _hashes(checkpoint, FIRST | LAST)
    told = {name: one for name, one in hashes.items() if left_out is not None and name not in left_out}
    _expect_refusal(exchange, r"no member of dc confirmed", lambda: exchange.confirm("dc", 1, told))
    assert exchange.record(1).round == 1
    exchange.confirm("dc", 1, hashes)
    assert [report.round_verified.replica for report in _reports(exchange) if report.HasField("round_verified")] == [
        "dc"
    ]


def test_whoever_waits_wakes_when_the_run_fails(exchange: Exchange) -> None:
    exchange.died("home.1", "its host said so")
    condition = _counted(exchange)

    def fail() -> None:
        for _ in range(3):
            assert condition.waiting.acquire(timeout=TIMEOUT)
        exchange.fail("a cause")

    errors = _in_threads(
        lambda: exchange.record(1),
        lambda: exchange.assign("home.0", 0),  # until a process holds the other slot
        exchange.wait_until_finished,
        fail,
    )
    assert [(type(error), str(error)) for error in errors] == [(RunFailed, "a cause")] * 3


def _fails(member: str, cause: str) -> Report:
    report = Report(member=member)
    report.failure.cause = cause
    return report


def test_a_members_failure_is_the_runs_once_no_quorum_is_left(exchange: Exchange) -> None:
    """The failure of one member does not end the run: its slot becomes vacant, and another process may take it."""
    exchange.report([_fails("home.1", "out of memory")])
    assert not exchange.coordinator.slots["home.1"].held
    exchange.join("home.1", "")
    exchange.report([_fails("dc", "out of memory")])
    exchange.join("dc", "")
    exchange.report([_fails("home.1", "no more heat")])
    exchange.runner.require_alive()
    with pytest.raises(RunFailed, match=r"dc: out of memory again"):
        exchange.report([_fails("dc", "out of memory again")])
        exchange.record(1)
    exchange.fail("a consequence")
    with pytest.raises(RunFailed, match="out of memory again"):  # the first cause is kept
        exchange.record(1)
    told = [report.failure.cause for report in _reports(exchange) if report.HasField("failure")]
    assert told == ["out of memory again", "a consequence"]


def test_the_run_is_over_when_every_member_has_finished(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    for round_ in range(1, ROUNDS + 1):
        _deposit_all(exchange, checkpoint, round_)
    assert {one.round for one in assign_all(exchange, ROUNDS).values()} == {0}
    condition = _counted(exchange)
    order: list[str] = []

    def finish() -> None:
        assert condition.waiting.acquire(timeout=TIMEOUT)
        for member in ROSTER.members:
            order.append(member)
            report = Report(member=member)
            report.finished.SetInParent()
            exchange.report([report])

    def wait() -> None:
        exchange.wait_until_finished()
        order.append("over")

    assert _in_threads(wait, finish) == []
    assert order == [*ROSTER.members, "over"]
