"""Attacks on a live run, one function each. They run in a process of their own, with a member's own credentials.

Who is not of the run comes no further than its handshake: what it says is said over connections of its own, as gRPC
would not say it (`knocks`).
"""

from __future__ import annotations

import os
import resource
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import grpc
from google.protobuf.message import Message

from hetero_pp.errors import HeteroPPError
from hetero_pp.links import EXCHANGE, LinkSpec
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.admission import SERVICE as ADMISSION
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.certificates import Authority, Identity, as_text, key_from_text, new_key, signing_request
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.credentials import Credentials, LinkCredentials, Secret
from hetero_pp.rpc.dialling import SERVICE as LINK_SERVICE
from hetero_pp.rpc.exchange import SERVICE
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.rpc.relay import CARRIED_BYTES, LINK, MOST_CARRIED
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.relayed import RelayedDialler, RelayedListener
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import StageLinkServer

CALLS_A_SECOND = 300
"""Of one attack: what is refused costs the exchange's processor, which others here need, too."""
LARGE_A_SECOND = 10
"""Of messages of megabytes: 44 MB a second, which is more than most lines carry."""
REPORTS_A_SECOND = 10
"""Twenty reports each: a hundred times as many as an honest member has."""
HANDSHAKES_A_SECOND = 100
"""Of who is not let in: a signature and an agreement on a key each."""
CARRIED_A_SECOND = 20
"""Calls of the relay, some of them with megabytes that nobody reads."""
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
    connections: int = CONNECTIONS


@dataclass
class Stretch:
    """One attack for a while: how long, and what came of it."""

    codes: Counter[str] = field(default_factory=Counter)
    """Calls by the status that they ended with; connections that were held."""
    is_over: threading.Event = field(default_factory=threading.Event)
    is_under_way: threading.Event = field(default_factory=threading.Event)

    def paced(self, a_second: float = CALLS_A_SECOND) -> Iterator[int]:
        """So many a second, until the stretch is over."""
        begun = time.monotonic()
        number = 0
        while not self.is_over.wait(max(0.0, begun + number / a_second - time.monotonic())):
            yield number
            number += 1
            self.is_under_way.set()


# ---- by what an attack reaches a run ----


def channel_to(address: str, by: Credentials, peer: str = EXCHANGE) -> grpc.Channel:
    """The one place in which attacks make channels."""
    return make_channel(address, by.identity, peer)


def credentials_of(name: str, target: Target, secret: str = "another secret") -> Credentials:
    """Of a stranger who calls itself so: of another authority, under the same name. The one place that makes some.

    It takes the run's exchange for what it is, so that no handshake fails for want of that.
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
    """A call of the exchange, or of who lets in to it, whose request is one message."""
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


def code_of(call: grpc.Future[bytes]) -> str:
    """How a call ended."""
    if call.cancelled():
        return "CANCELLED"
    error = call.exception()
    return error.code().name if isinstance(error, grpc.RpcError) else "OK"


# ---- who is not of the run ----


def strange_context(target: Target, by: Credentials | None, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """TLS of a stranger who shows this, or no certificate at all; it takes whoever answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=authority_of(target))
    context.set_alpn_protocols(["h2"])
    context.maximum_version = version or context.maximum_version
    if by is not None and by.identity is not None:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(by.identity.certificate + by.identity.key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def knock(address: str, context: ssl.SSLContext | None, said: bytes) -> str:
    """Connect, without TLS if there is no context, and say something; whether anything is answered to it."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), TIMEOUT)
        with connection:  # wrapped, it is another one
            if context is not None:
                connection = context.wrap_socket(connection)
            with connection:
                connection.sendall(said)
                answer = connection.recv(1)
    except TimeoutError:
        return "NOT CLOSED"
    except OSError:
        return "NO HANDSHAKE"
    return ANSWERED if answer and answer != ALERT else "NO HANDSHAKE"


ANSWERED = "ANSWERED"
"""How a stranger's connection ends that must not."""
ALERT = b"\x15"
"""What a record of TLS begins with that says no more than that there is no handshake."""


def as_http2(call: Call) -> bytes:
    """A call as it crosses (RFC 9113), with headers that are neither indexed nor compressed."""
    headers = {":method": "POST", ":scheme": "https", ":path": call.path, ":authority": EXCHANGE}
    headers |= {"content-type": "application/grpc", "te": "trailers", **dict(call.metadata)}
    block = b"".join(b"\x00" + _text(key) + _text(value) for key, value in headers.items())
    frames = [bytes(3) + b"\x04\x00" + bytes(4), _frame(1, 4, block)]
    frames += [_frame(0, 0, b"\x00" + len(one).to_bytes(4, "big") + one) for one in call.frames]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames) + _frame(0, 1, b"")


