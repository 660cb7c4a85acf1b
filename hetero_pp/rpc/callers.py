"""Identity of the caller of a request, by certificate or token and never by claim, and the calls that it may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Protocol

import grpc

from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import Forbidden, Refused, WrongToken
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Credentials, Secret, Shown, is_validators, read_certificate, ticket_of

Metadata = tuple[tuple[str, str], ...]

_NAME, _TOKEN, _RUN, _INCARNATION = "name", "token", "run", "incarnation"
_MOST_DIGITS = 9
_STRANGER = "the exchange was started with another token"


@dataclass(frozen=True)
class RemoteCaller(Caller):
    """Caller over the network. Its name is proved; it claims its incarnation and its run."""

    members: frozenset[str] = frozenset()  # members whose processes it has started, or that it is
    is_member: bool = False
    is_validator: bool = False
    run: str | None = None  # name of the run that it claims
    ticket: str | None = None  # ticket that it shows; it holds no slot yet


class Guests(Protocol):
    """Ticket holders."""

    def require_in(self, slot: str, number: int) -> None:
        """Raise Refused if this holder does not hold the slot, or not any more."""

    def require_open(self, ticket: str) -> None:
        """Raise Refused for a ticket that admits nobody."""


class Callers:
    """Callers of one run: its members and their launchers."""

    def __init__(self, secret: Secret, roster: Roster, encrypted: bool = False, guests: Guests | None = None) -> None:
        """Without `guests`, no ticket is accepted."""
        self._secret, self._encrypted, self._guests = secret, encrypted, guests
        self._members = {LAUNCHER: frozenset(roster.members), EXCHANGE: frozenset[str]()}
        for member, replica in roster.members.items():
            self._members[replica] = self._members.get(replica, frozenset()) | {member}
        self._members |= {member: frozenset([member]) for member in roster.members}
        self._roster = roster

    def __len__(self) -> int:
        """Return the number of possible callers."""
        return len(self._members)

    def let_in(self, context: grpc.ServicerContext) -> RemoteCaller:
        """Return the caller of a new call.

        Raises WrongToken for a caller without credentials, Refused for a ticket holder that is no longer admitted.
        """
        caller = self.of(context)
        if caller.ticket is None and not caller.holder:
            return caller
        if self._guests is None:
            raise WrongToken(_STRANGER)
        if caller.ticket is not None:
            self._guests.require_open(caller.ticket)
        else:
            self._guests.require_in(caller.name, caller.holder)
        return caller

    def of(self, context: grpc.ServicerContext) -> RemoteCaller:
        """Return the caller of a call that was admitted.

        Raises WrongToken for a caller without credentials, Refused for one whose slot the run no longer has.
        """
        told = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        if self._encrypted:
            found = shown_by(context)
            if found is None:
                raise WrongToken(_STRANGER)
        else:
            name = told.get(_NAME, "")
            if not self._secret.is_of(name, told.get(_TOKEN, "")):
                raise WrongToken(_STRANGER)
            found = Shown(name, holder=0)
        ticket, is_validator = ticket_of(found.name), is_validators(found.name)
        if ticket is None and not is_validator and found.name not in self._members:
            if found.holder:
                raise Refused(f"{found.name} is no longer a slot of this run")
            raise WrongToken(_STRANGER)
        text = told.get(_INCARNATION, "")
        is_number = text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS
        return RemoteCaller(
            found.name,
            int(text) if is_number else None,
            found.holder,
            members=self._members.get(found.name, frozenset()),
            is_member=found.name in self._roster.members,
            is_validator=is_validator,
            run=told.get(_RUN),
            ticket=ticket,
        )


def shown_certificate(context: grpc.ServicerContext) -> bytes:
    """Return the certificate, as PEM, of the TLS connection of a call."""
    (found,) = context.auth_context()["x509_pem_cert"]
    assert isinstance(found, bytes)
    return found


def shown_by(context: grpc.ServicerContext) -> Shown | None:
    """Return what the certificate of a call's connection says; None for a connection without TLS 1.3."""
    found = context.auth_context()
    if found.get("ssl_tls_version") != [b"TLSv1.3"]:
        return None
    return _read(shown_certificate(context))


_read = lru_cache(maxsize=1024)(read_certificate)
"""Parses a certificate; cached, because a connection shows the same one at every call."""


