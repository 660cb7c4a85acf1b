"""Links through the exchange's relay carry the same messages. The relay can read none of them and buffers little."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from cutting_proxy import CuttingProxy
from members import TIMEOUT
from small_run import Run

from hetero_pp.config.links import EXCHANGE, RELAYED, LinkShape, LinkSpec
from hetero_pp.core.errors import LinkTimeout, MalformedMessage, Refused
from hetero_pp.link.protocol import Message
from hetero_pp.link.shared_lines import Lines
from hetero_pp.messages.messages_pb2 import LinkHeader
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc import channels, relay
from hetero_pp.rpc import relayed as relayed_module
from hetero_pp.rpc.callers import Metadata, RemoteCaller, shown
from hetero_pp.rpc.certificates import Identity, as_text, new_key
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.credentials import LinkCredentials, Secret
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.relayed import LocalAddress, RelayedDialler, RelayedListener
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import StageLinkDialer, StageLinkServer
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile
from replica_groups.exchange.server import serve_exchange

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
    """A run whose exchange relays the link between its two stages, over a connection that can be cut."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run, self._stack = Run(folder, {"home": 2, "dc": 1}), stack
        self.run.exchange.roster = replace(self.run.roster, counts=COUNTS)
        with mock.patch("replica_groups.exchange.server.Relay", self._make_relay):
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
            for _ in range(int(TIMEOUT / 0.05)):  # some counters change without a notification
                if is_so():
                    return
                self.relay._changed.wait(0.05)
        raise AssertionError("it did not come to that")

    def listen(self, name: str = "home.1", as_: str = "home.1", holder: int = 0) -> StageLinkServer:
        """Listen as the downstream stage, behind the relay. `as_` is the member of its certificate."""
        local = LocalAddress()
        self._stack.callback(local.close)
        server = StageLinkServer(LinkSide(LINK, self.own(as_, holder), as_, seed=1, patience=TIMEOUT), expected=None)
        server.listen(str(local))
        self._stack.callback(server.close, grace=0)
        relayed = RelayedListener(self.proxy.address, SECRET.credentials(name, encrypted=True), LINK.name, str(local))
        self._stack.callback(relayed.close)
        return server

    def own(self, member: str, holder: int = 0) -> LinkCredentials:
        """Return the credentials of a holder of a slot for its links."""
        key = new_key()
        certificate = SECRET.authority.sign(key.public_key(), member, holder, time.time() + 3600.0)
        return LinkCredentials(identity=Identity(certificate, as_text(key), SECRET.authority.certificate))

    def dial(self, timeout: float = TIMEOUT) -> GrpcLinkEnd:
        """Dial as the upstream stage."""
        relayed = RelayedDialler(self.proxy.address, SECRET.credentials("home.0", encrypted=True), LINK.name)
        self._stack.callback(relayed.close)
        own = LinkCredentials(identity=SECRET.authority.identity("home.0"))
        dialer = StageLinkDialer(LinkSide(LINK, own, "home.0", seed=1, patience=TIMEOUT))
        end = dialer.dial(relayed.address, 0, timeout)
        self._stack.callback(end.abort, "the test is over")
        return end

    def carry(self, name: str, link: str = LINK.name) -> Carried:
        """Open a raw call of the relay."""
        credentials = SECRET.credentials(name, encrypted=True)
        channel = make_channel(self.exchange, credentials.identity, EXCHANGE)
        self._stack.callback(channel.close)
        return Carried(channel, ((relay.LINK, link), *shown(credentials)))

    def connections(self, spec: RunSpec, member: str, listen: str = "") -> NetworkConnections:
        """Return the connections of a member of a whole run."""
        credentials = SECRET.credentials(member, encrypted=True)
        return NetworkConnections(spec, spec.members[member], self.exchange, credentials, Lines(), listen=listen)

    def newest(self) -> relay._Half | None:
        """Return the end that waits to be dialled and came last."""
        waiting = self.relay._waiting[LINK.name]
        return waiting[-1] if waiting else None

    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange._refusals.counts)


