"""Whether the exchange reaches members where they say that they listen: who cannot be dialled does the dialling."""

from __future__ import annotations

import ipaddress
import socket
import threading
from contextlib import closing
from urllib.parse import unquote

import grpc

from hetero_pp.proxies import DIRECT
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.channels import make_channel, readiness

DIAL_SECONDS = 4.0
"""In which a member is to answer."""


class Reach:
    """Of one run's members, which are dialled by TLS: only who shows to be that member has been reached."""

    def __init__(self, identity: Identity) -> None:
        """`identity`: the exchange's."""
        self._identity = identity
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, bool]] = {}
        """By member, where it was dialled last and whether it answered."""

    def of(self, member: str, address: str, peer: str, is_new: bool) -> bool | None:
        """Whether a member answers at HOST:PORT; one that `is_new` is dialled again, and else what was found stands.

        `peer`: from where it calls, as gRPC says it. None for an address that is not there: nobody learns by this what
        else the exchange reaches.
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
        with closing(make_channel(address, self._identity, member, DIRECT)) as channel, readiness(channel) as ready:
            try:
                ready.result(DIAL_SECONDS)
            except grpc.FutureTimeoutError:
                return False
            return True


def _of(address: str, peer: str) -> str | None:
    """A HOST:PORT by number, if it is on the machine that calls from `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`."""
    host, _, port = address.rpartition(":")
    family, _, caller = peer.partition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    own = _ip(unquote(caller).rpartition(":")[0])
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError):
        return None
    if own is None or own not in {_ip(str(one[4][0])) for one in found}:
        return None
    return f"[{own}]:{port}" if own.version == 6 else f"{own}:{port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Of a numeric host; the IPv4 one, where that is written as IPv6."""
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
