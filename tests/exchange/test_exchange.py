"""The exchange: when rounds close, what it refuses, which waiting calls a failure ends, and that its log replays."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from log_files import checkpoint_path, folder_of, stored_blob, stored_bytes
from members import assign_all, begin, in_thread, patient
from safetensors import safe_open
from torch import Tensor, nn

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, open_checkpoint
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import DamagedFile, HeteroPPError, MalformedContribution, Refused, RunFailed
from hetero_pp.messages.messages_pb2 import EXCLUDED, HEALED, MembershipEvent, Report, RoundRecord
from hetero_pp.model.transformer import ModelShape, block_of, shapes_by_block, shapes_of
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, parameter_sha256, parameters_sha256
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, contribution_digest, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.runner import Notifier
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import Coordinator
from replica_groups.rounds.rules import Rules

TIMEOUT = 10.0
SHAPE = ModelShape(width=16, layers=2, heads=2, feed_forward=24, vocabulary=64)
SETTINGS = OuterSettings(rounds=3, learning_rate=0.7, compression=CompressionSettings(density=1 / 8, tile=(8, 8)))
EMBEDDING = "tok_embeddings.weight"
FIRST = frozenset({"tok_embeddings", "layers.0"})
LAST = frozenset({"layers.1", "norm", "lm_head"})
ROSTER = Roster(
    members={"home.0": "home", "home.1": "home", "dc": "dc"},
    blocks={"home.0": FIRST, "home.1": LAST, "dc": FIRST | LAST},
    follows={"home.1": frozenset({"tok_embeddings"})},
)
GENERATIONS = {"home": 2, "dc": 1}
"""Generation of each replica: the sum of its members' incarnations, each of which is the first."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each member already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    return initial_checkpoint(SHAPE, rank=4, seed=1)


@pytest.fixture
def exchange(checkpoint: RunCheckpoint, tmp_path: Path) -> Iterator[Exchange]:
    """An exchange in which every member trains round 1."""
    log = ContributionLog(FolderStore(tmp_path / "log"))
    tokens = {"home": 100, "dc": 300}
    exchange = Exchange("run", ROSTER, None, SETTINGS, log, rules=patient(ROSTER), tokens_a_step=tokens)
    begin(exchange, checkpoint)
    assign_all(exchange)
    yield exchange
    exchange.end_watching()


def _address(replica: str, block: str, round_: int = 1) -> BlobAddress:
    return BlobAddress("run", round_, replica, block)


def _blob(checkpoint: RunCheckpoint, address: BlobAddress, seed: int = 0) -> bytes:
    """Return a valid blob for this address."""
    compression = SETTINGS.compression
    shapes = shapes_by_block(shapes_of(checkpoint.parameters))[address.block]
    selections = []
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed + len(name) + 1000 * len(address.replica))
        delta = torch.randn(shape, generator=generator)
        selections.append((name, shape, select(torch.zeros(shape), delta, compression)))
    return encode_blob(address, selections, compression)


def _deposits(round_: int = 1) -> list[tuple[str, BlobAddress]]:
    """Return every (member, address) that a round needs, with those of `home` first."""
    return [
        (member, _address(ROSTER.members[member], block, round_))
        for member in ("home.1", "home.0", "dc")
        for block in sorted(ROSTER.blocks[member])
    ]


def _deposit_all(exchange: Exchange, checkpoint: RunCheckpoint, round_: int = 1, steps: int = 0) -> None:
    """Deposit all blobs of a round. For rounds after the first, assign the round to all members before."""
    if round_ > 1:
        assign_all(exchange, round_ - 1)
    for member, address in _deposits(round_):
        exchange.deposit(member, address, _blob(checkpoint, address), steps=steps)


def _reports(exchange: Exchange) -> list[Report]:
    """Return all reports so far. There must be at least one."""
    watching = exchange.watch()
    first = next(watching)
    exchange.end_watching()
    return [first, *watching]


def _in_threads(*works: Callable[[], object]) -> list[HeteroPPError]:
    """Run all functions at once and return the errors that ended them."""
    errors: list[HeteroPPError] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except HeteroPPError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    return errors


# ---- rounds ----


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
        exchange.deposit(member, address, _blob(checkpoint, address))
    assert exchange.log.read_record(1).round == 1
    for member, address in deposits:
        assert exchange.fetch(member, 1, address.replica, address.block) == _blob(checkpoint, address)


