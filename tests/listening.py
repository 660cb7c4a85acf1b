"""TCP sockets on which processes of a test listen."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def listening(processes: Iterable[psutil.Process]) -> dict[int, set[tuple[str, int]]]:
    """Return process id -> (host, port) of the TCP sockets on which the process listens."""
    found: dict[int, set[tuple[str, int]]] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host = one.laddr.ip.removeprefix("::ffff:")  # of a socket for both IPv4 and IPv6
                    found.setdefault(process.pid, set()).add((host, one.laddr.port))
    return found
