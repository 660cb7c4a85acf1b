"""A member's outer round with overlap: its start, and interruptions that neither lose nor repeat a contribution."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from deposits import deposit
from google.protobuf.message import Message
from members import TIMEOUT
from torch import Tensor, nn

from hetero_pp.config.checkpoint import initial_checkpoint
from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import ExchangeLost, HeteroPPError, LinkClosed, Suspended
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages.messages_pb2 import BlobHeader, CheckpointRequest, FetchRequest, RecordRequest, RoundRecord
from hetero_pp.model.transformer import ModelShape, shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, decode_blob, split_blobs
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, untold
from replica_groups.engines.engine import LocalParameters
from replica_groups.member.error_feedback import ErrorFeedback
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import ExchangeLine, MemberSession

SHAPE = ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=40)
COMPRESSION = CompressionSettings(density=1 / 8, tile=(8, 8), value_bits=32, quantiser="levels")
SETTINGS = OuterSettings(rounds=4, overlap=1, presumed=0.25, returned=0.5, compression=COMPRESSION)


class Far(MemberSession):
    """A session whose exchange answers at once."""

    def __init__(self, name: str) -> None:
        super().__init__(None, name, name, "run", overlaps=True)
        self.blobs: dict[tuple[int, str, str], bytes] = {}
        self.counts = "own"
        self.is_suspended = False
        self.given_up = 0

    def deposit_blob(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        self.blobs.update({(one.round, one.replica, one.block): part for one, part in split_blobs(header, data)})

    def record(self, round_: int, member: str | Caller | None = None) -> RoundRecord:
        if self.is_suspended:
            raise Suspended("a neighbour is gone")
        record = RoundRecord(round=round_)
        entry = record.contributions.add(replica=self.counts, weight=1.0, generation=1)
        for (number, replica, block), data in self.blobs.items():
            if (number, replica) == (round_, self.counts):
                entry.blobs.add(block=block, sha256=hashlib.sha256(data).digest())
        return record

    def fetch(self, member: str | Caller, round_: int, replica: str, block: str) -> bytes:
        return self.blobs[round_, replica, block]

    def confirm(self, member: str | Caller, round_: int, sha256: Mapping[str, bytes]) -> None: ...

    def carry(self, round_: int, blocks: Collection[str]) -> None: ...

    def give_up_carried(self) -> None:
        self.given_up += 1

    def sent(self, round_: int) -> dict[str, Tensor]:
        """Return the dense values that this member sent in a round."""
        found: dict[str, Tensor] = {}
        for block, shapes in shapes_by_block(shapes_of(START)).items():
            address = BlobAddress("run", round_, "own", block)
            for name, decoded in decode_blob(self.blobs[round_, "own", block], address, shapes, COMPRESSION).items():
                found[name] = torch.zeros(shapes[name])
                found[name].view(-1)[decoded.indices] = decoded.values
        return found


START = initial_checkpoint(SHAPE, None, seed=1).parameters


class Member:
    def __init__(self, name: str = "own", far: Far | None = None) -> None:
        self.far = Far(name)
        if far is not None:
            self.far.blobs = far.blobs
        self.parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in START.items()}
        held = LocalParameters(self.parameters)
        self.outer = OuterRound(self.far, held, dict(START), SETTINGS)

    @torch.no_grad()
    def train(self, round_: int) -> dict[str, Tensor]:
        """Change the parameters at random. Return the expected pseudo-gradient."""
        before = self.holds()
        for number, parameter in enumerate(self.parameters.values()):
            random = torch.Generator().manual_seed(100 * round_ + number)
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=random))
        self.outer.end_inner_loop(round_)
        return {name: before[name] - parameter.detach() for name, parameter in self.parameters.items()}

    def holds(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def train_ahead(self, round_: int) -> dict[str, Tensor]:
        self.outer.start_ahead()
        return self.train(round_)

    def break_off(self) -> None:
        """Interrupt in the middle of the round that is trained ahead."""
        self.outer.start_ahead()
        raise LinkClosed("a neighbour is gone")

    def go_back(self) -> None:
        self.outer.undo()
        self.outer.restore()


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


def _rest(member: Member, trained: Mapping[str, Tensor], kept: float = 0.0) -> dict[str, Tensor]:
    """Compute error feedback after a first round: e <- d - D, plus the share `kept` of D if it was not included."""
    sent = member.far.sent(1)
    return {name: tensor - sent[name] + kept * sent[name] for name, tensor in trained.items()}


def test_the_next_round_starts_less_what_is_presumed_and_is_measured_from_there() -> None:
    member = Member()
    trained = [member.train(1)]
    started: list[dict[str, Tensor]] = []

    def meanwhile() -> None:
        member.outer.start_ahead()
        started.append(member.holds())
        trained.append(member.train(2))

    member.outer.synchronise(1, 1, 3, meanwhile)
    sent = member.far.sent(1)
    _assert_equal(started[0], {name: START[name] - 0.25 * sent[name] for name in START})
    _assert_equal(member.holds(), {name: START[name] - sent[name] for name in START})  # this replica alone, at rate 1
    assert member.outer.own.trained.keys() == {2}
    _assert_equal(member.outer.own.trained[2], trained[1])


@pytest.mark.parametrize("counts", ["own", "other"])
def test_broken_off_ahead_and_decided_meanwhile(counts: str) -> None:
    """Error feedback is as if the member had waited. The next round's change is measured from its own start."""
    member = Member()
    other = Member("other", member.far)
    other.train(1)
    other.outer.contribute(1, 1, 3)
    trained = member.train(1)
    with pytest.raises(LinkClosed):
        member.outer.synchronise(1, 1, 3, member.break_off)
    member.go_back()
    assert member.far.given_up == 1
    member.far.counts = counts
    member.outer.catch_up(range(1, 2), range(1, 2))
    expected = _rest(member, trained, 0.0 if counts == "own" else SETTINGS.returned)
    for name, error in member.outer.error.items():
        torch.testing.assert_close(error, expected[name], atol=1e-7, rtol=0)
    assert not member.outer.own.trained
    _assert_equal(member.train(2), member.outer.own.trained[2])


