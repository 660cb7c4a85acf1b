"""Permissions: which caller may make which call of the exchange, and what it may report. One table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from hetero_pp.core.errors import Forbidden
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.rpc.callers import RemoteCaller
from hetero_pp.run.spec import Roster


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


CALLS: Mapping[str, Whose] = {
    "Agree": Whose.SLOT,
    "Join": Whose.SLOT,
    "LastRound": Whose.RUN,
    "Changes": Whose.RUN,
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
"""Permission of each call. The exchange checks that blocks, rounds and parameters are the member's own; the relay
checks the links.
"""


def _own_replica(report: Report, member: str, roster: Roster) -> bool:
    own = report.inner_step if report.HasField("inner_step") else report.evaluation
    return own.replica == roster.members[member]


def _own_link(report: Report, member: str, roster: Roster) -> bool:
    use = report.link_use
    return roster.counts.get((use.link, use.direction)) == member


def _anything(report: Report, member: str, roster: Roster) -> bool:
    return True


REPORTS: Mapping[str, Callable[[Report, str, Roster], bool]] = {
    "inner_step": _own_replica,
    "evaluation": _own_replica,
    "link_use": _own_link,
    "member_round": _anything,
    "state_saving": _anything,
    "computes": _anything,
    "measured_line": _anything,
    "activity": _anything,
    "failure": _anything,
    "refusal": _anything,
    "finished": _anything,
}
"""Events that a member may report, and the check that they are its own. All others come from the exchange only."""


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
    event = report.WhichOneof("event")
    is_own = REPORTS.get(event or "")
    if is_own is None or not is_own(report, member, roster):
        raise Forbidden(f"{member} may not report {event or 'nothing'}")
