"""Bytes that arrive on a TCP connection."""

from __future__ import annotations

import socket
from contextlib import suppress


def heard(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes of a connection; fewer if it ends before, also if it is cut."""
    found = bytearray()
    with suppress(ConnectionResetError):
        while len(found) < count and (some := connection.recv(count - len(found))):
            found += some
    return bytes(found)