def test_a_state_that_is_saved_in_the_next_round_is_that_before_the_contribution() -> None:
    """A member that is asked to stop saves error feedback as it was before.

    It also saves its training and contributions since.
    """
    member = Member()
    trained = member.train(1)
    with pytest.raises(LinkClosed):
        member.outer.synchronise(1, 1, 3, member.break_off)
    member.outer.undo()
    assert any(bool(error.any()) for error in member.outer.error.values())
    member.outer.feedback.take_back()
    assert not any(bool(error.any()) for error in member.outer.error.values())
    _assert_equal(member.outer.own.trained[1], trained)


def test_broken_off_and_contributed_again() -> None:
    """The repeated contribution uses the stored result of training. The round trained ahead of it is dropped."""
    member, undisturbed = Member(), Member()
    for one in (member, undisturbed):
        one.train(1)
    member.far.is_suspended = True
    with pytest.raises(Suspended):
        member.outer.synchronise(1, 1, 3, lambda: member.train_ahead(2))
    assert member.outer.own.trained.keys() == {1, 2}
    member.go_back()
    assert member.outer.own.trained.keys() == {1}
    member.far.is_suspended = False
    for one in (member, undisturbed):
        one.outer.synchronise(1, 1, 3, lambda one=one: one.train_ahead(2))  # type: ignore[misc]
    _assert_equal(member.outer.error, undisturbed.outer.error)
    _assert_equal(member.holds(), undisturbed.holds())
    _assert_equal(member.outer.own.trained[2], undisturbed.outer.own.trained[2])


MINE, OTHERS = b"mine", b"others"


