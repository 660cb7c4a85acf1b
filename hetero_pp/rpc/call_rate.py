"""Bounds how fast one caller may begin calls, and closes the connection of a caller that does not keep to it.

gRPC has no such bound: a stream that is opened and reset at once costs its sender two small frames, and the server
a Python call. Answered calls bound themselves, as a caller has few open at once; calls that are reset do not.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import unquote

import psutil

from hetero_pp.core.errors import TooMuch
from hetero_pp.rpc.pace import Pace

CALLS_A_SECOND, BURST = 500.0, 2_000
"""Calls that one caller may begin: on average, and at once. An honest member begins about ten per second."""

BACKLOG_SECONDS_MAX = 1.0
"""A caller whose calls would have to wait longer than this is cut. With 16 calls open at once none has to."""

CUT_SECONDS = 10.0
"""A caller that was cut is cut again at each call for this long."""

_CALLERS_MAX = 1_000
"""Callers that are remembered before those whose budget is full again are forgotten."""


class CallRate(Pace):
    """The calls that each caller may begin on one server. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(CALLS_A_SECOND, BURST, clock)

    def due_in(self, caller: str, count: int = 1) -> float:
        """Return the seconds that a call has to wait. Raises TooMuch for a caller that has to be cut."""
        with self._lock:
            now = self._clock()
            if len(self._empty_until) > _CALLERS_MAX:
                self._forget_full(now)
            since = self._empty_after(caller, count, now)
            if since - now > BACKLOG_SECONDS_MAX:
                self._empty_until[caller] = max(since, now + CUT_SECONDS)
                raise TooMuch(f"{caller} began more than {CALLS_A_SECOND:g} calls per second; its connection is closed")
            self._empty_until[caller] = since
        return max(0.0, since - now)


def close_connection(peer: str) -> bool:
    """Close this process's TCP connection to a peer, named as gRPC names it; return whether there was one.

    gRPC for Python cannot close a single connection. The socket is shut down through a second descriptor, which is
    compared with the peer again: the first one may belong to another connection by then.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    if not port.isdecimal():
        return False
    wanted = _address(host.strip("[]"), int(port))
    for one in psutil.Process().net_connections("tcp"):
        if not one.raddr or _address(*one.raddr) != wanted or one.fd < 0:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
            if _address(*connection.getpeername()[:2]) == wanted:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _address(host: str, port: int) -> tuple[str, int]:
    """Return an address in one form: a socket of both families shows IPv4 addresses as `::ffff:192.0.2.1`."""
    found = ipaddress.ip_address(host)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), port
