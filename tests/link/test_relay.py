"""Links through the exchange's relay carry the same messages. The relay can read none of them and buffers little."""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from cutting_proxy import CuttingProxy
from heard import heard
from members import TIMEOUT
from small_run import Run

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, RELAYED, LinkShape, LinkSpec
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import LinkTimeout, Refused
from hetero_pp.link.protocol import Message
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import LinkHeader, RelayedLink, RelayPlace
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc import relay
from hetero_pp.rpc.callers import Metadata, RemoteCaller, shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Credentials, Identity, Secret, as_text, new_key
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.relay import (
    Budget,
    LinkLimit,
    LocalAddress,
    MeetingPoint,
    RelayedDialler,
    RelayedListener,
    TrainedRound,
)
from hetero_pp.rpc.services import calls_of
from hetero_pp.rpc.stage_link import StageLink
from hetero_pp.simulator.traffic import stage_link_loads
from replica_groups.exchange.host import link_limits
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
    """A run with a link between two stages that the exchange relays, over a connection that can be cut."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run, self._stack = Run(folder, {"home": 2, "dc": 1}), stack
        self.training: TrainedRound | None = TrainedRound(1, 1, steps=1e12)
        self.run.exchange.link_limits = {(LINK.name, way): LinkLimit(step_bytes=1.0) for way in DIRECTIONS}
        self.run.exchange.trains = lambda link: self.training  # type: ignore[method-assign]
        self._kept: list[Carried] = []
        self.run.exchange.roster = replace(self.run.roster, counts=COUNTS)
        self.meeting_point = MeetingPoint("127.0.0.1:0")
        stack.callback(self.meeting_point.close)
        with mock.patch("replica_groups.exchange.server.Relay", self._make_relay):
            server, port = serve_exchange(
                self.run.exchange, SECRET, "127.0.0.1:0", encrypted=True, meeting_point=self.meeting_point
            )
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        self.exchange = f"127.0.0.1:{port}"
        self.proxy = CuttingProxy(self.exchange)
        stack.callback(self.proxy.close)
        self.hosts = self.proxy.address  # of the exchange, as its members know them

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

    def listen(self, name: str = "home.1", as_: str = "home.1", holder: int = 0) -> StageLink:
        """Listen as the downstream stage, behind the relay. `as_` is the member of its certificate."""
        local = LocalAddress()
        self._stack.callback(local.close)
        server = StageLink(LinkSide(LINK, self.own(as_, holder), as_, seed=1, patience=TIMEOUT), expected=None)
        server.listen(str(local))
        self._stack.callback(server.close, grace=0)
        relayed = RelayedListener(self.hosts, SECRET.credentials(name, encrypted=True), LINK.name, str(local))
        self._stack.callback(relayed.close)
        return server

    def own(self, member: str, holder: int = 0) -> Credentials:
        """Return the credentials of a holder of a slot for its links."""
        key = new_key()
        certificate = SECRET.authority.sign(key.public_key(), member, holder, time.time() + 3600.0)
        return Credentials("", identity=Identity(certificate, as_text(key), SECRET.authority.certificate))

    def dial(self, timeout: float = TIMEOUT) -> GrpcLinkEnd:
        """Dial as the upstream stage."""
        relayed = RelayedDialler(self.hosts, SECRET.credentials("home.0", encrypted=True), LINK.name)
        self._stack.callback(relayed.close)
        own = Credentials("", identity=SECRET.authority.identity("home.0"))
        dialer = StageLink(LinkSide(LINK, own, "home.0", seed=1, patience=TIMEOUT))
        end = dialer.dial(relayed.address, 0, timeout)
        self._stack.callback(end.abort, "the test is over")
        return end

    def carry(self, name: str, link: str = LINK.name) -> Carried:
        """Open a raw call of the relay."""
        credentials = SECRET.credentials(name, encrypted=True)
        channel = make_channel(self.exchange, credentials.identity, EXCHANGE)
        self._stack.callback(channel.close)
        return Carried(channel, shown(credentials), link)

    def connections(self, spec: RunSpec, member: str, listen: str = "") -> NetworkConnections:
        """Return the connections of a member of a whole run."""
        credentials = SECRET.credentials(member, encrypted=True)
        return NetworkConnections(spec, spec.members[member], self.exchange, credentials, Lines(), listen=listen)

    def met(self) -> tuple[socket.socket, socket.socket]:
        """Return the connections of both ends of one relayed connection: of the dialling end, and of the other one."""
        waits, dials = self.carry("home.1"), self.carry("home.0")
        self._kept += [waits, dials]  # calls without references are cancelled
        return self._stack.enter_context(dials.meet()), self._stack.enter_context(waits.meet())

    def newest(self) -> relay._End | None:
        """Return the end that waits to be dialled and came last."""
        waiting = self.relay._waiting[LINK.name]
        return waiting[-1] if waiting else None

    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange.runner.refusals.counts)


class Carried:
    """A raw call of the relay, and its connection."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, link: str) -> None:
        call = calls_of(relay.SERVICE, channel)["Carry"]
        self._call = call(RelayedLink(link=link), metadata=metadata, wait_for_ready=True, timeout=TIMEOUT)

    def place(self) -> RelayPlace:
        """Wait for the other end, and return where to connect."""
        found = next(self._call)
        assert isinstance(found, RelayPlace)
        return found

    def meet(self) -> socket.socket:
        """Wait for the other end, and connect."""
        place = self.place()
        connection = socket.create_connection(("127.0.0.1", place.port), TIMEOUT)
        connection.sendall(place.key)
        return connection

    def leave(self) -> None:
        """Cancel the call, as if the process had gone."""
        self._call.cancel()

    def code(self) -> grpc.StatusCode:
        """Read to the end and return the status code."""
        with pytest.raises(grpc.RpcError) as error:
            for _ in self._call:
                pass
        assert isinstance(error.value, grpc.Call)
        return error.value.code()


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
    seen, send = list[bytes](), relay._send

    def spied(target: socket.socket, rest: memoryview, check: relay.Check) -> None:
        if target.family == socket.AF_INET and target.getsockname()[1] == relayed.meeting_point.port:
            seen.append(bytes(rest))
        send(target, rest, check)

    with mock.patch.object(relay, "_send", spied):
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
    assert 40 * 1000 < len(carried) <= relayed.relay.carried_for("home.0")
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


