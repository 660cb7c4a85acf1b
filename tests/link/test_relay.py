"""Links through the relay of the exchange: the same messages, of which the relay reads none and holds little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from cutting_proxy import CuttingProxy
from members import TIMEOUT
from small_run import Run

from hetero_pp.errors import LinkTimeout, Refused
from hetero_pp.link.protocol import Message
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import EXCHANGE, RELAYED, LinkShape, LinkSpec
from hetero_pp.messages.messages_pb2 import LinkHeader
from hetero_pp.refusals import Kind
from hetero_pp.rpc import relay
from hetero_pp.rpc.callers import Caller, shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.credentials import LinkCredentials, Secret
from hetero_pp.rpc.exchange import serve_exchange
from hetero_pp.rpc.link_end import GrpcLinkEnd
from hetero_pp.rpc.relayed import RelayedDialler, RelayedListener
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import StageLinkDialer, StageLinkServer
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile

SECRET = Secret("the run's secret")
LINK = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
MIXED = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"
COUNTS = {
    ("home.0-1", "forward"): "home.0",
    ("home.0-1", "backward"): "home.1",
    ("dc-exchange", "forward"): "dc",
    ("dc-exchange", "backward"): "dc",
}


class Relayed:
    """A run whose exchange carries the link between its two stages, over a line that can be cut."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run, self._stack = Run(folder, {"home": 2, "dc": 1}), stack
        self.run.exchange.roster = replace(self.run.roster, counts=COUNTS)
        with mock.patch("hetero_pp.rpc.exchange.Relay", self._make_relay):
            server, port = serve_exchange(self.run.exchange, SECRET, "127.0.0.1:0", encrypted=True)
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        self.exchange = f"127.0.0.1:{port}"
        self.proxy = CuttingProxy(self.exchange)
        stack.callback(self.proxy.close)

    def _make_relay(self, *arguments: Any) -> relay.Relay:
        self.relay = relay.Relay(*arguments)
        return self.relay

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        with self.relay._changed:
            assert self.relay._changed.wait_for(is_so, TIMEOUT)

    def listen(self, name: str = "home.1", as_: str = "home.1") -> StageLinkServer:
        """The stage after, of which nothing can be dialled; it may listen by the certificate of another one."""
        relayed = RelayedListener(self.proxy.address, SECRET.credentials(name, encrypted=True), LINK.name)
        self._stack.callback(relayed.close)
        own = LinkCredentials(identity=SECRET.authority.identity(as_))
        server = StageLinkServer(LINK, own, as_, seed=1, patience=TIMEOUT)
        server.listen(relayed.address)
        self._stack.callback(server.close, grace=0)
        return server

    def dial(self, timeout: float = TIMEOUT) -> GrpcLinkEnd:
        """The stage before."""
        relayed = RelayedDialler(self.proxy.address, SECRET.credentials("home.0", encrypted=True), LINK.name)
        self._stack.callback(relayed.close)
        own = LinkCredentials(identity=SECRET.authority.identity("home.0"))
        dialer = StageLinkDialer(LINK, own, "home.0", seed=1, patience=TIMEOUT)
        end = dialer.dial(relayed.address, 0, timeout)
        self._stack.callback(end.abort, "the test is over")
        return end

    def carry(self, name: str, link: str, frames: Iterator[bytes]) -> Iterator[bytes]:
        """What a caller makes of the relay by itself."""
        credentials = SECRET.credentials(name, encrypted=True)
        channel = make_channel(self.exchange, credentials.identity, EXCHANGE)
        self._stack.callback(channel.close)
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(relay.SERVICE, "Carry"))
        metadata = ((relay.LINK, link), *shown(credentials))
        return iter(call(frames, metadata=metadata, wait_for_ready=True, timeout=TIMEOUT))

    def connections(self, spec: RunSpec, member: str, listen: str = "") -> NetworkConnections:
        """Of a member of a whole run."""
        credentials = SECRET.credentials(member, encrypted=True)
        return NetworkConnections(spec, spec.members[member], self.exchange, credentials, Lines(), listen=listen)

    def newest(self) -> object:
        """Who waits to be dialled, and came last."""
        waiting = self.relay._waiting[LINK.name]
        return waiting[-1] if waiting else None

    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange._refusals.counts)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def relayed(tmp_path: Path, stack: ExitStack) -> Relayed:
    return Relayed(tmp_path, stack)


