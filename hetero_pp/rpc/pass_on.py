"""Bytes of one connection are passed on to another, with bounded memory: by the relay, and at both its ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

ROOM_BYTES = 128 << 10
"""Bytes that are read at once, and memory of one direction of a relayed connection."""

Check = Callable[[int], None]
"""Gets the number of bytes that were passed on; 0 if a second passed without any. May raise, which ends it."""


def pass_on(source: socket.socket, target: socket.socket, check: Check) -> None:
    """Pass on bytes until `source` ends or one of both is cut. Then tell `target` that nothing follows.

    `check` is called after each part; if sockets have a timeout, also after each timeout.
    """
    room = memoryview(bytearray(ROOM_BYTES))
    with suppress(OSError):
        while count := _received(source, room, check):
            _send(target, room[:count], check)
            check(count)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _received(source: socket.socket, room: memoryview, check: Check) -> int:
    while True:
        try:
            return source.recv_into(room)
        except TimeoutError:
            check(0)


def _send(target: socket.socket, rest: memoryview, check: Check) -> None:
    """Send all. Unlike `sendall`, it may be interrupted by a timeout any number of times."""
    while rest:
        try:
            rest = rest[target.send(rest) :]
        except TimeoutError:
            check(0)


def pass_on_both_ways(here: socket.socket, there: socket.socket) -> None:
    """Pass on bytes in both directions until both have ended, and close both connections."""
    with here, there:
        back = threading.Thread(target=pass_on, args=(there, here, lambda count: None), name="relayed", daemon=True)
        back.start()
        pass_on(here, there, lambda count: None)
        back.join()


def cut(connection: socket.socket) -> None:
    """End a connection that other threads use. The descriptor stays theirs until they close it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def without_delay(connection: socket.socket) -> socket.socket:
    """Return the connection after small messages on it are sent at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