def _frame(kind: int, flags: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + body


def _text(text: str) -> bytes:
    """A string of HPACK: its length has seven bits in the first byte, and then seven in each."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    left, length = len(data) - 127, bytearray([127])
    while left >= 128:
        length.append(128 + left % 128)
        left //= 128
    return bytes(length) + bytes([left]) + data


def knocks(
    target: Target, stretch: Stretch, contexts: Sequence[ssl.SSLContext | None], said: Sequence[bytes] = ()
) -> None:
    """One connection after the other, several at once, each of which says at once what a call would."""
    call = Call(call_path(SERVICE, "LastRound"), [b""], shown(target.guest, target.run, 1), target.guest)
    everything = [(one, words) for words in (said or [as_http2(call)]) for one in contexts]
    room = threading.Semaphore(IN_FLIGHT)

    def one(context: ssl.SSLContext | None, words: bytes) -> None:
        stretch.codes[knock(target.address, context, words)] += 1
        room.release()

    with ThreadPoolExecutor(8) as pool:
        for _, (context, words) in zip(stretch.paced(HANDSHAKES_A_SECOND), cycle(everything), strict=False):
            room.acquire()
            pool.submit(one, context, words)


def no_certificate(target: Target, stretch: Stretch) -> None:
    """Calls that show nothing: by TLS without a certificate, an older TLS, and without TLS."""
    old = strange_context(target, None, ssl.TLSVersion.TLSv1_2)
    knocks(target, stretch, [strange_context(target, None), old, None])


def another_authority(target: Target, stretch: Stretch) -> None:
    """In a member's name by another authority of the same name, by a member that is none, and by itself."""
    names = (target.honest, target.guest.name, EXCHANGE)
    strangers = [credentials_of(name, target) for name in names]
    strangers += [signed_by(target.guest, target.honest), self_signed(target)]
    knocks(target, stretch, [strange_context(target, one) for one in strangers])


def signed_by(member: Credentials, name: str) -> Credentials:
    """A certificate that a member has signed, as if it were the run's authority, with its own beside it."""
    own, key, forger = member.identity, new_key(), Authority("made up")
    assert own is not None
    forger._key = key_from_text(own.key)
    certificate = forger.sign(key.public_key(), name, 0, time.time() + 3600.0) + own.certificate
    return Credentials(name, identity=Identity(certificate, as_text(key), own.authority))


def self_signed(target: Target) -> Credentials:
    """By its own key, under the name of the run's authority."""
    key, own = new_key(), Authority("made up")
    own._key = key
    certificate = own.sign(key.public_key(), target.honest, 0, time.time() + 3600.0)
    return Credentials(target.honest, identity=Identity(certificate, as_text(key), authority_of(target)))


def ended(target: Target, stretch: Stretch) -> None:
    """A certificate of the run's authority that has ended; bytes that are no TLS, between."""
    context = strange_context(target, target.expired)
    knocks(target, stretch, [context, context, None], [b"\x16\x03\x01" + bytes(500), bytes(1000)])


def another_run(target: Target, stretch: Stretch) -> None:
    """A member's own certificate, for another run; and one of a name that is not of the run."""
    elsewhere = shown(target.guest, "another run", 1)
    nobody = asked("Beat", pb.BeatRequest(), shown(target.nobody, target.run, 1), target.nobody)
    flood(target.address, stretch, [asked("Beat", pb.BeatRequest(), elsewhere, target.guest), nobody])


def tickets(target: Target, stretch: Stretch) -> None:
    """Tickets that are unknown, used, or shown for what they are not for; who was not invited, or is not any more."""
    key = new_key()
    right, good = signing_request(key), partial(pb.EnrolRequest, version=PROTOCOL_VERSION)
    known, former = target.tickets, target.tickets["former"]
    damaged = [right[:-1], bytes(len(right)), b"", b"\x30\x82\xff\xff" + right, right[:-8] + bytes(8), bytes(1 << 16)]
    calls = [asked("Enrol", good(request=right), (), known[what]) for what in ("unknown", "used")]
    calls += [asked("Enrol", good(request=one), (), known["open"]) for one in damaged]
    calls += [asked("Enrol", pb.EnrolRequest(version=1, request=right), (), known["open"])]
    calls += [
        asked(call, pb.BeatRequest(), shown(target.guest, target.run, 1), known["open"]) for call in NOT_BY_TICKET
    ]
    calls += [asked("Renew", pb.RenewRequest(), (), one) for one in (target.guest, former)]
    calls += [asked("Give", pb.GiveRequest(), (), one) for one in (target.guest, former)]
    calls += [asked("Enrol", good(request=right), (), one) for one in (target.guest, former)]
    flood(target.address, stretch, calls)


NOT_BY_TICKET = ("Beat", "Watch", "LastRound", "Renew", "Give", "Status")


def half_open(target: Target, stretch: Stretch) -> None:
    """Calls that are begun and send nothing: of who has a ticket, and more than a member may have open."""
    with seated(target) as (_, term), ExitStack() as channels:
        known, own = [target.tickets["open"], target.guest], shown(target.guest, target.run, term)
        pairs = [(channels.enter_context(channel_to(target.address, one)), own) for one in known]
        room, never = threading.Semaphore(IN_FLIGHT), threading.Event()
        for _, (channel, metadata) in zip(stretch.paced(), cycle(pairs), strict=False):
            if room.acquire(blocking=False):
                _half_open(channel, metadata, stretch, room, never)
        never.set()


def _half_open(
    channel: grpc.Channel, metadata: Metadata, stretch: Stretch, room: threading.Semaphore, never: threading.Event
) -> None:
    """One call that sends nothing, until it is ended by the other side."""

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    def done(call: grpc.Future[bytes]) -> None:
        if not never.is_set():
            stretch.codes[code_of(call)] += 1
        room.release()

    beat: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, "Beat"))
    beat.future(nothing(), metadata=metadata).add_done_callback(done)


