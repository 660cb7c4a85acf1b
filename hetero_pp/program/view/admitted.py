"""Access to the page from other machines: for the present members of a run, by their certificates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.program.join.status import RunOfHost
from hetero_pp.rpc.admission_client import status
from hetero_pp.rpc.identities import Identity, read_certificate, ticket_of
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.memberships import Memberships

_SECONDS_KNOWN = 10.0
"""Seconds for which an answer about the holders of slots counts."""
_SECONDS_TO_ANSWER = 5.0

Holders = Callable[[], Mapping[str, int] | None]
"""Returns slot -> number of the present holder with a ticket, 0 if there is none; None if it is not known."""


class MemberAuthenticator:
    """One run: its authority, and the holders of its slots. May be used by many threads."""

    def __init__(self, identity: Identity, holders: Holders) -> None:
        """`identity`: this host's in the run."""
        self.identity = identity
        self._authority = x509.load_pem_x509_certificate(identity.authority.encode())
        self._ask, self._asked = holders, -_SECONDS_KNOWN
        self._holders: Mapping[str, int] | None = None
        self._lock = threading.Lock()

    def admits(self, certificate: bytes) -> bool:
        """Return whether a certificate (DER) is valid, and its owner a member of the run now.

        A process that was started with the run's secret is a member. If the holders of the slots are not known, the
        certificate alone counts: it is valid for a day at most.
        """
        found = x509.load_der_x509_certificate(certificate)
        try:
            found.verify_directly_issued_by(self._authority)
        except (InvalidSignature, TypeError, ValueError):
            return False
        shown = read_certificate(found.public_bytes(Encoding.PEM))
        if ticket_of(shown.name) is not None or shown.until < time.time():
            return False
        holders = self._known() if shown.holder else None
        return holders is None or holders.get(shown.name) == shown.holder

    def _known(self) -> Mapping[str, int] | None:
        with self._lock:
            if time.monotonic() >= self._asked + _SECONDS_KNOWN:
                told = self._ask()
                self._holders = self._holders if told is None else told
                self._asked = time.monotonic()
            return self._holders


def authenticator_of(known: RunOfHost) -> MemberAuthenticator:
    """Return what admits members of a run. Its serving host has the holders on its disk; others ask the exchange."""
    return MemberAuthenticator(
        known.identity, partial(_on_disk, known.folder) if known.serves else partial(_told, known)
    )


def _on_disk(folder: RunFolder) -> Mapping[str, int] | None:
    if not folder.memberships.is_file():
        return {}
    with suppress(HeteroPPError), closing(Memberships(folder.memberships)) as memberships:
        slots = {holder.slot for holder in memberships.holders()}
        return {slot: found.number for slot in slots if (found := memberships.held_by(slot)) is not None}
    return None


def _told(known: RunOfHost) -> Mapping[str, int] | None:
    with suppress(HeteroPPError):
        reply = status(known.address, known.identity, _SECONDS_TO_ANSWER)
        return {slot.name: slot.holder for slot in reply.slots}
    return None