def _message(step: int, size: int = 1000) -> Message:
    return Message(LinkHeader(step=step), (torch.full((size,), step % 256, dtype=torch.uint8),))


def _expect(end: GrpcLinkEnd, steps: range, size: int = 1000) -> None:
    for step in steps:
        message = end.receive(TIMEOUT)
        assert message.header.step == step
        assert torch.equal(message.tensors[0], _message(step, size).tensors[0])


def test_messages_cross_and_the_relay_reads_none_of_them(relayed: Relayed) -> None:
    seen, put = list[bytes](), relay._Half.put

    def spied(half: relay._Half, frame: bytes) -> bool:
        seen.append(frame)
        return put(half, frame)

    with mock.patch.object(relay._Half, "put", spied):
        server = relayed.listen()
        above = relayed.dial()
        below = server.accept(TIMEOUT)
        for step in range(20):
            above.send(_message(step))
            below.send(_message(step))
        _expect(below, range(20))
        _expect(above, range(20))
    assert above.ledger.of_round(0).messages == 20
    carried = b"".join(seen)
    assert len(carried) > 40 * 1000
    assert carried[:3] in (b"\x16\x03\x01", b"\x16\x03\x03")  # a handshake of TLS is the first that is said
    for text in (b"home.0-1", b"hetero_pp.StageLink", b"PRI * HTTP/2.0", bytes([7]) * 100):
        assert text not in carried, "the relay could read what it carries"


def test_a_link_goes_on_where_the_way_to_the_relay_was_cut(relayed: Relayed) -> None:
    server = relayed.listen()
    above = relayed.dial()
    below = server.accept(TIMEOUT)
    for cut in range(3):
        for step in range(10 * cut, 10 * cut + 10):
            above.send(_message(step, 300_000))
            below.send(_message(step))
            if step % 10 == 5:
                relayed.proxy.cut()
        _expect(below, range(10 * cut, 10 * cut + 10), 300_000)
        _expect(above, range(10 * cut, 10 * cut + 10))
    assert relayed.proxy.cuts >= 3
    assert above.streams > 1
    closing = threading.Thread(target=below.close)
    closing.start()
    above.close()
    closing.join(TIMEOUT)


def test_a_relay_that_brings_another_one_is_found_out(relayed: Relayed) -> None:
    """It has the certificate of another member of the run: as far as a relay that is hostile can come."""
    relayed.listen(as_="dc")
    with pytest.raises(LinkTimeout, match="did not answer"):
        relayed.dial(timeout=2.0)