class Carried:
    """A raw call of the relay."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata) -> None:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(relay.SERVICE, "Carry"))
        self._to_say: SimpleQueue[bytes] = SimpleQueue()
        self._frames = call(self._saying(), metadata=metadata, wait_for_ready=True, timeout=TIMEOUT)

    def say(self, *frames: bytes) -> None:
        """Send frames, with or without credit."""
        for frame in frames:
            self._to_say.put(frame)

    def meet(self) -> Carried:
        """Read the credit that both ends get at first."""
        for _ in range(relay.CREDIT // relay.TAKEN_BYTES):
            assert self.hear() == b""
        return self

    def hear(self) -> bytes:
        """Return the next frame, which may be one of credit."""
        return next(self._frames)

    def leave(self) -> None:
        """Cancel the call, as if the process had gone."""
        self._frames.cancel()

    def code(self) -> grpc.StatusCode:
        """Read to the end and return the status code."""
        with pytest.raises(grpc.RpcError) as error:
            for _ in self._frames:
                pass
        assert isinstance(error.value, grpc.Call)
        return error.value.code()

    def _saying(self) -> Iterator[bytes]:
        while True:
            yield self._to_say.get()


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
    assert carried[:3] in (b"\x16\x03\x01", b"\x16\x03\x03")  # a TLS handshake is the first message
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
    """The other member has a certificate of the run, which is the most that a hostile relay can offer."""
    relayed.listen(as_="dc")
    with pytest.raises(LinkTimeout, match="did not answer"):
        relayed.dial(timeout=2.0)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_former_holder_of_the_slot_that_is_dialled_is_refused(
    relayed: Relayed, stack: ExitStack, is_relayed: bool
) -> None:
    """It listens with its certificate, directly at the slot's address or behind the relay."""
    spec = RunSpec(ConfigFile(MIXED).config, 256)
    address = RELAYED
    if is_relayed:
        relayed.listen(holder=1)
    else:
        former = StageLinkServer(LinkSide(LINK, relayed.own("home.1", holder=1), "home.1", seed=1), expected=None)
        address = f"127.0.0.1:{former.listen('127.0.0.1:0')}"
        stack.callback(former.close, grace=0)
    above = stack.enter_context(relayed.connections(spec, "home.0"))
    with mock.patch("hetero_pp.rpc.neighbour.CONNECT_TIMEOUT", 2.0), pytest.raises(LinkTimeout, match="did not answer"):
        above.open(1, "", address, (None, 2))
    assert above.open(2, "", address, (None, 1)).downstream is not None


@pytest.mark.parametrize(("name", "link"), [("dc", "home.0-1"), ("dc", "dc-exchange"), ("home.0", "no link")])
def test_who_is_no_end_of_a_link_is_refused_and_counted(relayed: Relayed, name: str, link: str) -> None:
    assert relayed.carry(name, link).code() is grpc.StatusCode.PERMISSION_DENIED
    assert relayed.refusals() == {Kind.FORBIDDEN: 1}


@pytest.mark.parametrize("frame", [bytes(relay.CARRIED_BYTES + 1), b""], ids=["too large", "empty: the relay's credit"])
def test_a_frame_of_another_size_ends_the_call_and_is_counted(relayed: Relayed, frame: bytes) -> None:
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0").meet()
    dials.say(b"a", frame)
    assert waits.meet().hear() == b"a"
    assert dials.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(StopIteration):
        waits.hear()
    assert relayed.refusals() == {Kind.MALFORMED: 1}


@pytest.mark.parametrize("name", ["home.0", "home.1"])
def test_who_speaks_before_the_other_end_is_there_is_refused(relayed: Relayed, name: str) -> None:
    """Neither the call nor its frames are kept."""
    early = relayed.carry(name)
    early.say(b"a")
    assert early.code() is grpc.StatusCode.PERMISSION_DENIED
    assert relayed.refusals() == {Kind.MALFORMED: 1}
    assert relayed.newest() is None