def test_a_record_names_what_was_counted_in_replica_order(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint, steps=7)
    record = exchange.record(1)
    assert [entry.replica for entry in record.contributions] == ["dc", "home"]  # home's blobs were deposited first
    for entry in record.contributions:
        assert (entry.weight, entry.generation, entry.steps) == (1.0, GENERATIONS[entry.replica], 7)
        assert entry.tokens == {"home": 700, "dc": 2100}[entry.replica]
        assert [blob.block for blob in entry.blobs] == sorted(FIRST | LAST)
        for blob in entry.blobs:
            data = _blob(checkpoint, _address(entry.replica, blob.block))
            assert (blob.sha256, blob.size) == (hashlib.sha256(data).digest(), len(data))
        assert entry.digest == contribution_digest(entry.blobs)
    assert record.contributions[0].digest != record.contributions[1].digest
    assert list(record.late) == []


def test_the_next_round_opens_when_one_has_closed(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    for round_ in (1, 2, 3):
        _deposit_all(exchange, checkpoint, round_)
        assert exchange.record(round_).round == round_
    closed = [report.round_closed.round for report in _reports(exchange) if report.HasField("round_closed")]
    assert closed == [1, 2, 3]


def test_the_log_holds_the_record_and_the_blobs(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    folder = folder_of(exchange.log) / "round-000001"
    assert exchange.log.read_record(1) == exchange.record(1)
    assert (folder / "record.json").read_text().startswith("{")
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert len(files) == 1 + len(_deposits()) and "record.json" in files
    for _, address in _deposits():
        data = _blob(checkpoint, address)
        name = f"{address.block}.{hashlib.sha256(data).hexdigest()[:16]}.blob"
        assert files[f"{address.replica}/{GENERATIONS[address.replica]}/{name}"].read_bytes() == data


# ---- refusals ----


def _expect_refusal(exchange: Exchange, match: str, work: Callable[[], object]) -> None:
    before = exchange.refusals
    with pytest.raises(Refused, match=match):
        work()
    assert exchange.refusals == before + 1


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
    ):
        _expect_refusal(exchange, match, partial(exchange.deposit, member, address, data))
    assert exchange.refusals == 11
    told = [report.refusal.sender for report in _reports(exchange) if report.HasField("refusal")]
    assert len(told) == 11 and set(told) == {"dc", "home.0", "stranger"}
    _deposit_all(exchange, checkpoint)
    assert len(exchange.record(1).contributions) == 2
    assert {path.name for path in folder_of(exchange.log).iterdir()} == {"round-000001", "incarnations"}


def test_a_blob_of_another_run_is_refused(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """Otherwise the blob would be included, and no member could decode it."""
    address = BlobAddress("another run", 1, "dc", "norm")
    _expect_refusal(exchange, "another run", lambda: exchange.deposit("dc", address, _blob(checkpoint, address)))


def test_a_round_that_has_closed_takes_nothing_more(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """A late deposit is not an error: the record names the contribution as late."""
    _deposit_all(exchange, checkpoint)
    address = _address("dc", "norm")
    exchange.deposit("dc", address, _blob(checkpoint, address, seed=1))
    assert exchange.refusals == 0
    assert exchange.fetch("home.0", 1, "dc", "norm") == _blob(checkpoint, address)


def test_the_same_blob_twice_is_taken_once(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    address = _address("dc", "norm")
    for _ in range(3):
        exchange.deposit("dc", address, _blob(checkpoint, address))
    _deposit_all(exchange, checkpoint)
    assert exchange.refusals == 0
    assert len(exchange.record(1).contributions[0].blobs) == len(FIRST | LAST)


def test_a_second_different_blob_is_refused(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    address = _address("dc", "norm")
    exchange.deposit("dc", address, _blob(checkpoint, address))
    other = _blob(checkpoint, address, seed=1)
    _expect_refusal(exchange, "second, different", lambda: exchange.deposit("dc", address, other))


def test_a_refused_second_blob_leaves_the_first_in_the_log(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """The record names the first blob, so receivers must get the first blob."""
    address = _address("dc", "norm")
    exchange.deposit("dc", address, _blob(checkpoint, address))
    with pytest.raises(Refused):
        exchange.deposit("dc", address, _blob(checkpoint, address, seed=1))
    _deposit_all_others(exchange, checkpoint, address)
    named = next(blob for blob in exchange.record(1).contributions[0].blobs if blob.block == "norm")
    served = exchange.fetch("home.0", 1, "dc", "norm")
    assert named.sha256 == hashlib.sha256(_blob(checkpoint, address)).digest()
    assert hashlib.sha256(served).digest() == named.sha256


def _deposit_all_others(exchange: Exchange, checkpoint: RunCheckpoint, but: BlobAddress) -> None:
    for member, address in _deposits():
        if address != but:
            exchange.deposit(member, address, _blob(checkpoint, address))


def test_fetches_that_are_refused(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    for round_, replica, block in ((2, "dc", "norm"), (1, "nobody", "norm"), (1, "dc", "../../log")):
        _expect_refusal(exchange, "closed round", partial(exchange.fetch, "dc", round_, replica, block))


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


def _hashes(checkpoint: RunCheckpoint, blocks: frozenset[str]) -> dict[str, bytes]:
    return {n: parameter_sha256(t) for n, t in checkpoint.parameters.items() if block_of(n) in blocks}


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


def test_who_confirms_after_the_auditor_is_held_against_it(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST))
    for _ in range(3):  # told once, however often it confirms
        exchange.confirm("home.1", 1, _hashes(checkpoint, LAST) | WRONG)
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
                    exchange.deposit(member, address, _blob(checkpoint, address))
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
        exchange.deposit(
            "dc", BlobAddress("run", 3, "dc", block), _blob(checkpoint, BlobAddress("run", 3, "dc", block))
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


@pytest.mark.parametrize(("after", "is_barred"), [(-1, False), (0, True), (15, True), (16, False)])
def test_a_replica_is_barred_if_a_member_differs_again_within_16_rounds(after: int, is_barred: bool) -> None:
    coordinator = Coordinator(Rules({"a": "a", "b": "b"}, dict.fromkeys("ab", FIRST)))
    for slot in coordinator.slots.values():
        slot.take(1, None, 0.0, coordinator.rules)
    coordinator.slots["a"].healed_for = 20
    coordinator.step(e.Audited(20 + after, {"w": b"right"}), 0.0)
    effects = coordinator.step(e.Confirmed("a", 1, 20 + after, {"w": b"wrong"}), 0.0)
    assert any(isinstance(one, MembershipEvent) and one.what == EXCLUDED for one in effects) == is_barred


def test_guests_alone_do_not_end_a_run_either(checkpoint: RunCheckpoint, tmp_path: Path) -> None:
    roster = Roster({name: name for name in ("dc", "x", "y")}, dict.fromkeys(("dc", "x", "y"), FIRST | LAST))
    log = ContributionLog(FolderStore(tmp_path / "guests"))
    exchange = Exchange("run", roster, None, SETTINGS, log, rules=patient(roster))
    for member in roster.members:
        exchange.join(Caller(member, holder=int(member != "dc")), "")
    exchange.begin(checkpoint)
    assign_all(exchange)
    exchange.died("dc", "its host said so")
    for member in ("x", "y"):
        for block in sorted(FIRST | LAST):
            address = BlobAddress("run", 1, member, block)
            exchange.deposit(member, address, _blob(checkpoint, address))
    exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    for member in ("x", "y"):
        exchange.confirm(member, 1, _hashes(checkpoint, FIRST | LAST) | WRONG)
    exchange.runner.require_alive()
    assert [(what, slot) for what, slot, _ in _happened(exchange)][-2:] == [(HEALED, "x"), (HEALED, "y")]
    exchange.end_watching()


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
        lambda: exchange.deposit("dc", address, _blob(checkpoint, address)),
        lambda: exchange.fetch("dc", 1, "home", "norm"),
        lambda: exchange.confirm("dc", 2, _hashes(checkpoint, FIRST | LAST)),
        lambda: exchange.assign("dc", 0),
        lambda: exchange.heartbeat("dc"),
        lambda: exchange.wait_until_finished(),
    ):
        with pytest.raises(RunFailed, match="wk"):
            later()


def test_hashes_of_different_rounds_are_not_compared(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    assign_all(exchange, 1)
    _deposit_all(exchange, checkpoint, 2)
    exchange.confirm(EXCHANGE, 1, _hashes(checkpoint, FIRST | LAST))
    exchange.confirm("home.0", 2, dict.fromkeys(_hashes(checkpoint, FIRST), bytes(32)))
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST))
    assert _happened(exchange) == []


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


def test_hashes_of_a_stranger_are_refused(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    _expect_refusal(exchange, "not a member", lambda: exchange.confirm("stranger", 1, {"norm.weight": bytes(32)}))
    exchange.confirm("dc", 1, _hashes(checkpoint, FIRST | LAST))


class _Counted(Notifier):
    """Waits that count the calls that wait: each releases `waiting` while it holds the lock."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def wait_for(self, subject: str, is_so: Callable[[], bool]) -> None:
        def is_so_now() -> bool:
            found = is_so()
            if not found:
                self.waiting.release()
            return found

        super().wait_for(subject, is_so_now)


def _counted(exchange: Exchange) -> _Counted:
    """Replace the exchange's waits by ones that count the calls that wait."""
    exchange.runner.notifier = waits = _Counted()
    return waits


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


def test_whoever_waits_wakes_when_replicas_differ(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    _deposit_all(exchange, checkpoint)
    condition = _counted(exchange)

    def differ() -> None:
        assert condition.waiting.acquire(timeout=TIMEOUT)
        exchange.confirm(EXCHANGE, 1, {"norm.weight": bytes(32)})
        exchange.confirm("dc", 1, dict.fromkeys(_hashes(checkpoint, FIRST | LAST), b"\1" * 32))
        exchange.confirm("home.1", 1, {"norm.weight": b"\1" * 32})

    errors = _in_threads(lambda: exchange.record(2), differ)
    assert [type(error) for error in errors] == [RunFailed, RunFailed]


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


def test_before_a_run_begins_a_needed_member_that_fails_ends_it(tmp_path: Path) -> None:
    exchange = Exchange("run", ROSTER, None, SETTINGS, ContributionLog(FolderStore(tmp_path)))
    exchange.join("home.1", "")
    exchange.report([_fails("home.1", "no such tokenizer")])
    with pytest.raises(RunFailed, match=r"home\.1: no such tokenizer"):
        exchange.wait_until_joined()


def test_whoever_waits_for_a_record_wakes_when_the_round_closes(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    condition = _counted(exchange)
    records = []

    def close() -> None:
        assert condition.waiting.acquire(timeout=TIMEOUT)
        _deposit_all(exchange, checkpoint)

    assert _in_threads(lambda: records.append(exchange.record(1)), close) == []
    assert [record.round for record in records] == [1]


def test_the_run_is_over_when_every_member_has_finished(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    for round_ in range(1, SETTINGS.rounds + 1):
        _deposit_all(exchange, checkpoint, round_)
    assert {one.round for one in assign_all(exchange, SETTINGS.rounds).values()} == {0}
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


# ---- the disk ----


class _SlowLog(ContributionLog):
    """A log whose write of `held` releases `reached` and blocks until `lets` is released. Other writes do not block."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderStore(folder))
        self.held: BlobAddress | int | None = None
        """Address of a blob, or the round of a record, whose write blocks."""
        self.reached, self.lets = threading.Semaphore(0), threading.Event()
        self.is_full = False
        """Whether the next held write fails because the disk is full."""
        self.written: list[BlobAddress] = []

    def write_blobs(self, blobs: Mapping[BlobAddress, bytes], generation: int) -> None:
        for address in blobs:
            self._wait(address)
        super().write_blobs(blobs, generation)
        self.written.extend(blobs)

    def create_record(self, record: RoundRecord) -> RoundRecord:
        self._wait(record.round)
        return super().create_record(record)

    def _wait(self, what: BlobAddress | int) -> None:
        if what != self.held:
            return
        self.reached.release()
        assert self.lets.wait(TIMEOUT)
        if self.is_full:
            self.is_full = False
            raise OSError("no space left on the disk")


@pytest.fixture
def log(tmp_path: Path) -> _SlowLog:
    return _SlowLog(tmp_path / "log")


@pytest.fixture
def slow(checkpoint: RunCheckpoint, log: _SlowLog) -> Exchange:
    exchange = Exchange("run", ROSTER, None, SETTINGS, log, rules=patient(ROSTER))
    begin(exchange, checkpoint)
    assign_all(exchange)
    _counted(exchange)
    return exchange


def _begin(exchange: Exchange, log: _SlowLog, address: BlobAddress, *blobs: bytes) -> list[Future[None]]:
    """Begin one deposit of `dc` for each blob, all under one address.

    Each deposit begins when the previous one is blocked: the first in the write, the second at the lock.
    """
    condition = exchange.runner.notifier
    assert isinstance(condition, _Counted)
    log.held = log.held or address
    deposits = []
    for where, blob in zip((log.reached, condition.waiting), blobs, strict=False):
        deposits.append(in_thread(partial(exchange.deposit, "dc", address, blob)))
        assert where.acquire(timeout=TIMEOUT)
    return deposits


def test_nobody_waits_for_the_disk_that_takes_the_blob_of_another(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    _deposit_all(slow, checkpoint)
    address = _address("dc", "norm", round_=2)
    assign_all(slow, 1)
    (deposit,) = _begin(slow, log, address, _blob(checkpoint, address))
    for member, other in _deposits(round_=2):
        if other != address:
            slow.deposit(member, other, _blob(checkpoint, other))
    assert slow.record(1).round == 1
    assert slow.fetch("home.0", 1, "dc", "norm") == _blob(checkpoint, _address("dc", "norm"))
    slow.confirm("home.0", 1, _hashes(checkpoint, FIRST))
    slow.report([Report(member="home.0")])
    assert not deposit.done()
    with pytest.raises(FileNotFoundError):
        log.read_record(2)
    with pytest.raises(Refused, match="closed round"):
        slow.fetch("home.0", 2, "dc", "lm_head")
    log.lets.set()
    deposit.result(TIMEOUT)
    assert slow.record(2) == log.read_record(2)


@pytest.mark.parametrize("seed", [0, 1], ids=["same", "different"])
def test_one_blob_twice_at_once_is_written_once(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint, seed: int
) -> None:
    address = _address("dc", "norm")
    blobs = [_blob(checkpoint, address), _blob(checkpoint, address, seed)]
    first, second = _begin(slow, log, address, *blobs)
    log.lets.set()
    first.result(TIMEOUT)
    if seed:
        with pytest.raises(Refused, match="dc: a second, different `norm` for round 1"):
            second.result(TIMEOUT)
    else:
        second.result(TIMEOUT)
    assert slow.refusals == seed
    assert log.written == [address]
    _deposit_all_others(slow, checkpoint, address)
    assert slow.fetch("home.0", 1, "dc", "norm") == blobs[0]


def test_a_blob_that_the_disk_does_not_take_is_not_counted(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    """A later deposit of the same address is accepted instead."""
    address = _address("dc", "norm")
    _deposit_all_others(slow, checkpoint, address)
    blobs = [_blob(checkpoint, address), _blob(checkpoint, address, seed=1)]
    log.is_full = True
    first, second = _begin(slow, log, address, *blobs)
    log.lets.set()
    with pytest.raises(OSError, match="no space"):
        first.result(TIMEOUT)
    second.result(TIMEOUT)
    assert log.written.count(address) == 1
    named = next(blob for blob in slow.record(1).contributions[0].blobs if blob.block == "norm")
    assert named.sha256 == hashlib.sha256(blobs[1]).digest()
    assert slow.fetch("home.0", 1, "dc", "norm") == blobs[1]


def test_a_blob_is_not_counted_if_the_run_has_failed_meanwhile(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    address = _address("dc", "norm")
    _deposit_all_others(slow, checkpoint, address)
    deposits = _begin(slow, log, address, *[_blob(checkpoint, address)] * 2)
    slow.fail("a cause")
    log.lets.set()
    for deposit in deposits:
        with pytest.raises(RunFailed, match="a cause"):
            deposit.result(TIMEOUT)
    with pytest.raises(FileNotFoundError):
        log.read_record(1)


def test_a_record_is_on_the_disk_before_it_is_told_and_nobody_else_waits(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    address, later = _address("dc", "norm"), _address("dc", "norm", round_=2)
    _deposit_all_others(slow, checkpoint, address)
    log.held = 1
    (deposit,) = _begin(slow, log, address, _blob(checkpoint, address))
    again = in_thread(partial(slow.deposit, "dc", address, _blob(checkpoint, address)))
    slow.report([Report(member="home.0")])
    with pytest.raises(Refused, match="closed round"):
        slow.fetch("home.0", 1, "dc", "norm")
    with pytest.raises(Refused, match="found round 2, expected 1"):
        slow.deposit("dc", later, _blob(checkpoint, later))
    assert not any(report.HasField("round_closed") for report in _reports(slow))
    assert not deposit.done()
    log.lets.set()
    assert slow.record(1) == log.read_record(1)
    deposit.result(TIMEOUT)
    again.result(TIMEOUT)
    assert [report.round_closed.round for report in _reports(slow) if report.HasField("round_closed")] == [1]


# ---- the log replays ----


class _Member:
    """A member that owns some blocks, changes them at random and synchronises."""

    def __init__(self, exchange: Exchange, checkpoint: RunCheckpoint, name: str, seed: int) -> None:
        owned = {n: t for n, t in checkpoint.parameters.items() if block_of(n) in ROSTER.blocks[name]}
        followed = {} if EMBEDDING in owned else {EMBEDDING: checkpoint.parameters[EMBEDDING]}
        self.parameters = {n: nn.Parameter(t.clone()) for n, t in owned.items()}
        held = LocalParameters(self.parameters)
        self._exchange = exchange
        self.outer = OuterRound(
            MemberSession(exchange, name, ROSTER.members[name], "run"), held, owned | followed, SETTINGS
        )
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def train(self) -> None:
        for round_ in range(1, SETTINGS.rounds + 1):
            for parameter in self.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.1)
            work = self._exchange.assign(self.outer.session.member, round_ - 1)
            self.outer.synchronise(round_, work.generation, steps=5)


@pytest.fixture
def trained(exchange: Exchange, checkpoint: RunCheckpoint) -> Iterator[tuple[Exchange, dict[str, Tensor]]]:
    """Run three members and the auditor to the end. Return the exchange and the members' final parameters."""
    auditor = Auditor(exchange, checkpoint, SETTINGS.rounds, checkpoint_every=2)
    auditor.start()
    members = [_Member(exchange, checkpoint, name, seed) for seed, name in enumerate(ROSTER.members)]
    assert _in_threads(*(member.train for member in members), auditor.join) == []
    held: dict[str, Tensor] = {}
    for member in members:
        assert EMBEDDING in member.outer.theta
        for name, tensor in member.outer.theta.items():
            assert held.setdefault(name, tensor).equal(tensor), name
        for name, parameter in member.parameters.items():
            assert parameter.detach().equal(held[name]), name
    assert held.keys() == checkpoint.parameters.keys()
    yield exchange, held


def _replayed(
    exchange: Exchange, start: Mapping[str, Tensor], rounds: range, names: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    theta = {name: tensor.clone() for name, tensor in start.items() if names(name)}
    optimizer = OuterOptimizer(SETTINGS)
    for round_ in rounds:
        record = exchange.log.read_record(round_)
        apply_round(theta, "run", record, exchange.log.blobs_of(record), optimizer)
    return theta


def test_the_log_replays_to_what_the_members_hold(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, held = trained
    first = open_checkpoint(checkpoint_path(exchange.log, 0)).checkpoint()
    for name, tensor in _replayed(exchange, first.parameters, range(1, 4)).items():
        assert tensor.equal(held[name]), name
        assert not tensor.equal(checkpoint.parameters[name]), name


def test_the_auditors_checkpoints_read_back(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, held = trained
    names = sorted(path.name for path in folder_of(exchange.log).glob("checkpoint*"))
    assert names == [f"checkpoint-00000{round_}.safetensors" for round_ in (0, 2, 3)]
    first, second, last = (open_checkpoint(checkpoint_path(exchange.log, round_)).checkpoint() for round_ in (0, 2, 3))
    assert (first.round, second.round, last.round) == (0, 2, 3)
    for loaded, expected in ((first, checkpoint.parameters), (last, held)):
        assert loaded.parameters.keys() == expected.keys()
        assert all(loaded.parameters[name].equal(tensor) for name, tensor in expected.items())
        assert loaded.basis is not None and checkpoint.basis is not None and loaded.basis.equal(checkpoint.basis)
    with safe_open(checkpoint_path(exchange.log, 3), "pt") as file:
        whole = parameters_sha256({name: parameter_sha256(tensor) for name, tensor in held.items()})
        assert file.metadata()["parameters_sha256"] == whole.hex()


def test_a_late_process_starts_from_a_later_checkpoint(trained: tuple[Exchange, dict[str, Tensor]]) -> None:
    exchange, held = trained
    second = open_checkpoint(checkpoint_path(exchange.log, 2)).checkpoint()
    for name, tensor in _replayed(exchange, second.parameters, range(3, 4)).items():
        assert tensor.equal(held[name]), name


def test_a_stage_replays_the_blocks_it_owns(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, held = trained
    theta = _replayed(exchange, checkpoint.parameters, range(1, 4), lambda name: block_of(name) in LAST)
    assert {block_of(name) for name in theta} == LAST
    for name, tensor in theta.items():
        assert tensor.equal(held[name]), name


def test_a_blob_that_was_changed_in_the_log_is_found(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, _ = trained
    address = _address("home", "norm", round_=2)
    exchange.log.store.put(stored_blob(exchange.log, 2, "home", 2, "norm"), _blob(checkpoint, address, seed=77))
    with pytest.raises(
        DamagedFile, match=r"/round-000002/home/2/norm\.\w+\.blob is damaged: it does not match its digest"
    ):
        _replayed(exchange, checkpoint.parameters, range(1, 4))
    with pytest.raises(Refused, match=r"/round-000002/home/2/norm\.\w+\.blob is damaged: it does not match its digest"):
        exchange.fetch("dc", 2, "home", "norm")
    theta, record = dict(checkpoint.parameters), exchange.record(2)

    def as_it_is(replica: str, block: str) -> bytes:
        return stored_bytes(exchange.log, 2, replica, GENERATIONS[replica], block)

    with pytest.raises(MalformedContribution, match="home, norm"):
        apply_round(theta, "run", record, as_it_is, OuterOptimizer(SETTINGS))


def test_every_round_is_verified_for_every_replica(trained: tuple[Exchange, dict[str, Tensor]]) -> None:
    exchange, held = trained
    verified = [report.round_verified for report in _reports(exchange) if report.HasField("round_verified")]
    assert {(v.replica, v.round) for v in verified} == {(r, t) for r in ("dc", "home") for t in (1, 2, 3)}
    whole = parameters_sha256({name: parameter_sha256(tensor) for name, tensor in held.items()})
    assert {v.parameters_sha256 for v in verified if v.round == 3} == {whole}
    assert exchange.refusals == 0


def _expect_failure(exchange: Exchange, cause: str) -> None:
    """Require that the run has failed, and that waiting callers get a cause that matches this pattern."""
    (error,) = _in_threads(exchange.wait_until_finished)
    assert isinstance(error, RunFailed)
    assert re.fullmatch(cause, str(error)), str(error)


def test_the_auditor_fails_a_run_whose_members_agree_on_something_else(
    exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    """All members confirm the initial weights after a round that changed them."""
    auditor = Auditor(exchange, checkpoint, rounds=1, checkpoint_every=1)
    _deposit_all(exchange, checkpoint)
    for member in ROSTER.members:
        exchange.confirm(member, 1, _hashes(checkpoint, ROSTER.blocks[member]))
    auditor.start()
    auditor.join()
    _expect_failure(exchange, r"after round 1, dc, home hold a \S+ that differs from the run log")
    assert not checkpoint_path(exchange.log, 1).exists()


def test_a_blob_changed_before_the_auditor_reads_it_fails_the_run(
    exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    _deposit_all(exchange, checkpoint)
    exchange.log.store.put(stored_blob(exchange.log, 1, "dc", 1, "norm"), _blob(checkpoint, _address("dc", "norm"), 5))
    auditor = Auditor(exchange, checkpoint, rounds=1, checkpoint_every=1)
    auditor.start()
    auditor.join()
    cause = r"the auditor cannot replay the log: .*/dc/1/norm\.\w+\.blob is damaged: it does not match its digest"
    _expect_failure(exchange, cause)


def test_a_blob_lost_before_the_auditor_reads_it_fails_the_run(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """A full disk or a lost file must not silently stop the auditor, which checks the run and writes checkpoints."""
    _deposit_all(exchange, checkpoint)
    (folder_of(exchange.log) / stored_blob(exchange.log, 1, "dc", 1, "norm")).unlink()
    auditor = Auditor(exchange, checkpoint, rounds=1, checkpoint_every=1)
    auditor.start()
    auditor.join()
    _expect_failure(exchange, r"the auditor cannot replay the log: .*/round-000001/dc/1/norm\.\w+\.blob'")
