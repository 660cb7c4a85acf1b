"""Attacks on links between stages, and by the relay that carries them. Each attack is one function."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from copy import deepcopy
from functools import partial
from itertools import cycle
from typing import Any

import grpc
from attack_calls import CARRIED_A_SECOND, TIMEOUT, Call, Stretch, Target, attack, begin, channel_to, code_of, flood

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.sockets import host_and_port
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc import admission_client
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.relay import KEY_BYTES, MOST_CARRIED, MOST_UNKNOWN, RelayedDialler, RelayedListener
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import call_path, calls_of
from hetero_pp.rpc.stage_link import SERVICE as LINK_SERVICE
from hetero_pp.rpc.stage_link import StageLink

TUNNELS = 4
"""Connections that an attacker opens through the relay for one link."""


@attack
def link_frames(target: Target, stretch: Stretch) -> None:
    """Send hostile frames on a stage link: as another member, with a ticket, and as the neighbour."""
    flood(target.link_address, stretch, hostile_frames(target), peer=target.link.target)


def hostile_frames(target: Target) -> list[Call]:
    """Return calls that open a stage link with hostile frames."""
    right = pb.LinkHello(
        version=PROTOCOL_VERSION, link=target.link.name, sender=target.neighbour.name, generation=1, session=b"other"
    )
    wrong = [deepcopy(right) for _ in range(4)]
    wrong[0].version, wrong[1].link, wrong[2].sender, wrong[3].token = 1, "x", "dc", "no"
    hostile = [*(one.SerializeToString() for one in (*wrong, right)), b"\xff" * 100, bytes(5000), b""]
    path = call_path(LINK_SERVICE, "Open")
    calls = [Call(path, [hello, bytes(1 << 10)], (), target.neighbour) for hello in hostile]
    for stranger in (target.guest, target.tickets["open"]):
        calls += [Call(path, [right.SerializeToString()], (), stranger), Call(path, [b"", b""], (), stranger)]
    return calls


@attack
def misused_relay(target: Target, stretch: Stretch) -> None:
    """Ask the relay for links of others and for too many links, send and do not read, stay silent, and leave.

    The relay's port gets made-up keys and connections without a key.
    """
    with ExitStack() as stack:
        guest, dials, waits = (
            Carrier(stack.enter_context(channel_to(target.address, one)), one, target.address, stretch)
            for one in (target.guest, *target.ends)
        )
        assert target.guest.identity is not None
        preview = admission_client.ask(target.address, target.guest.identity, "Preview", seconds=TIMEOUT)
        assert preview is not None
        port = preview.relay_port
        ways: Sequence[Callable[[], None]] = [
            lambda: guest.carry(target.link.name),
            lambda: dials.carry(target.link.name),
            lambda: dials.carry("dc-exchange"),
            lambda: waits.carry(target.own_link),
            lambda: dials.carry(target.own_link),
            lambda: waits.carry(target.own_link, connects=True),
            lambda: dials.carry(target.own_link, connects=True),
            lambda: dials.knock(port, bytes(KEY_BYTES)),
            lambda: dials.knock(port, b"GET / HTTP/1.1\r\n\r\n"),
            waits.leave,
            lambda: waits.carry(target.own_link, connects=True),
            lambda: dials.carry(target.own_link, connects=True),
            lambda: dials.knock(port, b""),
            dials.leave,
        ]
        for _, way in zip(stretch.paced(CARRIED_A_SECOND), cycle(ways), strict=False):
            way()
        for one in (guest, dials, waits):
            one.leave(0)


@attack
def tunnel(target: Target, stretch: Stretch) -> None:
    """Take both slots of a group, ask for every round, and send through the relay as much as it carries."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(ExchangeClient(target.address, one, target.run, timeout=TIMEOUT)))
            for one in target.ends
        ]
        for client, one in zip(clients, target.ends, strict=True):
            client._incarnation = client.join(one.name, "")
        channels = [stack.enter_context(channel_to(target.address, one)) for one in target.ends]
        threads = [
            threading.Thread(target=_asks, args=(client, one.name, stretch), daemon=True)
            for client, one in zip(clients, target.ends, strict=True)
        ]
        for _ in range(TUNNELS):
            for channel, one, sends in zip(channels, target.ends, (True, False), strict=True):
                threads.append(
                    threading.Thread(target=_passes, args=(target, stretch, channel, one, sends), daemon=True)
                )
        for thread in threads:
            thread.start()
        stretch.is_under_way.set()
        stretch.is_over.wait()
        for client, one in zip(clients, target.ends, strict=True):
            client.died(one.name, "it has ended", None)


def _asks(client: ExchangeClient, member: str, stretch: Stretch) -> None:
    holds = 0
    while not stretch.is_over.is_set():
        with suppress(HeteroPPError):
            holds = client.assign(member, holds).round or holds


