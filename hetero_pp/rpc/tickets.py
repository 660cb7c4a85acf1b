"""Tickets: what one process needs to be admitted to a run, as a text to be sent over a trusted channel."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import Refused
from hetero_pp.core.ticket_text import MOST_CHARACTERS, PREFIX, bodies
from hetero_pp.rpc.certificates import Authority, Identity, as_text, new_key

_CHECK_BYTES = 4
MOST_PORT = 65535
_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "xds", "ipv4", "ipv6")
"""Prefixes of addresses that gRPC does not take as HOST:PORT."""
_NAME = "ticket."
_OF_A_TICKET = re.compile(r"ticket\.([0-9a-f]{16})")
"""A number that no stage of a replica named `ticket` has."""


@dataclass(frozen=True)
class Ticket:
    """Ticket to a run. Its bearer takes a slot, once, so it is a secret."""

    run: str
    """Name of the run."""
    address: str
    """HOST:PORT of the exchange."""
    identity: Identity
    """Key and certificate with which the exchange is asked for a slot, and nothing else."""
    good_for: str = ""
    """Slots that it admits to, in words; empty in tickets of older versions. The exchange decides, not this text."""

    store: str = ""
    """URL of the run's store, if the exchange signs URLs of it; members follow signed URLs to no other store."""
    rehearsal: bool = False
    """Whether the run is a rehearsal, which trains nothing."""

    def to_text(self) -> str:
        """Return the ticket on one line of letters, digits, `-` and `_`."""
        data = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        checked = hashlib.sha256(data).digest()[:_CHECK_BYTES] + data
        return PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Ticket:
        """Parse a ticket as it was pasted. Raises Refused for a text that is no ticket, or not whole."""
        found = list(bodies(text))
        if not found:
            shown = f"{text[:12]!r}{'...' if len(text) > 12 else ''}"
            raise Refused(
                f"found {shown}, expected a ticket, which begins with {PREFIX}; "
                "to read it from a file: hetero-pp join - < FILE"
            )
        for body in found:
            try:
                data = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
                check, data = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
                if hashlib.sha256(data).digest()[:_CHECK_BYTES] != check:
                    raise ValueError
                ticket = cls._of(parse_json(_inflated(data)))
                ticket.id  # noqa: B018 (its certificate can be read)
            except (ValueError, KeyError, TypeError, zlib.error, binascii.Error):
                continue
            return ticket
        raise Refused("the ticket is incomplete: copy all of it, as one line")

    @classmethod
    def _of(cls, found: Any) -> Ticket:
        """Parse a ticket's JSON. The identity can name no file of the host that reads it.

        Raises ValueError, KeyError or TypeError for JSON that is no ticket.
        """
        identity = found["identity"]
        texts = [found["run"], found["address"], *(identity[key] for key in ("certificate", "key", "authority"))]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
        run, address, *pem = texts
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > MOST_PORT or host in _SCHEMES or "/" in host:
            raise ValueError
        told = str(found.get("good_for", "")), str(found.get("store", "")), found.get("rehearsal") is True
        return cls(run, address, Identity(*pem), *told)

    @property
    def id(self) -> str:
        """Id of the ticket. Raises ValueError for a certificate that is no ticket's."""
        found = ticket_of(self.identity.shown.name)
        if found is None:
            raise ValueError("not issued for a ticket")
        return found

    @property
    def is_over(self) -> bool:
        """Whether it has expired."""
        return time.time() > self.identity.shown.until

    def require_good(self) -> None:
        """Raise Refused if it has expired."""
        if self.is_over:
            raise Refused("the ticket has expired: ask for another (or is the clock of this host wrong?)")


def make_ticket(
    run: str,
    address: str,
    authority: Authority,
    ticket: str,
    until: float,
    good_for: str = "",
    store: str = "",
    rehearsal: bool = False,
) -> Ticket:
    """Return a ticket with this id that is valid until `until`."""
    key = new_key()
    certificate = authority.sign(key.public_key(), _NAME + ticket, 0, until)
    return Ticket(run, address, Identity(certificate, as_text(key), authority.certificate), good_for, store, rehearsal)


def ticket_of(name: str) -> str | None:
    """Return the ticket's id that a certificate's name contains; None for a member's."""
    found = _OF_A_TICKET.fullmatch(name)
    return None if found is None else found[1]


def _inflated(data: bytes) -> bytes:
    """Decompress a ticket, up to the largest size that a ticket has."""
    return zlib.decompressobj().decompress(data, MOST_CHARACTERS)