def connections(target: Target, stretch: Stretch) -> None:
    """As many connections as this process may have, which say nothing, or begin a handshake and stop."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = target.address.rpartition(":")
    hello = client_hello(target)
    with ExitStack() as held:
        for number in range(min(target.connections, most - FILES_FOR_ITSELF)):
            try:
                one = held.enter_context(socket.create_connection((host, int(port)), TIMEOUT))
                if number % 2:
                    one.sendall(hello)
                stretch.codes["connected"] += 1
            except OSError:
                stretch.codes["not connected"] += 1
            if stretch.is_over.is_set():
                return
        stretch.is_under_way.set()
        stretch.is_over.wait()


def client_hello(target: Target) -> bytes:
    """What a handshake begins with: who listens answers with its certificate, and has signed for it."""
    said = ssl.MemoryBIO()
    begun = strange_context(target, None).wrap_bio(ssl.MemoryBIO(), said)
    with suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    return said.read()


# ---- a member that goes beyond its own ----


def anothers_place(target: Target, stretch: Stretch) -> None:
    """A member in another's name, or for another's blob, or telling of its death. It is who its certificate names."""
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        named = shown(Credentials(target.honest), target.run, 1)
        blob = pb.BlobHeader(round=1, replica=target.honest, block=target.blocks[0], size=9, epoch=1, steps=1)
        died = pb.DiedRequest(member=target.honest, cause="it is mine now")
        calls = [
            asked("Died", died, named, target.guest),
            asked("Beat", pb.BeatRequest(), (*named, ("token", "made up")), target.guest),
            asked("Died", died, own, target.guest),
            asked("Uploaded", pb.Upload(blob=blob, sha256=bytes(32)), own, target.guest),
        ]
        flood(target.address, stretch, calls)


def old_term(target: Target, stretch: Stretch) -> None:
    """Who has held a place before acts on."""
    with seated(target) as (client, old):
        client.died(target.guest.name, "another takes its place")
        with seated(target):
            before = shown(target.guest, target.run, old)
            blob = pb.BlobHeader(round=1, replica=target.guest.name, block=target.blocks[0], size=9, epoch=1, steps=1)
            calls = [
                asked("Assign", pb.AssignRequest(), before, target.guest),
                asked("Record", pb.RecordRequest(round=1 << 20), before, target.guest),
                asked("Uploaded", pb.Upload(blob=blob, sha256=bytes(32)), before, target.guest),
                asked("Broken", pb.BrokenRequest(epoch=old, cause="it is mine"), before, target.guest),
            ]
            flood(target.address, stretch, calls)


def slow_readers(target: Target, stretch: Stretch) -> None:
    """A member watches as often as it may, and reads nothing of what it tells itself."""
    with seated(target) as (_, term), channel_to(target.address, target.guest) as channel:
        own = shown(target.guest, target.run, term)
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, "Watch"))
        watched = [watch(b"", metadata=own) for _ in range(12)]
        reports = [pb.Report(member_round=pb.MemberRound(round=number)) for number in range(20)]
        told = asked("Report", pb.ReportRequest(reports=reports), own, target.guest)
        flood(target.address, stretch, [told], REPORTS_A_SECOND)
        for one in watched:
            one.cancel()
        stretch.codes["not read"] += len(watched)


def abandoned_waits(target: Target, stretch: Stretch) -> None:
    """A member asks for what has not happened yet, and is gone."""
    with seated(target) as (_, term), channel_to(target.address, target.guest) as channel:
        own = shown(target.guest, target.run, term)
        record: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Record"))
        request = pb.RecordRequest(round=1 << 20).SerializeToString()
        for _ in stretch.paced():
            call = record.future(request, metadata=own, timeout=TIMEOUT)
            if not stretch.is_over.wait(0.005) and not call.done():
                call.cancel()
            stretch.codes[code_of(call)] += 1


def forged_reports(target: Target, stretch: Stretch) -> None:
    """A member tells what the exchange alone tells, or of another's steps."""
    other = target.honest
    forged = [
        pb.Report(round_verified=pb.RoundVerified(round=1, replica=other, parameters_sha256=bytes(32))),
        pb.Report(inner_step=pb.InnerStep(replica=other, round=1, loss=0.0)),
        pb.Report(standing=pb.Standing(what=pb.GIVEN_UP, place=other)),
        pb.Report(member=other, joined=pb.Joined(term=9)),
    ]
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        calls = [asked("Report", pb.ReportRequest(reports=[one]), own, target.guest) for one in forged]
        flood(target.address, stretch, calls)