def _passes(target: Target, stretch: Stretch, channel: grpc.Channel, by: Credentials, sends: bool) -> None:
    """Send or receive through one connection after the other."""
    carry, host, room = calls_of(RELAY, channel)["Carry"], host_and_port(target.address)[0], bytearray(1 << 20)
    while not stretch.is_over.wait(0.05):
        with suppress(grpc.RpcError, StopIteration, OSError):
            call = carry(pb.RelayedLink(link=target.own_link), metadata=shown(by))
            place = next(call)
            with socket.create_connection((host, place.port), TIMEOUT) as connection:
                connection.sendall(place.key)
                while not stretch.is_over.is_set():
                    if sends:
                        connection.sendall(room)
                    elif count := connection.recv_into(room):
                        stretch.codes["bytes carried"] += count
                    else:
                        break


class Carrier:
    """Caller of the relay. Its connections send as much as they can, and read nothing."""

    def __init__(self, channel: grpc.Channel, by: Credentials, address: str, stretch: Stretch) -> None:
        self._carry = calls_of(RELAY, channel)["Carry"]
        self._by, self._host, self._stretch = by, host_and_port(address)[0], stretch
        self._open: list[grpc.Call] = []
        self._silent: deque[socket.socket] = deque()

    def carry(self, link: str, connects: bool = False) -> None:
        """Make one more call, which stays open. If `connects`, also use the connection, once the other end is there."""
        call = self._carry(pb.RelayedLink(link=link), metadata=shown(self._by))
        call.add_callback(lambda: self._count(call))
        self._open.append(call)
        if connects:
            threading.Thread(target=self._connect, args=(call,), daemon=True).start()

    def _connect(self, call: Any) -> None:
        with suppress(grpc.RpcError, StopIteration, OSError):
            place = next(call)
            with socket.create_connection((self._host, place.port), 1.0) as connection:
                connection.sendall(place.key)
                while not self._stretch.is_over.is_set():
                    connection.sendall(bytes(1 << 20))

    def knock(self, port: int, words: bytes) -> None:
        """Connect to the relay's port with other bytes than a key, or with none, and stay."""
        with suppress(OSError):
            connection = socket.create_connection((self._host, port), 1.0)
            connection.sendall(words)
            self._silent.append(connection)
            self._stretch.codes["knocked"] += 1
        while len(self._silent) > 2 * MOST_UNKNOWN:
            self._silent.popleft().close()

    def leave(self, but: int = MOST_CARRIED + 4) -> None:
        """Cancel the oldest calls until `but` are left. The default is more than a member may have open."""
        while len(self._open) > but:
            self._open.pop(0).cancel()
        while not but and self._silent:
            self._silent.pop().close()

    def _count(self, call: grpc.Call) -> None:
        self._stretch.codes[call.code().name] += 1


@attack
def hostile_relay(target: Target, stretch: Stretch) -> None:
    """Take the relay's position: bring strangers to the stage after a link, and bring the stage before it to strangers.

    Any process in the relay's position can do that. It lacks the certificates that the two ends show each other. So it
    shows another member's certificate, or sends bytes that are not TLS. In between it lets the two ends meet. It could
    keep them apart, but that would show nothing.
    """
    dialler = RelayedDialler(target.address, target.neighbour, target.link.name)
    with closing(dialler), ExitStack() as stack:
        page = stack.enter_context(channel_to(dialler.address, target.guest, target.link.target))
        calls = [call for call in hostile_frames(target) if call.by is target.guest]
        for number, call in zip(stretch.paced(CARRIED_A_SECOND), cycle(calls), strict=False):
            begin(page, call).add_done_callback(partial(counted, stretch))
            if number % CARRIED_A_SECOND == 0:
                say(dialler.address, bytes(1000))
                stretch.codes["no TLS said to the stage after"] += 1
            if number % (2 * CARRIED_A_SECOND) == 0:
                entice(target, stretch, in_tls=number % (4 * CARRIED_A_SECOND) == 0)


def counted(stretch: Stretch, call: grpc.Future[bytes]) -> None:
    stretch.codes[code_of(call)] += 1


def say(address: str, words: bytes) -> None:
    """Send bytes to a Unix socket of this machine."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(address.removeprefix("unix:"))
        connection.sendall(words)


ENTICED = 1.0
"""Seconds during which the stage before is connected to a process that is not its neighbour, if it dials."""


def entice(target: Target, stretch: Stretch, in_tls: bool) -> None:
    """Listen in place of the stage after: with another member's certificate, or without TLS."""
    own = Credentials("", identity=target.guest.identity)
    server = StageLink(LinkSide(target.link, own, target.link.target, seed=1), expected=None)
    with socket.create_server(("127.0.0.1", 0)) as junk:
        junk.settimeout(ENTICED)
        port = server.listen("127.0.0.1:0") if in_tls else junk.getsockname()[1]
        relayed = RelayedListener(target.address, target.listener, target.link.name, f"127.0.0.1:{port}")
        until = time.monotonic() + ENTICED
        with suppress(OSError):
            while not in_tls and time.monotonic() < until:
                connection, _ = junk.accept()
                with connection:
                    connection.sendall(bytes(1000))
                stretch.codes["no TLS said to the stage before"] += 1
        stretch.is_over.wait(max(0.0, until - time.monotonic()))
        relayed.close()
        server.close(grace=0)
    stretch.codes["enticed"] += 1