def test_a_link_is_relayed_by_the_host_that_serves_the_exchange_now(relayed: Relayed) -> None:
    """The first host of the exchange is gone."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    relayed.hosts = f"127.0.0.1:{port},{relayed.proxy.address}"
    server = relayed.listen()
    above = relayed.dial()
    below = server.accept(TIMEOUT)
    above.send(_message(0))
    _expect(below, range(1))


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
        former = StageLink(LinkSide(LINK, relayed.own("home.1", holder=1), "home.1", seed=1), expected=None)
        address = f"127.0.0.1:{former.listen('127.0.0.1:0')}"
        stack.callback(former.close, grace=0)
    above = stack.enter_context(relayed.connections(spec, "home.0"))
    with (
        mock.patch("hetero_pp.rpc.stage_link.CONNECT_TIMEOUT", 2.0),
        pytest.raises(LinkTimeout, match="did not answer"),
    ):
        above.open(1, "", address, (None, 2))
    assert above.open(2, "", address, (None, 1)).downstream is not None


@pytest.mark.parametrize(("name", "link"), [("dc", "home.0-1"), ("dc", "dc-exchange"), ("home.0", "no link")])
def test_who_is_no_end_of_a_link_is_refused_and_counted(relayed: Relayed, name: str, link: str) -> None:
    assert relayed.carry(name, link).code() is grpc.StatusCode.PERMISSION_DENIED
    assert relayed.refusals() == {Kind.FORBIDDEN: 1}


def test_bytes_cross_in_both_directions_and_are_counted(relayed: Relayed) -> None:
    """An end may close one direction. Its last bytes arrive, and it still gets those of the other end."""
    above, below = relayed.met()
    said = bytes(range(256)) * 10_000
    with ThreadPoolExecutor() as threads:
        for one, other in ((above, below), (below, above)):
            sent = threads.submit(one.sendall, said)
            assert heard(other, len(said)) == said
            sent.result(TIMEOUT)
        above.sendall(b"the last bytes")
        above.shutdown(socket.SHUT_WR)
        assert heard(below, 100) == b"the last bytes"
        sent = threads.submit(below.sendall, said)
        assert heard(above, len(said)) == said
        sent.result(TIMEOUT)
    assert relayed.relay.carried_for("home.1") == 3 * len(said) + len(b"the last bytes")
    assert relayed.refusals() == {}


def _carried_until(relayed: Relayed, above: socket.socket, below: socket.socket, refused: int) -> int:
    """Send until the sender was refused so many times; return the bytes that were carried."""
    above.settimeout(0.1)
    below.settimeout(0.1)
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(_send_until, above, lambda: relayed.refusals() == {Kind.UNEXPECTED: refused})
        while not sent.done():
            with suppress(TimeoutError):
                below.recv(1 << 20)
    return relayed.relay.carried_for("home.0")


def _send_until(connection: socket.socket, is_over: Callable[[], bool]) -> None:
    while not is_over():
        with suppress(TimeoutError):
            connection.send(bytes(1 << 16))


def test_a_link_carries_what_it_may_in_each_round_and_more_is_counted(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is refused once a round."""
    monkeypatch.setattr(relay, "REFILL_SECONDS", 1e9)
    may_carry = LinkLimit(step_bytes=1.0).round_bytes(steps=1e6)
    relayed.training = TrainedRound(1, 1, steps=1e6)
    above, below = relayed.met()
    first = _carried_until(relayed, above, below, refused=1)
    assert may_carry <= first <= may_carry + 2 * relay.ROOM_BYTES
    relayed.training = TrainedRound(2, 1, steps=1e6)
    second = _carried_until(relayed, above, below, refused=2)
    assert may_carry <= second - first <= may_carry + 2 * relay.ROOM_BYTES


