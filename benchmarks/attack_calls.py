"""Target, duration and calls of an attack on a live run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle

import grpc
from google.protobuf.message import Message

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LinkSpec
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, Secret
from hetero_pp.rpc.services import ADMISSION_SERVICE as ADMISSION
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path

CALLS_A_SECOND = 300
"""Calls per second of one attack. Refused calls cost the exchange processor time that other processes here need."""
LARGE_A_SECOND = 10
"""Calls per second with messages of megabytes: 44 MB a second, more than most lines carry."""
REPORTS_A_SECOND = 10
"""Report calls per second, with 20 reports each: 100 times as many reports as an honest member sends."""
HANDSHAKES_A_SECOND = 100
"""Handshakes per second of connections that are refused. Each costs a signature and a key agreement."""
CARRIED_A_SECOND = 10
"""Relay calls per second. Some carry megabytes that no stage reads: 12 MB a second, as on a line of 100 Mbit/s."""
IN_FLIGHT = 64
TIMEOUT = 10.0
NICENESS = 10
"""Niceness of attacks above that of the run. Attacks come from elsewhere, and so must not take the run's processors."""
CONNECTIONS = 10_000
FILES_FOR_ITSELF = 200


@dataclass(frozen=True)
class Target:
    """A run, and what a member of the run knows about it."""

    address: str
    run: str
    guest: Credentials
    """Credentials of the attacking member."""
    honest: str
    """Name of another member, which is a replica of its own."""
    blocks: Sequence[str]
    """Blocks that each of these two members contributes."""
    parameters: Sequence[str]
    link_address: str
    """Address at which a stage listens; none if the stage is reached through the relay."""
    neighbour: Credentials
    """Credentials of the stage that may dial it."""
    link: LinkSpec
    listener: Credentials
    """Credentials of that stage. The relay takes their holder for this end of the link; the other end does not."""
    ends: Sequence[Credentials]
    """Credentials of both ends of a link that belongs to the attacker."""
    own_link: str
    nobody: Credentials
    """Credentials from the run's authority with a name that is not in the run. Its calls are refused like a stranger's.
    """
    expired: Credentials
    tickets: Mapping[str, Credentials]
    """Ticket credentials by state: open, invited (open, used to become a member), used, unknown, and former.

    `former` are the credentials of a holder whose slot was given to another one.
    """
    spec: RunSpec
    folder: RunFolder
    """Run folder of lying members, which train there."""
    connections: int = CONNECTIONS


@dataclass
class Stretch:
    """One period of an attack: when it begins and ends, and the outcomes of its calls."""

    codes: Counter[str] = field(default_factory=Counter)
    """Number of calls by the status that they ended with. Also counts held connections."""
    is_over: threading.Event = field(default_factory=threading.Event)
    is_under_way: threading.Event = field(default_factory=threading.Event)

    def paced(self, a_second: float = CALLS_A_SECOND) -> Iterator[int]:
        """Yield numbers at this rate, until the stretch is over."""
        begun = time.monotonic()
        number = 0
        while not self.is_over.wait(max(0.0, begun + number / a_second - time.monotonic())):
            yield number
            number += 1
            self.is_under_way.set()


def channel_to(address: str, by: Credentials, peer: str = EXCHANGE) -> grpc.Channel:
    """Return a channel with the given credentials. Attacks make their gRPC channels only here."""
    return make_channel(address, by.identity, peer)


def credentials_of(name: str, target: Target, secret: str = "another secret") -> Credentials:
    """Return credentials of a stranger: a certificate of another authority, with the name of a member.

    They trust the run's authority, so that no handshake fails on the stranger's side.
    """
    found = Secret(secret).credentials(name, encrypted=True)
    assert found.identity is not None
    return replace(found, identity=replace(found.identity, authority=authority_of(target)))


def authority_of(target: Target) -> str:
    """Return the certificate of the run's authority, which is public."""
    assert target.guest.identity is not None
    return target.guest.identity.authority


Attack = Callable[[Target, Stretch], None]
REGISTERED: list[Attack] = []


def attack(function: Attack) -> Attack:
    """Register a function as an attack."""
    REGISTERED.append(function)
    return function


@dataclass(frozen=True)
class Call:
    """One call as it is sent. A call with a single frame is unary."""

    path: str
    frames: Sequence[bytes]
    metadata: Metadata
    by: Credentials


def asked(call: str, request: Message, metadata: Metadata, by: Credentials) -> Call:
    """Return a call with one request message, to the exchange or to the admission service."""
    service = ADMISSION if call in ADMISSION.methods_by_name else SERVICE
    return Call(call_path(service, call), [request.SerializeToString()], metadata, by)


@dataclass(frozen=True)
class AttackSession:
    """The guest's slot, which the attacker holds."""

    client: ExchangeClient
    by: Credentials
    incarnation: int
    """Incarnation of the slot's holder."""
    metadata: Metadata

    def asked(self, call: str, request: Message) -> Call:
        """Return a call by the slot's holder."""
        return asked(call, request, self.metadata, self.by)


@contextmanager
def in_session(target: Target) -> Iterator[AttackSession]:
    """Hold the guest's slot while the block runs, and then report its death."""
    client = ExchangeClient(target.address, target.guest, target.run, timeout=TIMEOUT)
    name = target.guest.name
    try:
        incarnation = client.join(name, "")
        yield AttackSession(client, target.guest, incarnation, shown(target.guest, target.run, incarnation))
    finally:
        with suppress(HeteroPPError):
            client.died(name, "it has ended")
        client.close()


def flood(
    address: str, stretch: Stretch, calls: Sequence[Call], a_second: float = CALLS_A_SECOND, peer: str = EXCHANGE
) -> None:
    """Make the calls in turn at a bounded rate, with up to IN_FLIGHT under way.

    Each caller has a connection of its own.
    """
    room = threading.Semaphore(IN_FLIGHT)

    def done(call: grpc.Future[bytes]) -> None:
        stretch.codes[code_of(call)] += 1
        room.release()

    with ExitStack() as stack:
        channels = {id(call.by): stack.enter_context(channel_to(address, call.by, peer)) for call in calls}
        for _, call in zip(stretch.paced(a_second), cycle(calls), strict=False):
            room.acquire()
            begin(channels[id(call.by)], call).add_done_callback(done)
        for _ in range(IN_FLIGHT):
            room.acquire(timeout=TIMEOUT)


def begin(channel: grpc.Channel, call: Call) -> grpc.Future[bytes]:
    """Begin a call and return its future. If the answer has many frames, only the first is read."""
    if len(call.frames) == 1:
        one: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
        return one.future(call.frames[0], metadata=call.metadata, timeout=TIMEOUT)
    many: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call.path)
    return many.future(iter(call.frames), metadata=call.metadata, timeout=TIMEOUT)


REFUSED_STREAM = "REFUSED_STREAM"
"""Status of a call whose stream the server refused, because its connection has too many streams (RFC 9113, code 7)."""


def code_of(call: grpc.Future[bytes]) -> str:
    """Return the status that a call ended with."""
    if call.cancelled():
        return "CANCELLED"
    error = call.exception()
    return status_of(error) if isinstance(error, grpc.RpcError) else "OK"


def status_of(error: grpc.RpcError) -> str:
    """Return the status of a call that failed.

    gRPC reports a refused stream as UNAVAILABLE, as it does a server that is gone. A stream counts until the server has
    freed it, so that a busy server refuses some calls of an attacker with 64 calls under way.
    """
    is_refused = "RST_STREAM with error code 7" in str(error.details())
    return REFUSED_STREAM if is_refused else error.code().name
