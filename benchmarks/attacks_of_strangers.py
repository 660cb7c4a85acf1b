"""Attacks by processes that are not in the run, or that present themselves as such. Each attack is one function.

Connections without a valid certificate get no further than the TLS handshake. `knocks` makes them with plain sockets,
because gRPC sends no request over such a connection.
"""

from __future__ import annotations

import resource
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle

import grpc
from attack_calls import (
    FILES_FOR_ITSELF,
    HANDSHAKES_A_SECOND,
    IN_FLIGHT,
    TIMEOUT,
    Call,
    Stretch,
    Target,
    asked,
    attack,
    authority_of,
    channel_to,
    code_of,
    credentials_of,
    flood,
    in_session,
)

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.identities import Authority, Credentials, Identity, as_text, key_from_text, new_key, signing_request
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path


def strange_context(target: Target, by: Credentials | None, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return a TLS context that shows these credentials, or no certificate. It accepts any name of the server."""
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
    """Connect, without TLS if there is no context, send bytes, and return how the connection ended."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), TIMEOUT)
        with connection:  # wrapping it makes another socket
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
"""Outcome of a stranger's connection that was answered, which must not happen."""
ALERT = b"\x15"
"""First byte of a TLS alert, which only says that the handshake failed."""


def as_http2(call: Call) -> bytes:
    """Encode a call as HTTP/2 (RFC 9113), with headers that are neither indexed nor compressed."""
    headers = {":method": "POST", ":scheme": "https", ":path": call.path, ":authority": EXCHANGE}
    headers |= {"content-type": "application/grpc", "te": "trailers", **dict(call.metadata)}
    block = b"".join(b"\x00" + _text(key) + _text(value) for key, value in headers.items())
    frames = [bytes(3) + b"\x04\x00" + bytes(4), _frame(1, 4, block)]
    frames += [_frame(0, 0, b"\x00" + len(one).to_bytes(4, "big") + one) for one in call.frames]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames) + _frame(0, 1, b"")


def _frame(kind: int, flags: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + body


def _text(text: str) -> bytes:
    """Encode a string for HPACK. Seven bits of each length byte belong to the length."""
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
    """Open connections at a bounded rate, several at once. Each immediately sends the bytes of a call."""
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


@attack
def no_certificate(target: Target, stretch: Stretch) -> None:
    """Connect with TLS but no certificate, with an older TLS, and without TLS."""
    old = strange_context(target, None, ssl.TLSVersion.TLSv1_2)
    knocks(target, stretch, [strange_context(target, None), old, None])


@attack
def another_authority(target: Target, stretch: Stretch) -> None:
    """Show certificates of another authority of the same name, of a member as an authority, and self-signed ones.

    Their names are those of the run.
    """
    names = (target.honest, target.guest.name, EXCHANGE)
    strangers = [credentials_of(name, target) for name in names]
    strangers += [signed_by(target.guest, target.honest), self_signed(target)]
    knocks(target, stretch, [strange_context(target, one) for one in strangers])


def signed_by(member: Credentials, name: str) -> Credentials:
    """Return credentials with a certificate that a member signed as if it were the run's authority.

    The member's own certificate is part of the chain.
    """
    own, key, forger = member.identity, new_key(), Authority("made up")
    assert own is not None
    forger._key = key_from_text(own.key)
    certificate = forger.sign(key.public_key(), name, 0, time.time() + 3600.0) + own.certificate
    return Credentials(name, identity=Identity(certificate, as_text(key), own.authority))


def self_signed(target: Target) -> Credentials:
    """Return credentials that are signed by their own key, with the name of a member."""
    key, own = new_key(), Authority("made up")
    own._key = key
    certificate = own.sign(key.public_key(), target.honest, 0, time.time() + 3600.0)
    return Credentials(target.honest, identity=Identity(certificate, as_text(key), authority_of(target)))


@attack
def ended(target: Target, stretch: Stretch) -> None:
    """Show an expired certificate of the run's authority, and in between send bytes that are not TLS."""
    context = strange_context(target, target.expired)
    knocks(target, stretch, [context, context, None], [b"\x16\x03\x01" + bytes(500), bytes(1000)])


@attack
def another_run(target: Target, stretch: Stretch) -> None:
    """Call another run with a member's certificate, and this run with the certificate of a name that is not in it."""
    elsewhere = shown(target.guest, "another run", 1)
    nobody = asked("Heartbeat", pb.HeartbeatRequest(), shown(target.nobody, target.run, 1), target.nobody)
    flood(target.address, stretch, [asked("Heartbeat", pb.HeartbeatRequest(), elsewhere, target.guest), nobody])


@attack
def tickets(target: Target, stretch: Stretch) -> None:
    """Show tickets that are unknown, used or meant for other calls, and send damaged requests.

    Also calls as a member that was not invited, and as a former member.
    """
    key = new_key()
    right, good = signing_request(key), partial(pb.EnrolRequest, version=PROTOCOL_VERSION)
    known, former = target.tickets, target.tickets["former"]
    damaged = [right[:-1], bytes(len(right)), b"", b"\x30\x82\xff\xff" + right, right[:-8] + bytes(8), bytes(1 << 16)]
    calls = [asked("Enrol", good(request=right), (), known[what]) for what in ("unknown", "used")]
    calls += [asked("Enrol", good(request=one), (), known["open"]) for one in damaged]
    calls += [asked("Enrol", pb.EnrolRequest(version=1, request=right), (), known["open"])]
    calls += [
        asked(call, pb.HeartbeatRequest(), shown(target.guest, target.run, 1), known["open"]) for call in NOT_BY_TICKET
    ]
    calls += [asked("Renew", pb.Nothing(), (), one) for one in (target.guest, former)]
    calls += [asked("Give", pb.Nothing(), (), one) for one in (target.guest, former)]
    calls += [asked("Enrol", good(request=right), (), one) for one in (target.guest, former)]
    flood(target.address, stretch, calls)


NOT_BY_TICKET = ("Heartbeat", "Watch", "LastRound", "Renew", "Give", "Status")


@attack
def half_open(target: Target, stretch: Stretch) -> None:
    """Begin calls that send nothing: with a ticket, and as a member with more calls than it may have open."""
    with in_session(target) as session, ExitStack() as stack:
        known = target.tickets["open"], target.guest
        channels = [stack.enter_context(channel_to(target.address, one)) for one in known]
        room, never = threading.Semaphore(IN_FLIGHT), threading.Event()
        for _, channel in zip(stretch.paced(), cycle(channels), strict=False):
            if room.acquire(blocking=False):
                _half_open(channel, session.metadata, stretch, room, never)
        never.set()


def _half_open(
    channel: grpc.Channel, metadata: Metadata, stretch: Stretch, room: threading.Semaphore, never: threading.Event
) -> None:
    """Begin one call that sends nothing until the server ends it."""

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    def done(call: grpc.Future[bytes]) -> None:
        if not never.is_set():
            stretch.codes[code_of(call)] += 1
        room.release()

    heartbeat: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, "Heartbeat"))
    heartbeat.future(nothing(), metadata=metadata).add_done_callback(done)


@attack
def connections(target: Target, stretch: Stretch) -> None:
    """Open as many connections as this process may have. Half send nothing; half begin a handshake and stop."""
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
    """Return the ClientHello of a handshake. The server answers it with its certificate and a signature."""
    said = ssl.MemoryBIO()
    begun = strange_context(target, None).wrap_bio(ssl.MemoryBIO(), said)
    with suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    return said.read()
