"""A member's shaped link to the exchange: uploads take the uplink's time, and downloads that of the downlink."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from deposits import deposit, deposit_all
from fake_clock import FakeClock
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.link.shaping import Lines
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import BlobAddress, join_blobs
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, call_of, untold
from replica_groups.member.session import ExchangeLine, MemberSession

BLOB = bytes(1000)
WIRE = 1000 + 5 + 9
"""Bytes of one gRPC message of 1000 bytes in one HTTP/2 frame."""
UP, DOWN = LinkShape(bandwidth=8e3, latency=3.0), LinkShape(bandwidth=8e6, latency=0.25)
"""A byte takes a millisecond up and a microsecond down."""
UP_SECONDS, DOWN_SECONDS = WIRE / 1e3, WIRE / 1e6
ADDRESS = BlobAddress("run", 4, "home", "norm")
HEADER = pb.BlobHeader(round=4, replica="home", block="norm", size=len(BLOB), generation=2, steps=50)

Counts = tuple[object, ...]
"""A tuple of messages, payload bytes, wire bytes and seconds that the link was busy."""


class Far(ExchangeService):
    """The far end, which records calls and their times. Implements ExchangeService."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.asked: list[tuple[float, object]] = []
        self.frames, self.frame_seconds = [len(BLOB)], 0.0
        """Bytes of a run checkpoint's frames, and the time after which each one comes."""

    def _ask(self, what: object) -> None:
        self.asked.append((self.clock.time, what))

    def call(self, request: Message, caller: Caller) -> Any:
        self._ask((caller.name, request))
        return GetMessageClass(call_of(request).output_type)()

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        self._ask(request)
        for n_bytes in self.frames:
            self.clock.time += self.frame_seconds
            arrived(n_bytes)
        return {name: torch.zeros(125) for name in request.names}

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self._ask((caller.name, header, data))

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        self._ask((caller.name, request))
        return BLOB


class Shaped:
    """A member's shaped link on a simulated clock that only advances when code waits."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.far = Far(clock)
        link = LinkSpec("home.0-exchange", "home.0", "exchange", UP, DOWN)
        self.line = ExchangeLine(link, seed=1, lines=Lines(clock=clock))
        self.exchange = MemberSession(self.far, "home.0", "home", "run", self.line)

    def counts(self, round_: int) -> list[Counts]:
        """Return the counts of both directions, up and down."""
        return [astuple(ledger.of_round(round_)) for ledger in (self.line.forward, self.line.backward)]


@pytest.fixture
def shaped() -> Shaped:
    return Shaped(FakeClock())


def _count(messages: int, seconds: float) -> Counts:
    return messages, messages * len(BLOB), messages * WIRE, pytest.approx(seconds)


NOTHING = (0, 0, 0, 0.0)


def test_a_deposit_goes_up(shaped: Shaped) -> None:
    """It arrives when the uplink has carried it."""
    deposit(shaped.exchange, "home.0", ADDRESS, BLOB, 2, 50)
    assert shaped.far.asked == [(pytest.approx(100 + 3 + UP_SECONDS), ("home.0", HEADER, BLOB))]
    assert shaped.clock.time == pytest.approx(100 + 3 + UP_SECONDS)
    assert shaped.counts(4) == [_count(1, UP_SECONDS), NOTHING]


def test_blobs_that_go_up_in_one_call_count_one_by_one(shaped: Shaped) -> None:
    others = {ADDRESS: BLOB, BlobAddress("run", 4, "home", "layers.0"): BLOB}
    deposit_all(shaped.exchange, "home.0", others, 2, 50)
    header, data = join_blobs(HEADER, [("norm", BLOB), ("layers.0", BLOB)])
    assert shaped.far.asked == [(pytest.approx(100 + 2 * (3 + UP_SECONDS)), ("home.0", header, data))]
    assert shaped.counts(4) == [_count(2, 2 * UP_SECONDS), NOTHING]


def test_a_fetched_blob_comes_down(shaped: Shaped) -> None:
    """The request is sent at once. The blob arrives when the downlink has carried it."""
    assert shaped.exchange.fetch("home.0", 4, "dc", "norm") == BLOB
    assert shaped.far.asked == [(100.0, ("home.0", pb.FetchRequest(round=4, replica="dc", block="norm")))]
    assert shaped.clock.time == pytest.approx(100 + 0.25 + DOWN_SECONDS)
    assert shaped.counts(4) == [NOTHING, _count(1, DOWN_SECONDS)]


def test_a_checkpoint_comes_down_before_the_first_round(shaped: Shaped) -> None:
    assert list(shaped.exchange.checkpoint(["a", "b"], 3)) == ["a", "b"]  # two tensors of 125 fp32 numbers
    assert shaped.far.asked == [(100.0, pb.CheckpointRequest(names=["a", "b"], round=3))]
    assert shaped.clock.time == pytest.approx(100 + 0.25 + DOWN_SECONDS)
    assert shaped.counts(0) == [NOTHING, _count(1, DOWN_SECONDS)]


def test_the_line_carries_a_checkpoint_while_it_comes(shaped: Shaped) -> None:
    """Each frame takes a second on the line. The 50 ms that the next one takes to come pass meanwhile."""
    shaped.far.frames, shaped.far.frame_seconds = [10**6] * 20, 0.05
    shaped.exchange.checkpoint(["a"], 3)
    assert shaped.clock.time == pytest.approx(100 + 0.05 + 0.25 + 20, rel=1e-3)


def test_both_ways_are_free_of_each_other(shaped: Shaped) -> None:
    """Each round has its own bytes. A slow upload does not delay downloads."""
    for round_ in (1, 2):
        deposit(shaped.exchange, "home.0", BlobAddress("run", round_, "home", "norm"), BLOB)
        for replica in ("a", "b", "c"):
            shaped.exchange.fetch("home.0", round_, replica, "norm")
    assert shaped.clock.time == pytest.approx(100 + 2 * (3 + UP_SECONDS) + 6 * (0.25 + DOWN_SECONDS))
    for round_ in (1, 2):
        assert shaped.counts(round_) == [_count(1, UP_SECONDS), _count(3, 3 * DOWN_SECONDS)]


def test_what_is_small_is_passed_on_at_once_and_not_counted(shaped: Shaped) -> None:
    requests: list[Message] = [
        pb.AgreeRequest(configuration="{}", tokens="of a text"),
        pb.JoinRequest(address="here", rounds=[4], process="me"),
        pb.NewestCheckpointRequest(),
        pb.AssignRequest(holds=4, address="here", trained=5),
        pb.HeartbeatRequest(round=5, generation=2, progress=9, computes=True),
        pb.BrokenRequest(generation=2, cause="a cause"),
        pb.LastRoundRequest(),
        pb.RecordRequest(round=4),
        pb.HashReport(round=4, sha256={"norm.weight": b"x"}),
        pb.ReportRequest(reports=[pb.Report(member="home.0")]),
    ]
    for request in requests:
        reply = shaped.exchange.call(request, Caller("home.0"))
        assert isinstance(reply, GetMessageClass(call_of(request).output_type))
    assert shaped.far.asked == [(100.0, ("home.0", request)) for request in requests]
    assert shaped.counts(0) == shaped.counts(4) == [NOTHING, NOTHING]
