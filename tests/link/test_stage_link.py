"""Network faults of a stage link: strangers, malformed data, busy ports and peers that die."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from opened_links import open_stage_link

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed, LinkTimeout, PeerAtFault, Refused
from hetero_pp.link.framing import encode
from hetero_pp.link.protocol import Message, sealed
from hetero_pp.messages.messages_pb2 import LinkHeader, LinkHello
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.launch.fork_server import fork_server
from hetero_pp.rpc import stage_link
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide, LinkStream
from hetero_pp.rpc.stage_link import StageLink

SECONDS = 60.0
PLAN = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
TOKEN = "run"
HELLO = LinkHello(version=PROTOCOL_VERSION, token=TOKEN, link=PLAN.name, sender=PLAN.source)


class Listener:
    """A downstream stage's server and the refusals it reports."""

    def __init__(self, stack: ExitStack, spec: LinkSpec = PLAN, listen: str = "127.0.0.1:0") -> None:
        self.refusals: list[tuple[str, str, Kind]] = []
        self.links = StageLink(
            LinkSide(
                spec,
                Credentials("", "run"),
                spec.target,
                seed=0,
                on_refusal=lambda *refusal: self.refusals.append(refusal),
            ),
            expected=None,
        )
        self.address = f"127.0.0.1:{self.links.listen(listen)}"
        stack.callback(self.links.close, grace=0)

    def dial(self, spec: LinkSpec = PLAN, token: str = "run", member: str = "home.0") -> GrpcLinkEnd:
        return open_stage_link(self.address, spec, Credentials("", token), member, seed=0, timeout=SECONDS)


@pytest.fixture
def listener(stack: ExitStack) -> Listener:
    return Listener(stack)


def assert_works(one: GrpcLinkEnd, other: GrpcLinkEnd) -> None:
    one.send(Message(LinkHeader(step=3)))
    assert other.receive(SECONDS).header.step == 3


def raw_stream(stack: ExitStack, address: str, *frames: bytes, token: str | None = TOKEN) -> Iterator[bytes]:
    """Open a call with a token, send any frames, and then stay silent."""
    channel = make_channel(address)
    stack.callback(channel.close)
    waiting = threading.Event()
    stack.callback(waiting.set)

    def requests() -> Iterator[bytes]:
        yield from frames
        waiting.wait()

    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/hetero_pp.StageLink/Open")
    metadata = () if token is None else (("token", token),)
    return iter(stream(requests(), metadata=metadata, wait_for_ready=True, timeout=SECONDS))


def refusal_code(replies: Iterator[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    return error.value.code()


def refusal_of(replies: Iterator[bytes]) -> str:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(error.value.details())


def test_a_server_accepts_no_generation_before_it_is_told_of_one(stack: ExitStack) -> None:
    links = StageLink(LinkSide(PLAN, Credentials("", TOKEN), PLAN.target, seed=0))
    address = f"127.0.0.1:{links.listen('127.0.0.1:0')}"
    stack.callback(links.close, grace=0)
    hello = LinkHello(version=PROTOCOL_VERSION, token=TOKEN, link=PLAN.name, sender=PLAN.source, generation=1)
    frames = [bytes(hello.SerializeToString())]
    assert refusal_code(raw_stream(stack, address, *frames)) is grpc.StatusCode.UNAVAILABLE
    links.expect(1, None)
    next(raw_stream(stack, address, *frames))


def test_strangers_are_refused_and_the_right_peer_still_gets_in(listener: Listener) -> None:
    with pytest.raises(Refused, match="another token"):
        listener.dial(token="another")
    with pytest.raises(Refused, match=r"found link home\.1-2, expected home\.0-1"):
        listener.dial(replace(PLAN, name="home.1-2"))
    with pytest.raises(Refused, match=r"found sender mallory, expected home\.0"):
        listener.dial(member="mallory")
    (stranger, *told) = [(sender, kind) for sender, _, kind in listener.refusals]
    assert stranger[0].startswith("ipv4:127.0.0.1:")
    assert stranger[1] is Kind.STRANGER
    assert told == [("home.0", Kind.UNEXPECTED), ("mallory", Kind.UNEXPECTED)]
    assert listener.links.refusals == 3
    upstream, downstream = listener.dial(), listener.links.accept(SECONDS)
    assert_works(upstream, downstream)
    with pytest.raises(Refused, match="already connected"):
        listener.dial()
    assert_works(downstream, upstream)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": "guess"}, "found another token than the link's"),
        ({"version": 99}, f"found version 99, expected {PROTOCOL_VERSION}"),
        ({"version": PROTOCOL_VERSION - 1}, f"found version {PROTOCOL_VERSION - 1}, expected {PROTOCOL_VERSION}"),
        ({"sender": ""}, "found sender , expected home.0"),
    ],
)
def test_a_wrong_hello(stack: ExitStack, listener: Listener, change: dict[str, Any], reason: str) -> None:
    hello = LinkHello()
    hello.CopyFrom(HELLO)
    for name, value in change.items():
        setattr(hello, name, value)
    assert refusal_of(raw_stream(stack, listener.address, hello.SerializeToString())) == reason


