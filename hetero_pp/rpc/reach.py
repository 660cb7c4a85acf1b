"""Reachability: dials members where they say that they listen. A member that is not reached has to dial instead."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from urllib.parse import unquote

from hetero_pp.core.proxies import DIRECT, numeric_address
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.channels import is_reached, make_channel

DIAL_SECONDS = 4.0
"""Seconds within which a member has to answer."""


class Reach:
    """Members of one run, dialled by TLS: only a process that proves to be the member counts as reached."""

    def __init__(self, identity: Identity) -> None:
        """`identity`: the exchange's."""
        self._identity = identity
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, bool]] = {}
        """Member -> where it was dialled last, and whether it answered."""

    def of(self, member: str, address: str, peer: str, is_new: bool) -> bool | None:
        """Return whether a member answers at HOST:PORT. The last result is reused unless the member `is_new`.

        `peer`: the address from which it calls, as gRPC names it. Returns None for an address on another machine, so
        that no caller can use the exchange to learn what else it reaches.
        """
        with self._lock:
            known = self._found.get(member)
        if not is_new and known is not None and known[0] == address:
            return known[1]
        numeric = _of(address, peer)
        if numeric is None:
            return None
        answers = self._answers(member, numeric)
        with self._lock:
            self._found[member] = address, answers
        return answers

    def _answers(self, member: str, address: str) -> bool:
        with closing(make_channel(address, self._identity, member, DIRECT)) as channel:
            return is_reached(channel, DIAL_SECONDS)


def _of(address: str, peer: str) -> str | None:
    """Return a numeric HOST:PORT, if it is on the machine that calls from `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`."""
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
    return f"[{own}]:{port}" if own.version == 6 else f"{own}:{port}"