def test_a_budget_of_a_link_grows_with_its_rounds_and_its_line() -> None:
    now, training = 0.0, TrainedRound(1, 1, steps=10)
    limit = LinkLimit(step_bytes=1e6, evaluation_bytes=2e6, bits_a_second=8e6)
    whole = limit.round_bytes(10)
    assert whole == relay.FREE_BYTES + 3 * 12e6
    budget = Budget(limit, lambda: now)

    def carry(count: float, trains: TrainedRound | None = training) -> bool:
        return budget.carry(int(count), lambda: trains)

    assert not carry(0, None)  # a group that does not train carries nothing
    assert carry(0)
    now = 1000.0
    assert carry(1.2e6)
    assert not carry(0.1e6)  # 1.25 MB a second, a second ahead
    now += 0.1
    assert carry(0)
    now = 2000.0
    assert not carry(whole)
    assert budget.is_newly_used_up()
    assert not budget.is_newly_used_up()
    now += 1000.0
    assert not carry(0, None)
    assert carry(0)  # minutes bring as much again, for rounds with many cuts
    assert carry(0, TrainedRound(2, 1, steps=10))


def test_a_link_has_one_connection_and_a_group_that_trains_nothing_has_none(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(relay, "IDLE_SECONDS", 0.1)
    former = relayed.met()
    above, below = relayed.met()
    for one in former:
        assert heard(one, 1) == b""
    above.sendall(b"a")
    assert heard(below, 1) == b"a"
    relayed.training = None
    for one in (above, below):
        assert heard(one, 1) == b""
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0")
    with ThreadPoolExecutor() as threads:
        met = [threads.submit(one.meet) for one in (dials, waits)]
        relayed.wait_until(lambda: relayed.newest() is not None)
        assert not any(one.done() for one in met)
        relayed.training = TrainedRound(1, 2, steps=1.0)
        for met_one in met:
            met_one.result(TIMEOUT).close()


def test_the_exchange_relays_for_a_group_with_all_its_members_and_a_round(tmp_path: Path) -> None:
    exchange = (run := Run(tmp_path, {"home": 2, "dc": 1})).exchange
    exchange.roster = replace(run.roster, counts=COUNTS)
    assert exchange.trains(LINK.name) is None
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: exchange.assign(name, 0), ("home.0", "home.1")))
    found = exchange.trains(LINK.name)
    assert found is not None
    assert (found.round, found.generation) == (1, 2)
    exchange.died("home.1", "its host is gone", None)
    assert exchange.trains(LINK.name) is None