@pytest.mark.parametrize("frame", [b"", b"\xff\xff", b"GET / HTTP/1.1", bytes(5000)])
def test_no_hello_at_all(stack: ExitStack, listener: Listener, frame: bytes) -> None:
    refusal_of(raw_stream(stack, listener.address, frame))
    assert_works(listener.dial(), listener.links.accept(SECONDS))


@pytest.mark.parametrize("token", [None, "", "guess", TOKEN + "!"])
def test_strangers_that_open_calls_and_send_nothing_keep_nobody_out(
    stack: ExitStack, listener: Listener, token: str | None
) -> None:
    """There are more calls than server threads. Each is refused before the server reads its messages."""
    waiting = [raw_stream(stack, listener.address, token=token) for _ in range(30)]
    for replies in waiting:
        assert refusal_of(replies) == "found another token than the link's"
    assert_works(listener.dial(), listener.links.accept(SECONDS))
    assert {kind for _, _, kind in listener.refusals} == {Kind.STRANGER}
    assert listener.links.refusals == 30


def test_the_neighbour_has_no_more_calls_open_than_a_link_needs(stack: ExitStack, listener: Listener) -> None:
    """Whichever call arrives last is refused."""
    streams = [raw_stream(stack, listener.address) for _ in range(stage_link._MOST_OPEN + 1)]
    with ThreadPoolExecutor(len(streams)) as pool:
        refused = next(as_completed([pool.submit(refusal_code, stream) for stream in streams]))
        assert refused.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        listener.links.close(grace=0)


def test_a_silent_neighbour_is_dropped(stack: ExitStack, listener: Listener) -> None:
    with mock.patch.object(stage_link, "HELLO_SECONDS", 0.05), pytest.raises(grpc.RpcError) as error:
        next(raw_stream(stack, listener.address))
    assert error.value.code() is grpc.StatusCode.CANCELLED
    assert_works(listener.dial(), listener.links.accept(SECONDS))


def test_the_upstream_refuses_a_listener_that_is_not_its_neighbour(listener: Listener) -> None:
    with pytest.raises(PeerAtFault, match=r"found sender home\.1, expected home\.9"):
        listener.dial(replace(PLAN, target="home.9"))


def test_nobody_listens(stack: ExitStack, listener: Listener) -> None:
    listener.links.close(grace=0)
    with pytest.raises(LinkTimeout, match="did not answer"):
        open_stage_link(listener.address, PLAN, Credentials("", "run"), "home.0", seed=0, timeout=0.2)


def test_nobody_dials(listener: Listener) -> None:
    with pytest.raises(LinkTimeout, match=r"home\.0 did not connect within 0\.01 s"):
        listener.links.accept(0.01)


def test_the_upstream_may_be_first(stack: ExitStack, listener: Listener) -> None:
    listener.links.close(grace=0)
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(listener.dial)
        late = Listener(stack, listen=listener.address)
        downstream = late.links.accept(SECONDS)
        assert_works(dialled.result(SECONDS), downstream)


def test_a_busy_port_is_an_error(listener: Listener) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {listener.address}"):
        StageLink(LinkSide(PLAN, Credentials("", "run"), PLAN.target, seed=0), expected=None).listen(listener.address)


MESSAGE = b"".join(*encode(sealed(Message(LinkHeader(step=1), (torch.ones(4),)))))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xff\xff\xff\xff"], "found a header of"),
        ([MESSAGE, b""], "found a first frame of 0 bytes"),
        ([MESSAGE[:-1]], "found 15 bytes of payload in a frame, expected 16"),
        ([b"?"], "found the control byte"),
        ([b"\x06"], "found the control byte"),
        ([b"\x04", MESSAGE], "found a message after the end"),
        ([bytes(3 << 20), bytes(1)], "found a first frame of 3145728 bytes"),
    ],
)
def test_malformed_data_of_the_peer_closes_the_link(
    stack: ExitStack, listener: Listener, frames: list[bytes], reason: str
) -> None:
    replies = raw_stream(stack, listener.address, HELLO.SerializeToString(), *frames)
    end = listener.links.accept(SECONDS)
    with pytest.raises(LinkClosed, match=f"malformed data from home.0: {reason}|the peer closed the link"):
        for _ in range(3):
            end.receive(SECONDS)
    with pytest.raises(grpc.RpcError) as error:
        for _ in range(3):
            next(replies)
    assert error.value.code() is grpc.StatusCode.ABORTED
    assert reason in str(error.value.details())
    ((sender, told, kind),) = listener.refusals
    assert kind is Kind.MALFORMED
    assert sender == "home.0"
    assert reason in told


LARGE = [b"".join(pieces) for pieces in encode(sealed(Message(LinkHeader(step=1), (torch.ones(1 << 20),))))]


