"""Where processes that tests start listen."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def listening(processes: Iterable[psutil.Process]) -> dict[int, set[tuple[str, int]]]:
    """By process that listens, the (host, port) of its TCP sockets."""
    found: dict[int, set[tuple[str, int]]] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host = one.laddr.ip.removeprefix("::ffff:")  # of a socket for both kinds of addresses
                    found.setdefault(process.pid, set()).add((host, one.laddr.port))
    return found