def test_a_link_may_carry_what_its_run_predicts_and_its_line_has() -> None:
    spec = RunSpec(ConfigFile(MIXED).config, 256)
    limits = link_limits(spec)
    links = [name for name, link in spec.links.items() if link.target != EXCHANGE]
    assert limits.keys() == set(itertools.product(links, DIRECTIONS))
    for name, way in itertools.product(links, DIRECTIONS):
        limit = limits[name, way]
        group = next(one for one in spec.config.replicas if one.name == name.partition(".")[0])
        assert isinstance(group, ParticipantsReplica)
        load = stage_link_loads(spec, group)[way]
        assert limit.step_bytes == load.step + group.micro_batches * relay.MESSAGE_BYTES
        assert limit.bits_a_second == spec.links[name].bottleneck(way)


def test_an_end_that_does_not_read_stops_the_other_one(relayed: Relayed) -> None:
    """The relay keeps one buffer for each direction, beside those of the system."""
    above, below = relayed.met()
    above.setblocking(False)
    said = bytearray()
    with suppress(BlockingIOError):
        for number in range(int(TIMEOUT / 0.05)):
            select.select([], [above], [], 0.05)
            some = bytes([number % 251]) * 65_536
            said += some[: above.send(some)]
        raise AssertionError("the relay took more than its room")
    assert len(said) > relay.ROOM_BYTES
    assert heard(below, len(said)) == said
    above.setblocking(True)
    above.sendall(b"more")
    assert heard(below, 4) == b"more"


def test_a_timeout_loses_and_doubles_no_byte() -> None:
    """The target takes only parts of what is read at once, and for a while it takes nothing."""
    said, checked = bytes(range(256)) * 2_000, threading.Semaphore(0)
    (here, source), (target, there) = socket.socketpair(), socket.socketpair()
    target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
    for one in (source, target):
        one.settimeout(0.01)
    with ThreadPoolExecutor() as threads, here, source, target, there:
        threads.submit(relay.pass_on, source, target, lambda count: checked.release() if count == 0 else None)
        sent = threads.submit(here.sendall, said)
        for _ in range(3):
            assert checked.acquire(timeout=TIMEOUT)
        assert heard(there, len(said)) == said
        sent.result(TIMEOUT)
        here.shutdown(socket.SHUT_WR)
        assert heard(there, 1) == b""