@pytest.mark.parametrize("frames", [[], LARGE[:1], [MESSAGE], LARGE[:3]], ids=["nothing", "a part", "one", "parts"])
def test_a_neighbour_that_says_no_more_is_waited_for_as_long_as_told(
    stack: ExitStack, listener: Listener, frames: list[bytes]
) -> None:
    replies = raw_stream(stack, listener.address, HELLO.SerializeToString(), *frames)
    next(replies)
    end = listener.links.accept(SECONDS)
    if frames == [MESSAGE]:
        end.receive(SECONDS)
    with pytest.raises(LinkTimeout):
        end.receive(0.1)


def test_a_neighbour_that_begins_a_stream_again_and_again_is_waited_for_as_long_as_told(stack: ExitStack) -> None:
    links = StageLink(LinkSide(PLAN, Credentials("", "run"), PLAN.target, seed=0, patience=SECONDS), expected=None)
    address = f"127.0.0.1:{links.listen('127.0.0.1:0')}"
    stack.callback(links.close, grace=0)
    hello = LinkHello(session=b"session")
    hello.MergeFrom(HELLO)

    def begin() -> None:
        hello.stream += 1
        next(raw_stream(stack, address, hello.SerializeToString()))
        hello.goes_on = True

    begin()
    end = links.accept(SECONDS)
    for _ in range(3):
        begin()
        with pytest.raises(LinkTimeout):
            end.receive(0.1)
    end.abort("the test is over")


def test_the_downstream_tells_why_it_aborts(listener: Listener) -> None:
    upstream, downstream = listener.dial(), listener.links.accept(SECONDS)
    downstream.abort("out of memory")
    with pytest.raises(LinkClosed, match="the peer aborted: out of memory"):
        upstream.receive(SECONDS)


def test_a_server_that_stops(listener: Listener) -> None:
    upstream, downstream = listener.dial(), listener.links.accept(SECONDS)
    listener.links.close(grace=0)
    for end in (upstream, downstream):
        with pytest.raises(LinkClosed):
            end.receive(SECONDS)
        end.close()


def test_a_member_that_is_through_listens_no_more(stack: ExitStack, listener: Listener) -> None:
    upstream, downstream = listener.dial(), listener.links.accept(SECONDS)
    with ThreadPoolExecutor(2) as pool:
        for closed in [pool.submit(end.close) for end in (upstream, downstream)]:
            closed.result(SECONDS)
    assert not _is_refused(listener.address)
    listener.links.close()
    assert _is_refused(listener.address)
    assert Listener(stack, listen=listener.address).address == listener.address


def _is_refused(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except ConnectionError:
        return True
    return False


def test_what_an_end_failed_of_is_told_though_its_server_stops(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_delivered, stopping = GrpcLinkEnd.wait_until_delivered, threading.Event()

    def late(end: GrpcLinkEnd, stream: LinkStream) -> str | None:
        assert stopping.wait(SECONDS)
        return wait_until_delivered(end, stream)

    monkeypatch.setattr(GrpcLinkEnd, "wait_until_delivered", late)
    upstream, downstream = listener.dial(), listener.links.accept(SECONDS)
    downstream.abort("out of memory")
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(listener.links.close, grace=SECONDS)
        while not _is_refused(listener.address):
            pass
        assert not closed.done()
        stopping.set()
        closed.result(SECONDS)
    with pytest.raises(LinkClosed, match="the peer aborted: out of memory"):
        upstream.receive(SECONDS)


def dial_and_wait(address: str) -> None:
    """Run an upstream process that is killed later."""
    end = open_stage_link(address, PLAN, Credentials("", "run"), "home.0", seed=0, timeout=SECONDS)
    end.send(Message(LinkHeader(step=3)))
    end.receive(SECONDS)


@pytest.mark.starts_processes
def test_an_upstream_process_that_dies(listener: Listener) -> None:
    process = fork_server().Process(target=dial_and_wait, args=(listener.address,))
    process.start()
    downstream = listener.links.accept(SECONDS)
    assert downstream.receive(SECONDS).header.step == 3
    process.kill()
    process.join(SECONDS)
    with pytest.raises(LinkClosed, match="the peer closed the stream"):
        downstream.receive(SECONDS)
    with pytest.raises(LinkClosed):
        downstream.send(Message(LinkHeader()))


def listen_and_wait(control: Connection) -> None:
    """Run a downstream process that is killed later."""
    with ExitStack() as stack:
        listener = Listener(stack)
        control.send(listener.address)
        listener.links.accept(SECONDS).receive(SECONDS)


@pytest.mark.starts_processes
def test_a_downstream_process_that_dies() -> None:
    context = fork_server()
    here, there = context.Pipe()
    process = context.Process(target=listen_and_wait, args=(there,))
    process.start()
    upstream = open_stage_link(here.recv(), PLAN, Credentials("", "run"), "home.0", seed=0, timeout=SECONDS)
    process.kill()
    process.join(SECONDS)
    with pytest.raises(LinkClosed, match="the peer disconnected"):
        upstream.receive(SECONDS)
