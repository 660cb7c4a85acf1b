"""The contract of every link: one suite over links in process, over a port, and through the relay; also with lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product

import grpc
import pytest
import torch
from opened_links import line, open_stage_link

from hetero_pp.config.lines import EXCHANGE, RELAYED, LinkShape, LinkSpec
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import LinkClosed, LinkTimeout
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import FRAME_BYTES, Count, LinkEnd, Message
from hetero_pp.messages.messages_pb2 import ACTIVATION, GRADIENT, LinkHeader
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import Callers
from hetero_pp.rpc.channels import make_server
from hetero_pp.rpc.identities import Credentials, Secret
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.relay import MOST_CARRIED, LinkLimit, LocalAddress, MeetingPoint, Relay, TrainedRound
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import service_handler
from hetero_pp.rpc.stage_link import StageLink

SECONDS = 60.0
"""Timeout in seconds, longer than any operation in these tests takes."""

SECRET = Secret("of these tests only")
UNLIMITED = LinkShape()
Pair = tuple[LinkEnd, LinkEnd]
Connect = Callable[..., Pair]


def connect_in_process(stack: ExitStack, spec: LinkSpec) -> Pair:
    return in_process_pair(spec, seed=1)


def connect_grpc(stack: ExitStack, spec: LinkSpec) -> Pair:
    links = StageLink(LinkSide(spec, Credentials("", "run"), spec.target, seed=1), expected=None)
    port = links.listen("127.0.0.1:0")
    stack.callback(links.close, grace=0)
    upstream = open_stage_link(f"127.0.0.1:{port}", spec, Credentials("", "run"), spec.source, seed=1, timeout=SECONDS)
    return upstream, links.accept(SECONDS)


def connect_grpc_from_below(stack: ExitStack, spec: LinkSpec) -> Pair:
    """Connect a link on which the downstream stage dials."""
    links = StageLink(LinkSide(spec, Credentials("", "run"), spec.source, seed=1), expected=None)
    port = links.listen("127.0.0.1:0")
    stack.callback(links.close, grace=0)
    dialer = StageLink(LinkSide(spec, Credentials("", "run"), spec.target, seed=1))
    downstream = dialer.dial(f"127.0.0.1:{port}", 0, SECONDS)
    return links.accept(SECONDS), downstream


class AdmitEverybody:
    """Authenticator of a relay whose callers are identified by it alone."""

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        return context.peer()

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        raise AssertionError(reason)

    def request_bytes_max(self, call: str) -> int:
        return 1000

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        raise AssertionError(reason)


def connect_relayed(stack: ExitStack, spec: LinkSpec) -> Pair:
    """Connect a link through the relay, because neither stage can be dialled."""
    ends = {(spec.name, "forward"): spec.source, (spec.name, "backward"): spec.target}
    callers = Callers(SECRET, Roster({spec.source: "home", spec.target: "home"}, {}, counts=ends), encrypted=True)
    limits = {end: LinkLimit(step_bytes=1.0) for end in ends}
    point, admitted = MeetingPoint("127.0.0.1:0"), AdmitEverybody()
    stack.callback(point.close)
    relay = Relay(callers, ends, admitted, point, limits, lambda link: TrainedRound(1, 1, steps=1e15))
    handler, own = service_handler(RELAY, relay, admitted, MOST_CARRIED), SECRET.authority.identity(EXCHANGE)
    server, port = make_server("127.0.0.1:0", [handler], 2 * MOST_CARRIED, own)
    stack.callback(lambda: server.stop(0).wait())
    links, local = [], LocalAddress()
    stack.callback(local.close)
    for member in (spec.source, spec.target):
        side = LinkSide(spec, Credentials("", identity=SECRET.authority.identity(member)), member, seed=1)
        links.append(StageLink(side, expected=None, exchange=f"127.0.0.1:{port}"))
        stack.callback(links[-1].close, grace=0)
    above, below = links
    below.listen(str(local))
    below.listens = str(local)
    below.be_found(0)
    return above.reach(RELAYED, 0), below.accept(SECONDS)


TRANSPORTS: dict[str, Callable[[ExitStack, LinkSpec], Pair]] = {
    "in_process": connect_in_process,
    "grpc": connect_grpc,
    "grpc_from_below": connect_grpc_from_below,
    "relayed": connect_relayed,
}
LINES = [line(name, (name,), 8e9, 8e9) for name in ("home.0", "home.1")]


@pytest.fixture(params=[*product(sorted(TRANSPORTS), (False, True))], ids=lambda one: f"{one[0]}{'-lines' * one[1]}")
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Yield a function that makes both ends of a link of given shapes. The first end sends forward."""
    with ExitStack() as stack:

        def make(forward: LinkShape = UNLIMITED, backward: LinkShape = UNLIMITED) -> Pair:
            transport, has_lines = request.param
            lines = LINES if has_lines else [None, None]
            spec = LinkSpec("home.0-1", "home.0", "home.1", forward, backward, *lines)
            ends = TRANSPORTS[transport](stack, spec)
            for end in ends:
                stack.callback(end.abort, "the test is over")
            return ends

        yield make