def forged_hashes(target: Target, stretch: Stretch) -> None:
    """A member confirms what no member holds: other digests, of too many bytes, of no parameter, of none at all."""
    names = target.parameters
    forged: Sequence[Mapping[str, bytes]] = [
        dict.fromkeys(names, b"\1" * 31),
        dict.fromkeys(names, b"\1" * 1_000),
        {"nothing.weight": bytes(32)},
        dict.fromkeys(names, b"\1" * 32),
        {names[0]: b"\1" * 32},
        {},
    ]
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        calls = [asked("Confirm", pb.HashReport(round=1, sha256=one), own, target.guest) for one in forged]
        flood(target.address, stretch, calls)


def oversized(target: Target, stretch: Stretch) -> None:
    """A member announces terabytes, or sends messages beyond what any is."""
    deposit, megabytes = call_path(SERVICE, "Deposit"), bytes(1 << 20)
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        calls = []
        for size in (1 << 24, 1 << 40, 1 << 63):
            header = pb.BlobHeader(round=1, replica=target.guest.name, block=target.blocks[0], size=size, epoch=term)
            frames = [next(header_and_payload_frames(header, [megabytes])), *[megabytes] * 3]
            calls.append(Call(deposit, frames, own, target.guest))
        calls += [Call(call_path(SERVICE, "Beat"), [bytes(9 << 20)], own, target.guest)]
        calls += [asked("Agree", pb.AgreeRequest(configuration="[" * (1 << 20)), own, target.guest)]
        flood(target.address, stretch, calls, LARGE_A_SECOND)


