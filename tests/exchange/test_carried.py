"""Background transfers while a member trains: its contributions, the round record and blobs of other replicas."""

from __future__ import annotations

import threading

import pytest
from google.protobuf.message import Message
from members import TIMEOUT
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import ExchangeLost, HeteroPPError
from hetero_pp.messages.messages_pb2 import BlobHeader, CheckpointRequest, FetchRequest, RecordRequest, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, untold
from replica_groups.member.session import ExchangeLine, MemberSession

MINE, OTHERS = b"mine", b"others"


class Far(ExchangeService):
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


def _carried(far: Far) -> MemberSession:
    line = ExchangeLine(LinkSpec("own-exchange", "own", "exchange", LinkShape(), LinkShape()), 0)
    return MemberSession(far, "own", "own", "run", line, overlaps=True)


def _contribute(carried: MemberSession, round_: int) -> None:
    carried.deposit("own", BlobAddress("run", round_, "own", "layers.0"), MINE, 1, 2)
    carried.carry(round_, ["layers.0"])


def test_nobody_waits_until_the_record_is_asked_for() -> None:
    """Blobs of other replicas for the member's blocks have arrived before `record` is called.

    No other blob was fetched.
    """
    far = Far()
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


def test_what_is_not_here_is_fetched() -> None:
    far = Far()
    carried = _carried(far)
    _contribute(carried, 1)
    far.closed.set()
    carried.record(1, "own")
    for name in ((1, "other", "layers.1"), (2, "other", "layers.0"), (1, "own", "layers.0")):
        carried.fetch("own", *name)
        assert far.fetched[-1] == name


def test_what_goes_wrong_is_heard_where_the_record_is_asked_for() -> None:
    """A later contribution gets the new answer, not the old error."""
    far = Far()
    far.errors.append(ExchangeLost("gone"))
    carried = _carried(far)
    _contribute(carried, 1)
    far.closed.set()
    with pytest.raises(ExchangeLost, match="gone"):
        carried.record(1, "own")
    carried.deposit("own", BlobAddress("run", 1, "own", "layers.0"), MINE, 1, 2)
    assert far.deposited == [MINE]
    assert carried.record(1, "own").round == 1
    assert far.deposited == [MINE, MINE]


def test_a_round_that_was_given_up_keeps_nobody() -> None:
    """The thread of the abandoned attempt keeps waiting, maybe forever.

    The second contribution to the round does not wait for it.
    """
    far, again = Far(), threading.Event()
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


def test_a_round_that_was_never_carried_is_brought_when_its_record_is_asked_for() -> None:
    far = Far()
    far.closed.set()
    carried = _carried(far)
    carried.deposit("own", BlobAddress("run", 3, "own", "layers.0"), MINE)
    assert far.deposited == []
    assert carried.record(3).round == 3
    assert far.deposited == [MINE]
