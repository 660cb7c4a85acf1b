"""What an attack knows of a run, how long it lasts, and the calls that it makes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle

import grpc
from google.protobuf.message import Message

from hetero_pp.config.links import EXCHANGE, LinkSpec
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.rpc.admission import SERVICE as ADMISSION
from hetero_pp.rpc.callers import Metadata
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.credentials import Credentials, Secret
from hetero_pp.rpc.exchange import SERVICE
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.services import call_path
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec

CALLS_A_SECOND = 300
"""Of one attack: what is refused costs the exchange's processor, which others here need, too."""
LARGE_A_SECOND = 10
"""Of messages of megabytes: 44 MB a second, which is more than most lines carry."""
REPORTS_A_SECOND = 10
"""Twenty reports each: a hundred times as many as an honest member has."""
HANDSHAKES_A_SECOND = 100
"""Of who is not let in: a signature and an agreement on a key each."""
CARRIED_A_SECOND = 10
"""Calls of the relay, some of them with megabytes that nobody reads: 12 MB a second, as a line of 100 Mbit/s."""
IN_FLIGHT = 64
TIMEOUT = 10.0
NICENESS = 10
"""Beyond that of the run: an attack comes from elsewhere, and takes no processor of those that it attacks."""
CONNECTIONS = 10_000
FILES_FOR_ITSELF = 200

Frames = Sequence[bytes]


@dataclass(frozen=True)
class Target:
    """A run, and what a member of it knows."""

    address: str
    run: str
    guest: Credentials
    """Of a member, who attacks."""
    honest: str
    """Another member, a replica of its own."""
    blocks: Sequence[str]
    """That either contributes."""
    parameters: Sequence[str]
    link_address: str
    """Where a stage listens; nowhere if it is found through the relay."""
    neighbour: Credentials
    """Of the stage that may dial it."""
    link: LinkSpec
    listener: Credentials
    """Of that stage: who has the relay's place is taken for both ends by it, and for neither by the other one."""
    ends: Sequence[Credentials]
    """Of both ends of a link that is the attacker's own."""
    own_link: str
    nobody: Credentials
    """Of a name that is not of the run, by its authority: nobody has one. What it asks is refused as a stranger's."""
    expired: Credentials
    tickets: Mapping[str, Credentials]
    """By what they are: open, invited (open, for who is to be a member), used, unknown, and former (of who held a
    place, which another has been given since)."""
    spec: RunSpec
    folder: RunFolder
    """Of a liar, for itself: it trains as a member."""
    connections: int = CONNECTIONS


@dataclass
class Stretch:
    """One attack for a while: how long, and what came of it."""

    codes: Counter[str] = field(default_factory=Counter)
    """Calls by the status that they ended with; connections that were held."""
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
    """The one place in which attacks make channels."""
    return make_channel(address, by.identity, peer)


def credentials_of(name: str, target: Target, secret: str = "another secret") -> Credentials:
    """Return credentials of a stranger: a certificate of another authority, with the name of a member.

    They trust the run's authority, so that no handshake fails on the stranger's side.
    """
    found = Secret(secret).credentials(name, encrypted=True)
    assert found.identity is not None
    return replace(found, identity=replace(found.identity, authority=authority_of(target)))


def authority_of(target: Target) -> str:
    """The certificate of the run's authority, which everybody may know."""
    assert target.guest.identity is not None
    return target.guest.identity.authority


@contextmanager
def seated(target: Target) -> Iterator[tuple[ExchangeClient, int]]:
    """The guest in its place, and the term that it holds; it leaves as one that has died."""
    client = ExchangeClient(target.address, target.guest, target.run, timeout=TIMEOUT)
    name = target.guest.name
    try:
        yield client, client.join(name, "")
    finally:
        with suppress(HeteroPPError):
            client.died(name, "it has ended")
        client.close()


@dataclass(frozen=True)
class Call:
    """One call, as it crosses: a single frame is a single request."""

    path: str
    frames: Frames
    metadata: Metadata
    by: Credentials


def asked(call: str, request: Message, metadata: Metadata, by: Credentials) -> Call:
    """Return a call of the exchange or of the admission service, whose request is one message."""
    service = ADMISSION if call in ADMISSION.methods_by_name else SERVICE
    return Call(call_path(service, call), [request.SerializeToString()], metadata, by)


def flood(
    address: str, stretch: Stretch, calls: Sequence[Call], a_second: float = CALLS_A_SECOND, peer: str = EXCHANGE
) -> None:
    """Make these calls in turn, paced, many at once: each over the connection of who makes it."""
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
    """Make a call. Of one that is answered by many frames the first is read only."""
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
