"""Creates gRPC channels and servers; all their options are set here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from hetero_pp.core.proxies import Route, route_to
from hetero_pp.rpc.certificates import Identity

PROTOCOL_VERSION = 15
"""Version of calls and frames. Members with different versions refuse each other."""


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
    # A machine that vanishes is noticed within 15 seconds; a process that dies, at once by TCP.
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

_NOBODYS_CALL = "/hetero_pp.Nobody/Answers"


def make_channel(
    address: str, identity: Identity | None = None, peer: str = "", route: Route | None = None
) -> grpc.Channel:
    """Return a channel to HOST:PORT, which connects when it is first used.

    With an identity it uses TLS, each side authenticates, and only the process named `peer` is accepted at any address.
    Without a `route` the route is chosen here, which may take seconds if the environment names a proxy.
    """
    options = [*_OPTIONS, *_CHANNEL_OPTIONS, *_options_of(route or route_to(address))]
    if identity is None:
        return grpc.insecure_channel(address, options)
    certificate = identity.latest.certificate.encode()
    credentials = grpc.ssl_channel_credentials(identity.authority.encode(), identity.key.encode(), certificate)
    return grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", peer)])


def _options_of(route: Route) -> Options:
    """Return the channel options of a route. By default gRPC uses a proxy of the environment for loopback, too."""
    return [("grpc.enable_http_proxy", 0)] if route.proxy is None else [("grpc.http_proxy", route.proxy.url)]


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
            port = server.add_secure_port(listen, _server_credentials(identity))
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {listen}: the address is in use, or does not belong to this machine"
        ) from error
    server.start()
    return server, port


def _server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return the newest certificate for every new connection, because it is renewed while the server runs."""

    def latest() -> grpc.ServerCertificateConfiguration:
        pair = identity.key.encode(), identity.latest.certificate.encode()
        return grpc.ssl_server_certificate_configuration([pair], identity.authority.encode())

    def renewed() -> grpc.ServerCertificateConfiguration:
        return latest() if identity.kept_in else None  # type: ignore[return-value]  # None: as before

    return grpc.dynamic_ssl_server_credentials(latest(), renewed, require_client_authentication=True)