@pytest.fixture
def ends(connect: Connect) -> Pair:
    return connect()


@pytest.fixture(params=["forward", "backward"])
def sender_and_receiver(request: pytest.FixtureRequest, ends: Pair) -> Pair:
    return ends if request.param == "forward" else (ends[1], ends[0])


def numbered(index: int, *tensors: torch.Tensor) -> Message:
    return Message(LinkHeader(purpose=ACTIVATION, micro_batch=index), tensors)


def expect_index(end: LinkEnd, index: int) -> None:
    assert end.receive(SECONDS).header.micro_batch == index


def test_order_and_bits(sender_and_receiver: Pair) -> None:
    sender, receiver = sender_and_receiver
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(7, 5, generator=generator)
    sent = [
        (floats, floats.bfloat16(), (floats * 9).to(torch.uint8)),
        (torch.tensor([float("nan"), -0.0, float("inf")]), torch.tensor(3.0)),
        (),
        (torch.empty(0, 4), torch.arange(3, dtype=torch.uint8), torch.ones(2)),
        (torch.randn(FRAME_BYTES + 1, generator=generator).bfloat16(),),
        (torch.randn(3, FRAME_BYTES // 4, generator=generator), torch.ones(5, dtype=torch.uint8)),
    ]
    for index, tensors in enumerate(sent):
        sender.send(numbered(index, *tensors))
    for index, tensors in enumerate(sent):
        message = receiver.receive(SECONDS)
        assert message.header.micro_batch == index
        assert message.header.purpose == ACTIVATION
        for found, expected in zip(message.tensors, tensors, strict=True):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_tensors_arrive_dense_and_outside_autograd(ends: Pair) -> None:
    matrix = torch.arange(12.0, requires_grad=True).view(3, 4)
    ends[0].send(numbered(0, matrix.T))
    (found,) = ends[1].receive(SECONDS).tensors
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(found, matrix.detach().T)


def test_the_caller_keeps_its_header(ends: Pair) -> None:
    header = LinkHeader(purpose=GRADIENT, squared_norm=2.5)
    for index in range(3):
        header.micro_batch = index
        ends[0].send(Message(header, (torch.ones(2),)))
    assert not header.tensors
    for index in range(3):
        received = ends[1].receive(SECONDS).header
        assert (received.micro_batch, received.squared_norm, len(received.tensors)) == (index, 2.5, 1)
        assert not received.HasField("gradient_norm")


def test_what_cannot_cross_is_refused_at_the_sender(ends: Pair) -> None:
    with pytest.raises(ValueError, match=r"torch\.float64"):
        ends[0].send(numbered(0, torch.ones(2, dtype=torch.float64)))
    ends[0].send(numbered(1))
    expect_index(ends[1], 1)


def test_both_directions_at_once(ends: Pair) -> None:
    payload = torch.ones(FRAME_BYTES // 2)
    for index in range(20):
        for end in ends:
            end.send(numbered(index, payload))
    for index in range(20):
        for end in ends:
            message = end.receive(SECONDS)
            assert message.header.micro_batch == index
            assert torch.equal(message.tensors[0], payload)
            end.recycle(message)


def test_a_timeout_leaves_the_link_as_it_was(sender_and_receiver: Pair) -> None:
    sender, receiver = sender_and_receiver
    with pytest.raises(LinkTimeout):
        receiver.receive(timeout=0.01)
    sender.send(numbered(4))
    expect_index(receiver, 4)


def test_close_drains(sender_and_receiver: Pair) -> None:
    sender, receiver = sender_and_receiver
    for index in range(5):
        sender.send(numbered(index, torch.ones(FRAME_BYTES)))
    sender.close()
    sender.close()
    for index in range(5):
        expect_index(receiver, index)
    for _ in range(2):
        with pytest.raises(LinkClosed, match="the peer closed the link"):
            receiver.receive(SECONDS)


def test_close_ends_one_direction_only(sender_and_receiver: Pair) -> None:
    one, other = sender_and_receiver
    one.close()
    with pytest.raises(LinkClosed, match="this end"):
        one.send(numbered(0))
    other.send(numbered(7, torch.ones(3)))
    other.close()
    expect_index(one, 7)
    for end in (one, other):
        with pytest.raises(LinkClosed, match="the peer closed the link"):
            end.receive(SECONDS)


def test_a_shaped_close_drains(connect: Connect) -> None:
    sender, receiver = connect(forward=LinkShape(bandwidth=80e6, latency=0.05, jitter=0.01))
    for index in range(4):
        sender.send(numbered(index, torch.ones(10_000)))
    sender.close()
    for index in range(4):
        expect_index(receiver, index)
    with pytest.raises(LinkClosed):
        receiver.receive(SECONDS)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_direction_has_its_own_shape(connect: Connect, direction: str) -> None:
    one, other = connect(**{direction: LinkShape(bandwidth=8e6, latency=0.1)})
    sender, receiver = (one, other) if direction == "forward" else (other, one)
    receiver.send(numbered(0))
    expect_index(sender, 0)
    start = time.monotonic()
    sender.send(numbered(1, torch.ones(25_000)))
    expect_index(receiver, 1)
    assert time.monotonic() - start >= 0.2, "faster than its shape allows"


def test_abort_wakes_both_ends(sender_and_receiver: Pair) -> None:
    one, other = sender_and_receiver
    causes: dict[str, str] = {}

    def wait(name: str, end: LinkEnd) -> None:
        with pytest.raises(LinkClosed) as error:
            end.receive(SECONDS)
        causes[name] = str(error.value)

    waiters = [threading.Thread(target=wait, args=("one", one)), threading.Thread(target=wait, args=("other", other))]
    for waiter in waiters:
        waiter.start()
    one.abort("the loss is not finite")
    one.abort("something later")
    for waiter in waiters:
        waiter.join(SECONDS)
    assert causes["one"] == "the loss is not finite"
    assert set(causes) == {"one", "other"}
    for end in (one, other):
        with pytest.raises(LinkClosed):
            end.send(numbered(0))
        end.close()


def test_recycling_changes_nothing_that_is_still_used(ends: Pair) -> None:
    kept: list[tuple[int, Message]] = []
    for index in range(24):
        ends[0].send(numbered(index, torch.full((1000,), float(index))))
    for index in range(24):
        message = ends[1].receive(SECONDS)
        assert torch.equal(message.tensors[0], torch.full((1000,), float(index)))
        if index % 2:
            ends[1].recycle(message)
            ends[1].recycle(message)
        else:
            kept.append((index, message))
    for index, message in kept:
        assert torch.equal(message.tensors[0], torch.full((1000,), float(index)))


def test_the_ledger_is_the_same_on_every_transport() -> None:
    shape = LinkShape(bandwidth=10e9)
    spec = LinkSpec("home.0-1", "home.0", "home.1", shape, UNLIMITED)
    counts: dict[str, list[Count]] = {}
    for name, connect in TRANSPORTS.items():
        with ExitStack() as stack:
            one, other = connect(stack, spec)
            for round_, size in enumerate([0, 1, 1000, FRAME_BYTES - 20, FRAME_BYTES, 3 * FRAME_BYTES + 1]):
                header = LinkHeader(round=round_ // 2, micro_batch=size)
                one.send(Message(header, (torch.ones(size, dtype=torch.uint8), torch.ones(size % 7).bfloat16())))
                other.send(Message(header))
                expect_index(other, size)
                expect_index(one, size)
            counts[name] = [end.ledger.of_round(round_) for end in (one, other) for round_ in range(4)]
            one.abort("the test is over")
    assert counts["in_process"] == counts["grpc"]
    forward = counts["grpc"][:4]
    assert [count.messages for count in forward] == [2, 2, 2, 0]
    assert forward[0].payload_bytes == 1 + 2
    assert all(count.busy_seconds == pytest.approx(count.wire_bytes * 8 / 10e9) for count in forward)
    assert all(count.busy_seconds == 0 for count in counts["grpc"][4:])