def link_frames(target: Target, stretch: Stretch) -> None:
    """Hostile frames on a stage link: of another member of the run, of a ticket, and of who is the neighbour."""
    flood(target.link_address, stretch, hostile_frames(target), peer=target.link.target)


def hostile_frames(target: Target) -> list[Call]:
    """On a stage link."""
    right = pb.LinkHello(
        version=PROTOCOL_VERSION, link=target.link.name, sender=target.neighbour.name, epoch=1, session=b"other"
    )
    wrong = [copied(right) for _ in range(4)]
    wrong[0].version, wrong[1].link, wrong[2].sender, wrong[3].token = 1, "x", "dc", "no"
    hostile = [*(one.SerializeToString() for one in (*wrong, right)), b"\xff" * 100, bytes(5000), b""]
    path = call_path(LINK_SERVICE, "Open")
    calls = [Call(path, [hello, bytes(1 << 10)], (), target.neighbour) for hello in hostile]
    for stranger in (target.guest, target.tickets["open"]):
        calls += [Call(path, [right.SerializeToString()], (), stranger), Call(path, [b"", b""], (), stranger)]
    return calls


def copied(hello: pb.LinkHello) -> pb.LinkHello:
    """The same again."""
    return pb.LinkHello.FromString(hello.SerializeToString())


# ---- what links go through ----


def misused_relay(target: Target, stretch: Stretch) -> None:
    """A member asks for links of others, for more than it may, sends too much or what nobody reads, waits and goes."""
    with ExitStack() as stack:
        guest, dials, waits = (
            Carrier(stack.enter_context(channel_to(target.address, one)), one, stretch)
            for one in (target.guest, *target.ends)
        )
        large = [b"a", bytes(CARRIED_BYTES + 1)]
        much = repeated(bytes(CARRIED_BYTES))
        ways: Sequence[Callable[[], None]] = [
            lambda: guest.carry(target.link.name, []),
            lambda: dials.carry(target.link.name, large),
            lambda: dials.carry("dc-exchange", []),
            lambda: waits.carry(target.own_link, []),
            lambda: dials.carry(target.own_link, large),
            lambda: waits.carry(target.own_link, []),
            lambda: dials.carry(target.own_link, much),
            waits.leave,
            lambda: waits.carry(target.own_link, []),
            dials.leave,
        ]
        for _, way in zip(stretch.paced(CARRIED_A_SECOND), cycle(ways), strict=False):
            way()
        for one in (guest, dials, waits):
            one.leave(0)