def test_who_was_taken_back_is_cut_off(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for an end that sends nothing, too."""
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.01)
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0")
    with dials.meet() as above, waits.meet() as below:
        above.sendall(b"a")
        assert heard(below, 1) == b"a"

        admitted = relayed.relay._callers.let_in

        def let_in(context: grpc.ServicerContext) -> RemoteCaller:
            if (caller := admitted(context)).name == "home.0":
                raise Refused("home.0: it was taken back")
            return caller

        monkeypatch.setattr(relayed.relay._callers, "let_in", let_in)
        assert heard(below, 1) == b""
        assert dials.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_call_that_ends_cuts_its_connection(relayed: Relayed) -> None:
    """A machine that vanishes is noticed by the pings of its call."""
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0")
    with dials.meet() as above, waits.meet() as below:
        above.sendall(b"a")
        assert heard(below, 1) == b"a"
        dials.leave()
        assert (heard(below, 1), heard(above, 1)) == (b"", b"")


def test_an_end_that_does_not_connect_is_asked_for_again(relayed: Relayed) -> None:
    """Neither its call nor that of the other end stays open, nor does the other connection."""
    with mock.patch.object(relay, "LONGEST_WAIT", 1.0):
        waits, dials = relayed.carry("home.1"), relayed.carry("home.0")
        place = dials.place()
        with waits.meet() as below:
            assert {dials.code(), waits.code()} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert heard(below, 1) == b""
        with socket.create_connection(("127.0.0.1", place.port), TIMEOUT) as late:
            late.sendall(place.key)
            assert heard(late, 1) == b""
    assert relayed.refusals() == {}


# ---- the port ----


def _connected(point: MeetingPoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", point.port), TIMEOUT)


def test_a_key_is_valid_once_and_a_wrong_one_is_counted(relayed: Relayed) -> None:
    waits, dials = relayed.carry("home.1"), relayed.carry("home.0")
    place = dials.place()
    with waits.meet() as below, ExitStack() as stack:
        first, second, other = (stack.enter_context(_connected(relayed.meeting_point)) for _ in range(3))
        other.sendall(bytes(len(place.key)))
        assert heard(other, 1) == b""
        first.sendall(place.key + b"hello")
        assert heard(below, 5) == b"hello"
        second.sendall(place.key)
        assert heard(second, 1) == b""
    relayed.wait_until(lambda: relayed.refusals() == {Kind.STRANGER: 2})


def test_a_relay_that_cannot_be_reached_is_named(relayed: Relayed, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, although the link is tried again and again."""
    relayed.listen()
    unreachable = mock.patch.object(relay, "route_to", side_effect=OSError("no route to host"))
    with unreachable, pytest.raises(LinkTimeout, match="did not answer"):
        relayed.dial(timeout=2.0)
    said = capsys.readouterr().err
    port = relayed.meeting_point.port
    assert f"home.0: cannot connect to the relay at 127.0.0.1:{port}, the exchange's second port: no route" in said
    assert said.count("home.0: cannot connect") == 1


# ---- who meets whom ----


def test_who_cannot_be_dialled_where_it_says_is_sought_through_the_relay(
    relayed: Relayed, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The announced address belongs to no machine (RFC 5737). It is tried only once."""
    with mock.patch("hetero_pp.rpc.stage_link.DIRECT_SECONDS", 0.5):
        spec = RunSpec(ConfigFile(MIXED).config, 256)
        above = stack.enter_context(relayed.connections(spec, "home.0"))
        below = stack.enter_context(relayed.connections(spec, "home.1", listen=RELAYED))
        assert below.listen() == RELAYED
        assert below._before is not None
        for generation in (1, 2):
            with ThreadPoolExecutor() as threads:
                below._before.expect(generation, None)
                below._before.be_found(generation)
                met = threads.submit(below._before.accept, TIMEOUT, generation)
                end, far = above.open(generation, "", "192.0.2.7:47600").downstream, met.result(TIMEOUT)
                assert end is not None
                end.send(_message(generation))
                _expect(far, range(generation, generation + 1))
    assert capsys.readouterr().err.count("connecting through the relay") == 1


def test_a_group_of_one_stage_has_nobody_to_listen_for(relayed: Relayed, stack: ExitStack) -> None:
    config = ConfigFile(MIXED, ["replicas.1.stages=[{layers: 3}]"]).config
    alone = stack.enter_context(relayed.connections(RunSpec(config, 256), "home.0", listen="127.0.0.1:0"))
    assert alone.listen() == ""


def test_either_end_may_dial_and_another_one_in_each_generation(relayed: Relayed, stack: ExitStack) -> None:
    """This holds through the relay too, and both ends keep counting."""
    spec = RunSpec(ConfigFile(MIXED).config, 256)
    found = [stack.enter_context(relayed.connections(spec, name, listen=RELAYED)) for name in ("home.0", "home.1")]
    assert [one.listen() for one in found] == [RELAYED, RELAYED]
    both = [found[0]._after, found[1]._before]
    for generation in range(1, 5):
        dialler, dialled = both if generation % 2 else both[::-1]
        assert dialler is not None
        assert dialled is not None
        dialled.expect(generation, None)
        dialled.be_found(generation)
        with ThreadPoolExecutor() as threads:
            met = threads.submit(dialled.accept, TIMEOUT, generation)
            ends = dialler.reach(RELAYED, generation), met.result(TIMEOUT)
        for one, other in (ends, ends[::-1]):
            one.send(_message(generation))
            _expect(other, range(generation, generation + 1))
            assert one.ledger.of_round(0).messages == generation
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
    dials = relayed.carry("home.0")
    with dials.meet() as above, waiting[5].meet() as below:
        above.sendall(b"hello")
        below.sendall(b"and you")
        assert (heard(below, 5), heard(above, 7)) == (b"hello", b"and you")
    for gone in waiting[:2]:
        assert gone.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_group_that_evaluates_the_last_round_keeps_its_relayed_links_after_a_restart(tmp_path: Path) -> None:
    """Another process of the exchange has told its members of the record. Links end once all have asked for work."""
    run = Run(tmp_path, {"home": 2, "dc": 1}, quorum=1.0)
    run.exchange.roster = replace(run.roster, counts=COUNTS)
    run.assign(0)
    run.deposit(1, "home.0", "home.1", "dc")
    generation = run.exchange.coordinator.replicas["home"].generation
    run.take_over()
    run.exchange.roster = replace(run.roster, counts=COUNTS)
    for member in ("home.0", "home.1"):
        assert not run.exchange.heartbeat(member, 1, generation).suspended
    assert run.exchange.trains(LINK.name) is not None
    run.ask_in_thread("home.0", 1)
    assert run.exchange.trains(LINK.name) is not None
