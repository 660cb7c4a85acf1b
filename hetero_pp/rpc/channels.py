"""gRPC channels and servers with their options; why a connection fails, reachability, and memory of frames."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from urllib.parse import unquote

import grpc

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import NewRun, Refused, WrongToken
from hetero_pp.core.proxies import DIRECT, Route, numeric_address, route_to
from hetero_pp.rpc.identities import Identity, read_certificate, ticket_of

PROTOCOL_VERSION = 1  # Version of calls and frames. Members with different versions refuse each other.


def version_complaint(found: int, expected: int) -> str:
    """Return why a host with this protocol version cannot join the run; empty if the versions are equal."""
    if found == expected:
        return ""
    return f"found version {found} of the protocol, expected {expected}: install the hetero-pp version of the run"


Options = list[tuple[str, int | str]]

RECEIVED_BYTES_MAX = 4 << 20
"""Bytes of a message that a server receives; gRPC drops longer ones unread. Frames and honest requests are shorter.

A request between their length and this limit counts against its sender. A call that gRPC has ended does not: honest
callers end calls, too.
"""

_OPTIONS: Options = [
    # Payload crosses in frames of 1 MiB; the rest is room for protobuf messages such as round records.
    ("grpc.max_send_message_length", 8 << 20),
    # A machine that vanishes is noticed within 15 seconds; a process that dies, at once by TCP. The machine of a frozen
    # process goes on acknowledging, so that gRPC's own limit of a ping holds: a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Windows that follow the measured bandwidth-delay product, for links that are both fast and far.
    ("grpc.http2.bdp_probe", 1),
    # Compressed messages are refused: their size would not be the number of bytes that crossed the link.
    ("grpc.compression_enabled_algorithms_bitset", 1),
]

_CHANNEL_OPTIONS: Options = [
    ("grpc.max_receive_message_length", 8 << 20),
    # Every channel has its own connection, so that two links never share one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Duration of one attempt: a TLS handshake takes several round trips, and homes may be far.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

_SERVER_OPTIONS: Options = [
    ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
    # With SO_REUSEPORT a second server on a busy port would share its connections instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A connection without a handshake is closed early, before it costs anything; the default is 120 seconds.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A member has 16 calls open at most, and shows a name, a token, a run and an incarnation. By default a connection
    # may open two billion streams, with 16 KB of headers each.
    ("grpc.max_concurrent_streams", 32),
    ("grpc.max_metadata_size", 4 << 10),
    ("grpc.absolute_max_metadata_size", 8 << 10),
]

_CALLS_A_WORKER = 4
_LOOK_SECONDS = 0.1  # seconds for which one of several hosts is looked at before the next; each goes on connecting

_NOBODYS_CALL = "/hetero_pp.Nobody/Answers"


def make_channel(
    address: str, identity: Identity | None = None, peer: str = "", route: Route | None = None
) -> grpc.Channel:
    """Return a channel to HOST:PORT, which connects when it is first used.

    With an identity it uses TLS, each side authenticates, and only the process named `peer` is accepted at any address.
    Without a `route` the route is chosen here, which may take seconds if the environment names a proxy.
    """
    proxy = (route or route_to(address)).proxy  # by default gRPC uses one of the environment for loopback, too
    proxied = ("grpc.enable_http_proxy", 0) if proxy is None else ("grpc.http_proxy", proxy.url)
    options: Options = [*_OPTIONS, *_CHANNEL_OPTIONS, proxied]
    if identity is None:
        return grpc.insecure_channel(address, options)
    certificate = identity.latest.certificate.encode()
    credentials = grpc.ssl_channel_credentials(identity.authority.encode(), identity.key.encode(), certificate)
    return grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", peer)])


def is_reached(channel: grpc.Channel, seconds: float | None) -> bool:
    """Connect, and return whether a gRPC server answers within some seconds (None: whenever it does).

    False also if the channel is closed. gRPC's own `channel_ready_future` starts a thread that looks every 0.2 s, and
    prints a traceback when it finds the channel closed. Nothing public tells when that thread ends.
    """
    until = None if seconds is None or math.isinf(seconds) else time.monotonic() + seconds
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        try:
            # No server has this call: gRPC itself answers, before any limit of ours counts it.
            channel.unary_unary(_NOBODYS_CALL)(b"", wait_for_ready=True, timeout=left)  # type: ignore[arg-type]
        except ValueError:  # closed before
            return False
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                return False
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return True
        if left == 0:
            return False
        time.sleep(0.01)  # the connection was lost while it was asked


def answering(addresses: str, identity: Identity | None, seconds: float) -> str | None:
    """Return the host of the exchange that answers within some seconds; None if none does.

    A single address is returned as it is.
    `addresses`: HOST:PORT of each host that may serve it, with commas between them. All are dialled at once: one that
    is frozen takes connections, and one that waits to take over does not.
    """
    if "," not in addresses:
        return addresses
    until = time.monotonic() + seconds
    with ExitStack() as opened:
        channels = {
            one: opened.enter_context(closing(make_channel(one, identity, EXCHANGE))) for one in addresses.split(",")
        }
        while True:
            for one, channel in channels.items():
                if is_reached(channel, _LOOK_SECONDS):
                    return one
            if time.monotonic() >= until:
                return None


def make_server(
    listen: str, handlers: Sequence[grpc.GenericRpcHandler], max_workers: int, identity: Identity | None = None
) -> tuple[grpc.Server, int]:
    """Start a server on HOST:PORT; return it and its port (PORT 0 takes any free one). Raises OSError if it is busy.

    With an identity it uses TLS, for processes of the same run only. Every open stream occupies a worker, so
    `max_workers` must exceed the number of stage links. The caller must stop the server, or the process cannot end.
    """
    pool = ThreadPoolExecutor(max_workers, thread_name_prefix="rpc")
    most = _CALLS_A_WORKER * max_workers  # others are turned away, and not kept until a worker is free
    server = grpc.server(
        pool, handlers=list(handlers), options=_OPTIONS + _SERVER_OPTIONS, maximum_concurrent_rpcs=most
    )
    try:
        if identity is None:
            port = server.add_insecure_port(listen)
        else:

            def latest() -> grpc.ServerCertificateConfiguration:
                """Return the newest certificate, for a new connection, because it is renewed while the server runs."""
                pair = identity.key.encode(), identity.latest.certificate.encode()
                return grpc.ssl_server_certificate_configuration([pair], identity.authority.encode())

            def renewed() -> grpc.ServerCertificateConfiguration:
                return latest() if identity.kept_in else None  # type: ignore[return-value]  # None: as before

            credentials = grpc.dynamic_ssl_server_credentials(latest(), renewed, require_client_authentication=True)
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {listen}: the address is in use, or does not belong to this machine"
        ) from error
    server.start()
    return server, port


_SECONDS = 5.0
_SAME = "`exchange.insecure` has to be equal on all hosts"


def require_trust(address: str, identity: Identity | None, route: Route = DIRECT) -> None:
    """Connect to HOST:PORT once, as `route` says, and raise what is wrong with the certificates, if anything is.

    Raises WrongToken if the exchange there has another authority than a process with a token, NewRun if it has another
    one than a process with a ticket. Raises Refused if another program answers, if only one side speaks TLS, or if this
    process's own certificate is not valid. An exchange that does not answer raises nothing: it may come up.
    """
    if identity is not None:
        own, join_again = identity.shown, "check the clock of this host"
        if time.time() > own.until:
            why = f"expired at {_moment(own.until)}; {join_again}, or join with a new ticket"
            raise Refused(f"the certificate of this host {why}")
        if time.time() < own.since:
            why = f"is valid from {_moment(own.since)}: {join_again}, which shows {_moment(time.time())}"
            raise Refused(f"the certificate of this host {why}")

    def certificate_of(context: ssl.SSLContext) -> bytes:
        """Return the certificate of the server, which is only known if a context does not verify it."""
        context.check_hostname = False  # names are of the run, not of hosts
        context.set_alpn_protocols(["h2"])
        with route.connect(address, _SECONDS) as connection, context.wrap_socket(connection) as wrapped:
            return wrapped.getpeercert(binary_form=True) or b""

    unverified, verified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    if identity is not None:
        verified.load_verify_locations(cadata=identity.authority)
    context = unverified if identity is None else verified
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        certificate_of(context)
    except ssl.SSLCertVerificationError:
        assert identity is not None  # else nothing is verified
        try:  # whether the certificate there, with any signature, names an exchange
            pem = ssl.DER_cert_to_PEM_cert(certificate_of(unverified)).encode()
            is_exchange = read_certificate(pem).name == EXCHANGE
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            is_exchange = False
        if not is_exchange:
            why = "another program answers at this address, or an exchange of another version"
            raise Refused(f"{address}: {why}") from None
        if ticket_of(identity.shown.name) is not None:
            raise new_run(address, "ticket", "ask for a new ticket") from None
        if identity.shown.holder:
            raise new_run(address, "certificate", "ask for a new ticket") from None
        raise WrongToken(f"the exchange at {address} was started with another token") from None
    except ssl.SSLError:
        if identity is not None:
            raise Refused(f"{address} does not use TLS, but this host does: {_SAME}") from None
    except OSError:
        pass
    else:
        if identity is None:
            raise Refused(f"{address} uses TLS, but this host does not: {_SAME}")


def new_run(address: str, yours: str, instead: str) -> NewRun:
    """Return the error after a new run has begun. `yours`: what this process shows; `instead`: what to do."""
    return NewRun(f"a new run has started at {address}; your {yours} belongs to the previous run; {instead}")


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


DIAL_SECONDS = 4.0  # seconds within which a member has to answer


class Reach:
    """Members of one run, dialled by TLS: only a process that proves to be the member counts as reached."""

    def __init__(self, identity: Identity) -> None:
        """`identity`: the exchange's."""
        self._identity = identity
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, bool]] = {}  # member -> where it was dialled last, and whether it answered

    def of(self, member: str, address: str, peer: str, is_new: bool) -> bool | None:
        """Return whether a member answers at HOST:PORT. The last result is reused unless the member `is_new`.

        `peer`: the address from which it calls, as gRPC names it. Returns None for an address on another machine, so
        that no caller can use the exchange to learn what else it reaches.
        """
        with self._lock:
            known = self._found.get(member)
        if not is_new and known is not None and known[0] == address:
            return known[1]
        # The numeric address, if it is on the machine that calls from `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`.
        host, _, port = address.rpartition(":")
        family, _, caller = peer.partition(":")
        if family not in ("ipv4", "ipv6") or not port.isdecimal():
            return None
        own = numeric_address(unquote(caller).rpartition(":")[0].strip("[]"))
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, OverflowError):
            return None
        if own is None or own not in {numeric_address(str(one[4][0])) for one in found}:
            return None
        numeric = f"[{own}]:{port}" if own.version == 6 else f"{own}:{port}"
        with closing(make_channel(numeric, self._identity, member, DIRECT)) as channel:
            answers = is_reached(channel, DIAL_SECONDS)
        with self._lock:
            self._found[member] = address, answers
        return answers