@pytest.mark.parametrize(("name", "link"), [("dc", "home.0-1"), ("dc", "dc-exchange"), ("home.0", "no link")])
def test_who_is_no_end_of_a_link_is_refused_and_counted(relayed: Relayed, name: str, link: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        next(relayed.carry(name, link, iter([b"hello"])))
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert relayed.refusals() == {Kind.FORBIDDEN: 1}


def test_a_frame_that_is_too_large_ends_the_call_and_is_counted(relayed: Relayed) -> None:
    waits = relayed.carry("home.1", LINK.name, _slowly([]))
    dials = relayed.carry("home.0", LINK.name, _slowly([b"a", bytes(relay.CARRIED_BYTES + 1)]))
    assert next(waits) == b"a"
    with pytest.raises(grpc.RpcError) as error:
        next(dials)
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert relayed.refusals() == {Kind.MALFORMED: 1}
    assert list(waits) == []


def test_who_was_taken_back_is_cut_off(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.0)
    is_taken_back, let_in = threading.Event(), relayed.relay._callers.let_in

    def asked(context: grpc.ServicerContext) -> Caller:
        if is_taken_back.is_set():
            raise Refused("home.0: it was taken back")
        return let_in(context)

    waits = relayed.carry("home.1", LINK.name, _slowly([]))
    dials = relayed.carry("home.0", LINK.name, _as_told([b"a", b"b"], is_taken_back))
    assert next(waits) == b"a"
    monkeypatch.setattr(relayed.relay._callers, "let_in", asked)
    is_taken_back.set()
    with pytest.raises(grpc.RpcError) as error:
        next(dials)
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert list(waits) == []


def _as_told(frames: list[bytes], told: threading.Event) -> Iterator[bytes]:
    """The first at once, and the others then."""
    yield frames[0]
    assert told.wait(TIMEOUT)
    yield from frames[1:]


def _slowly(frames: list[bytes]) -> Iterator[bytes]:
    """A stream that says this, and then stays open."""
    yield from frames
    threading.Event().wait(TIMEOUT)


def test_who_does_not_read_makes_the_other_end_wait_and_the_relay_holds_little(relayed: Relayed) -> None:
    sent, most = 0, 64 << 20

    def frames() -> Iterator[bytes]:
        nonlocal sent
        while sent < most:
            sent += relay.CARRIED_BYTES
            yield bytes(relay.CARRIED_BYTES)

    waits = relayed.carry("home.1", LINK.name, _slowly([]))
    dials = relayed.carry("home.0", LINK.name, frames())
    held, until = -1, time.monotonic() + TIMEOUT
    while held != sent or sent == 0:  # what fits into the buffers of both connections and of the relay has gone out
        assert time.monotonic() < until
        held = sent
        threading.Event().wait(0.5)
    assert 0 < sent < most / 2
    for _ in range(most // relay.CARRIED_BYTES):
        next(waits)
    assert sent == most
    assert dials is not waits  # it was kept until here: a call that nobody holds is cancelled


def test_who_cannot_be_dialled_where_it_says_is_sought_through_the_relay(
    relayed: Relayed, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says that it is found at is of no machine (RFC 5737); that costs no second try."""
    with mock.patch("hetero_pp.rpc.connections.DIRECT_SECONDS", 0.5):
        spec = RunSpec(ConfigFile(MIXED).config, 256)
        above = stack.enter_context(relayed.connections(spec, "home.0"))
        below = stack.enter_context(relayed.connections(spec, "home.1", listen=RELAYED))
        assert below.listen() == RELAYED
        for epoch in (1, 2):
            with ThreadPoolExecutor() as threads:
                met = threads.submit(below._server.accept, TIMEOUT, epoch)  # type: ignore[union-attr]
                end = above.open(epoch, "192.0.2.7:47600").downstream
                assert end is not None
                end.send(_message(epoch))
                _expect(met.result(TIMEOUT), range(epoch, epoch + 1))
    assert capsys.readouterr().err.count("sought through the relay") == 1


def test_who_is_not_found_is_asked_for_again(relayed: Relayed) -> None:
    with mock.patch.object(relay, "LONGEST_WAIT", 0.1):
        for name in ("home.0", "home.1"):
            with pytest.raises(grpc.RpcError) as error:
                next(relayed.carry(name, LINK.name, _slowly([])))
            assert isinstance(error.value, grpc.Call)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert relayed.refusals() == {}


def test_the_end_that_came_last_is_dialled_and_few_wait(relayed: Relayed) -> None:
    waiting = list[Iterator[bytes]]()
    for number in range(6):
        newest = relayed.newest()
        waiting.append(relayed.carry("home.1", LINK.name, _slowly([bytes([number])])))
        relayed.wait_until(lambda newest=newest: relayed.newest() is not newest)  # type: ignore[misc]
    dials = relayed.carry("home.0", LINK.name, _slowly([b"hello"]))
    assert next(dials) == b"\x05"
    assert next(waiting[5]) == b"hello"
    for gone in waiting[:2]:
        with pytest.raises(grpc.RpcError):
            next(gone)