def test_who_was_taken_back_is_cut_off(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.0)
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0").meet()
    dials.say(b"a")
    assert waits.meet().hear() == b"a"

    def let_in(context: grpc.ServicerContext) -> RemoteCaller:
        raise Refused("home.0: it was taken back")

    monkeypatch.setattr(relayed.relay._callers, "let_in", let_in)
    dials.say(b"b")
    assert dials.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(StopIteration):
        waits.hear()


def test_credit_is_what_the_other_end_has_taken(relayed: Relayed) -> None:
    """An end with credit may send up to that much at once, again and again. Small frames cost more than their size."""
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0").meet()
    waits.meet()
    for size, cost in ((relay.CARRIED_BYTES, relay.CARRIED_BYTES), (100, relay.LEAST_COST)):
        frames = [bytes([number % 256]) * size for number in range(relay.CREDIT // cost)]
        for _ in range(2):
            dials.say(*frames)
            assert [waits.hear() for _ in frames] == frames
            assert {dials.hear() for _ in range(relay.CREDIT // relay.TAKEN_BYTES)} == {b""}
    assert relayed.refusals() == {}


def test_an_end_fills_its_frames_while_bytes_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_module, "_MANY_BYTES", 1)
    monkeypatch.setattr(relayed_module, "_MORE_MILLISECONDS", 1000 * TIMEOUT)
    said = b"".join(bytes([number % 251]) * 1000 for number in range(1100))
    here, there = socket.socketpair()

    def say() -> None:
        with here:
            here.sendall(said)

    with there, ThreadPoolExecutor() as threads:
        threads.submit(say)
        frames = list(relayed_module._frames_of(there))
    assert [len(frame) for frame in frames] == [relay.CARRIED_BYTES] * 2 + [len(said) - 2 * relay.CARRIED_BYTES]
    assert b"".join(frames) == said


@pytest.fixture
def reads_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make unread frames wait at the sender. Otherwise the connection buffers megabytes by itself."""
    changed: channels.Options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    monkeypatch.setattr(channels, "_OPTIONS", [*dict([*channels._OPTIONS, *changed]).items()])


@pytest.mark.usefixtures("reads_on_demand")
def test_who_says_more_than_it_has_credit_for_is_cut(relayed: Relayed) -> None:
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0").meet()
    dials.say(*[bytes(relay.CARRIED_BYTES)] * 64)
    assert dials.code() is grpc.StatusCode.PERMISSION_DENIED
    assert relayed.refusals() == {Kind.MALFORMED: 1}
    assert relay.CREDIT <= relayed.relay.carried[LINK.name] <= relay.CREDIT + (1 << 19)
    assert waits is not dials  # keeps the call alive until here: calls without references are cancelled


def test_small_frames_take_credit_for_the_memory_that_they_take() -> None:
    half = relay._Half("home.1", LINK.name, lambda: None)
    for _ in range(relay.CREDIT // relay.LEAST_COST):
        assert half.put(b"a")
    with pytest.raises(MalformedMessage, match="credit"):
        half.put(b"a")


@pytest.mark.usefixtures("reads_on_demand")
def test_who_reads_nothing_and_says_too_much_is_cut_all_the_same(relayed: Relayed) -> None:
    """The error waits behind frames that the end does not read."""
    waits = relayed.carry("home.1")
    relayed.wait_until(lambda: relayed.newest() is not None)
    end, dials = relayed.newest(), relayed.carry("home.0").meet()
    waits.meet().say(*[bytes(relay.CARRIED_BYTES)] * 16)
    relayed.wait_until(lambda: relayed.relay.carried[LINK.name] == relay.CREDIT)
    dials.say(*[bytes(relay.CARRIED_BYTES)] * 64)
    assert end is not None and end.peer is not None
    assert end.peer.is_over.wait(TIMEOUT / 2)
    assert relayed.refusals() == {Kind.MALFORMED: 1}


@pytest.mark.usefixtures("reads_on_demand")
def test_who_does_not_read_what_is_left_of_an_end_that_has_gone_is_cut(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No peer is left that would read and count what the end sends."""
    monkeypatch.setattr(relay, "_LAST_FRAMES_SECONDS", 0.2)
    waits = relayed.carry("home.1")
    relayed.wait_until(lambda: relayed.newest() is not None)
    end, dials = relayed.newest(), relayed.carry("home.0").meet()
    waits.meet()
    dials.say(*[bytes(relay.CARRIED_BYTES)] * 16)
    relayed.wait_until(lambda: relayed.relay.carried[LINK.name] == relay.CREDIT)
    dials.leave()
    assert end is not None
    assert end.is_over.wait(TIMEOUT / 2)


def test_who_cannot_be_dialled_where_it_says_is_sought_through_the_relay(
    relayed: Relayed, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The announced address belongs to no machine (RFC 5737). It is tried only once."""
    with mock.patch("hetero_pp.rpc.neighbour.DIRECT_SECONDS", 0.5):
        spec = RunSpec(ConfigFile(MIXED).config, 256)
        above = stack.enter_context(relayed.connections(spec, "home.0"))
        below = stack.enter_context(relayed.connections(spec, "home.1", listen=RELAYED))
        assert below.listen() == RELAYED
        assert below._before is not None
        for epoch in (1, 2):
            with ThreadPoolExecutor() as threads:
                below._before.server.expect(epoch, None)
                below._before.be_found(epoch)
                met = threads.submit(below._before.accept, epoch)
                end, far = above.open(epoch, "", "192.0.2.7:47600").downstream, met.result(TIMEOUT)
                assert end is not None
                end.send(_message(epoch))
                _expect(far, range(epoch, epoch + 1))
    assert capsys.readouterr().err.count("connecting through the relay") == 1


def test_a_group_of_one_stage_has_nobody_to_listen_for(relayed: Relayed, stack: ExitStack) -> None:
    config = ConfigFile(MIXED, ["replicas.1.stages=[{layers: 4}]"]).config
    alone = stack.enter_context(relayed.connections(RunSpec(config, 256), "home.0", listen="127.0.0.1:0"))
    assert alone.listen() == ""


def test_either_end_may_dial_and_another_one_in_each_epoch(relayed: Relayed, stack: ExitStack) -> None:
    """This holds through the relay too, and both ends keep counting."""
    spec = RunSpec(ConfigFile(MIXED).config, 256)
    found = [stack.enter_context(relayed.connections(spec, name, listen=RELAYED)) for name in ("home.0", "home.1")]
    assert [one.listen() for one in found] == [RELAYED, RELAYED]
    both = [found[0]._after, found[1]._before]
    for epoch in range(1, 5):
        dialler, dialled = both if epoch % 2 else both[::-1]
        assert dialler is not None
        assert dialled is not None
        dialled.server.expect(epoch, None)
        dialled.be_found(epoch)
        with ThreadPoolExecutor() as threads:
            met = threads.submit(dialled.accept, epoch)
            ends = dialler.dial(RELAYED, epoch), met.result(TIMEOUT)
        for one, other in (ends, ends[::-1]):
            one.send(_message(epoch))
            _expect(other, range(epoch, epoch + 1))
            assert one.ledger.of_round(0).messages == epoch
        assert (dialler._from_relay, dialled._to_relay) == (None, None)  # otherwise two would wait and find each other
    assert relayed.refusals() == {}


def test_who_is_not_found_is_asked_for_again(relayed: Relayed) -> None:
    with mock.patch.object(relay, "LONGEST_WAIT", 0.1):
        for name in ("home.0", "home.1"):
            assert relayed.carry(name).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert relayed.refusals() == {}


def test_the_end_that_came_last_is_dialled_and_few_wait(relayed: Relayed) -> None:
    waiting = list[Carried]()
    for _ in range(6):
        newest = relayed.newest()
        waiting.append(relayed.carry("home.1"))
        relayed.wait_until(lambda newest=newest: relayed.newest() is not newest)  # type: ignore[misc]
    dials = relayed.carry("home.0").meet()
    dials.say(b"hello")
    waiting[5].meet().say(b"and you")
    assert (waiting[5].hear(), dials.hear()) == (b"hello", b"and you")
    for gone in waiting[:2]:
        assert gone.code() is grpc.StatusCode.DEADLINE_EXCEEDED