class repeated:
    """A frame as often as it is asked for, by several."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self._frame


class Carrier:
    """One who dials the relay, and reads nothing of what comes."""

    def __init__(self, channel: grpc.Channel, by: Credentials, stretch: Stretch) -> None:
        self._carry: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(RELAY, "Carry"))
        self._by, self._stretch, self._is_over = by, stretch, threading.Event()
        self._open: list[grpc.Call] = []

    def carry(self, link: str, frames: Iterable[bytes]) -> None:
        """One more call, which stays open once it has said this."""
        call = self._carry(self._said(frames), metadata=((LINK, link), *shown(self._by)))
        call.add_callback(lambda: self._count(call))
        self._open.append(call)

    def leave(self, but: int = MOST_CARRIED + 4) -> None:
        """Go from all calls but so many: more than a member may have open."""
        while len(self._open) > but:
            self._open.pop(0).cancel()

    def _said(self, frames: Iterable[bytes]) -> Iterator[bytes]:
        yield from frames
        self._stretch.is_over.wait()

    def _count(self, call: grpc.Call) -> None:
        self._stretch.codes[call.code().name] += 1


def hostile_relay(target: Target, stretch: Stretch) -> None:
    """In the place of who carries a link: brings strangers to the stage after, and the stage before to others.

    Whoever holds the relay can do that. What it has not is the certificates that the two ends show each other; so
    within what is carried it has another member's, or speaks no TLS. It lets the two meet in between: to keep them
    apart is what it may do, and shows nothing.
    """
    dialler = RelayedDialler(target.address, target.neighbour, target.link.name)
    with closing(dialler), ExitStack() as stack:
        pages = [stack.enter_context(channel_to(dialler.address, target.guest, target.link.target))]
        calls = [call for call in hostile_frames(target) if call.by is target.guest]
        for number, call in zip(stretch.paced(CARRIED_A_SECOND), cycle(calls), strict=False):
            begin(pages[0], call).add_done_callback(partial(counted, stretch))
            if number % CARRIED_A_SECOND == 0:
                say(dialler.address, bytes(1000))
                stretch.codes["no TLS said to the stage after"] += 1
            if number % (2 * CARRIED_A_SECOND) == 0:
                entice(target, stretch, in_tls=number % (4 * CARRIED_A_SECOND) == 0)


def counted(stretch: Stretch, call: grpc.Future[bytes]) -> None:
    """When it is done."""
    stretch.codes[code_of(call)] += 1


def say(address: str, words: bytes) -> None:
    """To a socket of this machine."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(address.removeprefix("unix:"))
        connection.sendall(words)


ENTICED = 1.0
"""Seconds in which the stage before is brought to another than its neighbour, if it dials."""


def entice(target: Target, stretch: Stretch, in_tls: bool) -> None:
    """Be dialled in the place of the stage after: with another member's certificate, or by what speaks no TLS."""
    own = LinkCredentials(identity=target.guest.identity)
    server = StageLinkServer(target.link, own, target.link.target, seed=1)
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


ATTACKS: dict[str, Callable[[Target, Stretch], None]] = {
    one.__name__: one
    for one in (
        no_certificate,
        another_authority,
        ended,
        another_run,
        tickets,
        anothers_place,
        old_term,
        half_open,
        slow_readers,
        abandoned_waits,
        forged_reports,
        forged_hashes,
        oversized,
        connections,
        link_frames,
        misused_relay,
        hostile_relay,
    )
}
THROUGH_RELAY = ("misused_relay", "hostile_relay")
"""Attacks on a run whose stages reach each other through the exchange."""
CUT = "hostile_relay"
"""Meanwhile the line of the stage before is cut now and then, as who carries it could, so that it dials again."""


def last_refused(target: Target, door: str) -> Sequence[Call]:
    """One call for each kind of refusal: what was not told of before is told with it."""
    if door == "link":
        path, hello = call_path(LINK_SERVICE, "Open"), pb.LinkHello().SerializeToString()
        return [Call(path, [b"", b""], (), target.guest), Call(path, [hello, b""], (), target.neighbour)]
    own = shown(target.guest, target.run)
    return [
        asked("Beat", pb.BeatRequest(), (), target.nobody),
        asked("Beat", pb.BeatRequest(), own, target.guest),
        Call(call_path(SERVICE, "Beat"), [b"\xff"], shown(target.guest, target.run, 1), target.guest),
        asked("Beat", pb.BeatRequest(), shown(target.guest, "another run", 1), target.guest),
    ]


# ---- in a process of their own ----


def attack_main(parent: Connection, name: str, target: Target, is_over: Event) -> None:
    """Attack whenever the parent says so, until `is_over`, which it sets, and clears again; tell what came of it."""
    os.nice(NICENESS)
    while parent.recv():
        stretch = Stretch()
        attack = threading.Thread(target=ATTACKS[name], args=(target, stretch), daemon=True)
        attack.start()
        while not stretch.is_under_way.wait(0.1) and attack.is_alive():
            pass
        parent.send(attack.is_alive())
        begun = time.monotonic()
        is_over.wait()
        seconds = time.monotonic() - begun
        stretch.is_over.set()
        attack.join(2 * TIMEOUT)
        parent.send((seconds, stretch.codes))