class FarExchange(ExchangeService):
    """An exchange whose round closes when a test sets `closed`."""

    def __init__(self) -> None:
        self.deposited: list[bytes] = []
        self.fetched: list[tuple[int, str, str]] = []
        self.closed, self.waits = threading.Event(), threading.Event()
        self.errors: list[HeteroPPError] = []

    def deposit_blob(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        self.deposited.append(data)

    def call(self, request: Message, caller: Caller) -> RoundRecord:
        assert isinstance(request, RecordRequest)
        self.waits.set()
        assert self.closed.wait(TIMEOUT)
        if self.errors:
            raise self.errors.pop()
        record = RoundRecord(round=request.round)
        for replica in ("own", "other"):
            entry = record.contributions.add(replica=replica, weight=1.0)
            for block in ("layers.0", "layers.1"):
                entry.blobs.add(block=block)
        return record

    def read_checkpoint(
        self, request: CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        raise NotImplementedError

    def fetch_blob(self, request: FetchRequest, caller: Caller) -> bytes:
        self.fetched.append((request.round, request.replica, request.block))
        return OTHERS


def _carried(far: FarExchange) -> MemberSession:
    line = ExchangeLine(LinkSpec("own-exchange", "own", "exchange", LinkShape(), LinkShape()), 0)
    return MemberSession(far, "own", "own", "run", line, overlaps=True)


def _contribute(carried: MemberSession, round_: int) -> None:
    deposit(carried, "own", BlobAddress("run", round_, "own", "layers.0"), MINE, 1, 2)
    carried.carry(round_, ["layers.0"])


def test_nobody_waits_until_the_record_is_asked_for() -> None:
    """Blobs of other replicas for the member's blocks have arrived before `record` is called.

    No other blob was fetched.
    """
    far = FarExchange()
    carried = _carried(far)
    _contribute(carried, 1)
    assert far.waits.wait(TIMEOUT)
    assert far.deposited == [MINE]
    far.closed.set()
    assert carried.record(1, "own").round == 1
    assert far.fetched == [(1, "other", "layers.0")]
    assert carried.fetch("own", 1, "other", "layers.0") == OTHERS
    assert len(far.fetched) == 1
    assert carried.line is not None
    assert carried.line.forward.of_round(1).payload_bytes == len(MINE)
    assert carried.line.backward.of_round(1).payload_bytes == len(OTHERS)


def test_what_goes_wrong_is_heard_where_the_record_is_asked_for() -> None:
    """A later contribution gets the new answer, not the old error."""
    far = FarExchange()
    far.errors.append(ExchangeLost("gone"))
    carried = _carried(far)
    _contribute(carried, 1)
    far.closed.set()
    with pytest.raises(ExchangeLost, match="gone"):
        carried.record(1, "own")
    deposit(carried, "own", BlobAddress("run", 1, "own", "layers.0"), MINE, 1, 2)
    assert far.deposited == [MINE]
    assert carried.record(1, "own").round == 1
    assert far.deposited == [MINE, MINE]


def test_a_round_that_was_given_up_keeps_nobody() -> None:
    """The thread of the abandoned attempt keeps waiting, maybe forever.

    The second contribution to the round does not wait for it.
    """
    far, again = FarExchange(), threading.Event()
    carried = _carried(far)
    _contribute(carried, 1)
    assert far.waits.wait(TIMEOUT)
    waits_for_ever, far.closed = far.closed, again
    far.waits.clear()
    _contribute(carried, 1)
    assert far.waits.wait(TIMEOUT)
    again.set()
    assert carried.record(1, "own").round == 1
    assert not waits_for_ever.is_set()
    waits_for_ever.set()


class _Late(Scratch):
    """Makes each copy no earlier than somebody waits for it."""

    waits = threading.Semaphore(0)

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        assert self.waits.acquire(timeout=TIMEOUT)
        super().keep(key, tensor)


def test_error_feedback_changes_after_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made beside the selection, and are those from before the contribution."""
    error = {"a": torch.ones(3), "b": torch.full((4,), 2.0)}
    before = {name: tensor.clone() for name, tensor in error.items()}
    feedback, result = ErrorFeedback(error, OuterSettings(rounds=1), _Late(tmp_path)), Future[None].result

    def waited_for(copy: Future[None]) -> None:
        _Late.waits.release()
        result(copy)

    monkeypatch.setattr(Future, "result", waited_for)
    feedback.begin(1, None, error)
    for name in error:
        feedback.to_change(name).zero_()
    feedback.take_back()
    for name, tensor in before.items():
        assert error[name].equal(tensor)