def shown(credentials: Credentials, run: str | None = None, incarnation: int | None = None) -> Metadata:
    """Return the metadata with which a call shows its caller, the run and the incarnation."""
    found = [(_NAME, credentials.name)]
    found += [] if credentials.identity is not None else [(_TOKEN, credentials.token)]
    found += [] if run is None else [(_RUN, run)]
    found += [] if incarnation is None else [(_INCARNATION, str(incarnation))]
    return tuple(found)


def claimed(context: grpc.ServicerContext) -> str:
    """Return the name that a caller claims and its address, for an error message."""
    name = dict(context.invocation_metadata()).get(_NAME, "")
    return f"{name if isinstance(name, str) and name else 'a stranger'} at {context.peer()}"


class Whose(Enum):
    """Property that a caller needs."""

    ANYONE = "belongs to the run, or shows a ticket"
    RUN = "belongs to the run"
    TICKET = "shows a ticket"
    INVITED = "holds a slot by a ticket"
    PROCESS = "is the member's process, or started it"
    SLOT = "is a member, for its own slot"
    INCARNATION = "is a member, for its own slot, and sends its incarnation"
    VALIDATOR = "is a validator, with a name that the operator gave it"


# Permission of each call. The exchange checks that blocks, rounds and parameters are the member's own; the relay checks
# the links.
CALLS: Mapping[str, Whose] = {
    "Agree": Whose.SLOT,
    "Join": Whose.SLOT,
    "LastRound": Whose.RUN,
    "Assign": Whose.INCARNATION,
    "Heartbeat": Whose.INCARNATION,
    "Broken": Whose.INCARNATION,
    "Died": Whose.PROCESS,
    "NewestCheckpoint": Whose.RUN,
    "RunCheckpoint": Whose.RUN,
    "Deposit": Whose.INCARNATION,
    "UploadUrl": Whose.INCARNATION,
    "Uploaded": Whose.INCARNATION,
    "Record": Whose.INCARNATION,
    "Fetch": Whose.SLOT,
    "Confirm": Whose.INCARNATION,
    "Show": Whose.INCARNATION,
    "Judge": Whose.VALIDATOR,
    "Report": Whose.SLOT,
    "Stay": Whose.SLOT,
    "Watch": Whose.RUN,
    "Enrol": Whose.TICKET,
    "Probe": Whose.TICKET,
    "Renew": Whose.INVITED,
    "Give": Whose.INVITED,
    "Status": Whose.RUN,
    "Preview": Whose.ANYONE,
    "Measure": Whose.ANYONE,
    "Carry": Whose.SLOT,
}


_OF_A_REPLICA = ("inner_step", "evaluation")
_OF_A_MEMBER = (
    "member_round",
    "state_saving",
    "computes",
    "measured_line",
    "activity",
    "failure",
    "refusal",
    "finished",
)
REPORTS = frozenset({*_OF_A_REPLICA, "link_use", *_OF_A_MEMBER})
"""Events that a member may report, if they are its own. All others come from the exchange only."""


def require_call(call: str, caller: RemoteCaller) -> None:
    """Raise Forbidden if the caller may not make a call."""
    whose = CALLS[call]
    if whose is not Whose.ANYONE and (whose is Whose.TICKET) != (caller.ticket is not None):
        raise Forbidden(f"{call} is not allowed {'with' if caller.ticket else 'without'} a ticket")
    if whose is Whose.INVITED and caller.holder == 0:
        raise Forbidden(f"{call} is only for members that joined by a ticket, and {caller.name} did not")
    if whose in (Whose.SLOT, Whose.INCARNATION) and not caller.is_member:
        raise Forbidden(f"{call} is only for members, and {caller.name} is not one")
    if whose is Whose.VALIDATOR and not caller.is_validator:
        raise Forbidden(f"{call} is only for validators, and {caller.name} is not one")
    if whose is Whose.INCARNATION and caller.incarnation is None:
        raise Forbidden(f"{call} needs the incarnation that {caller.name} holds")


def require_process(caller: RemoteCaller, member: str) -> None:
    """Raise Forbidden unless the caller is a member's process or its launcher."""
    if member not in caller.members:
        raise Forbidden(f"{caller.name} did not start {member}, so it cannot act for it")


def require_report(report: Report, member: str, roster: Roster) -> None:
    """Raise Forbidden for an event that the member may not report."""
    event, is_own = report.WhichOneof("event") or "", True
    if event in _OF_A_REPLICA:
        is_own = getattr(report, event).replica == roster.members[member]
    elif event == "link_use":
        is_own = roster.counts.get((report.link_use.link, report.link_use.direction)) == member
    if event not in REPORTS or not is_own:
        raise Forbidden(f"{member} may not report {event or 'nothing'}")
