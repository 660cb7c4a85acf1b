"""Marks of a run: its membership events, one line each, with the kind that the page shows as a sign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetero_pp.messages.messages_pb2 import SUSPENDED, MembershipEventKind, Report
from hetero_pp.program.report.membership_event_lines import MembershipEventLines, member_joined
from hetero_pp.run.spec import RunSpec
from replica_groups.exchange.memberships import LEFT

_KINDS: Mapping[str, str] = {
    "INCARNATION_OVER": "killed",
    "SUSPENDED": "suspended",
    "LATE": "late",
    "PAUSED": "paused",
    "WENT_ON": "resumed",
    "HEALED": "recovered",
    "RESTARTED": "restarted",
    "GIVEN_UP": "given_up",
    "SILENT": "silent",
    "INJECTED": "injected",
    "LEFT_OUT": "rejected",
    "SCALED": "scaled",
    "EXCLUDED": "barred",
    "NOT_AWAITED": "not_awaited",
    "UNAUDITED": "failed",
    "AUDITED": "resumed",
}
MARKED = ("begun", "failure", "joined", "membership_event", "state_saving", "waiting")
"""Events that may have marks."""
_CHARACTERS_MAX = 1000


class Marks:
    """Turns reports into marks, with the lines that the launcher prints."""

    def __init__(self, spec: RunSpec) -> None:
        self._event_lines = MembershipEventLines(spec)
        self._replicas = {name: member.replica.name for name, member in spec.members.items()}

    def of(self, report: Report) -> Iterator[dict[str, Any]]:
        """Yield the marks of a report, without their time; usually none."""
        lines = list(self._event_lines.lines(report))
        event = report.WhichOneof("event")
        if event == "begun" and report.begun.last_round:
            yield self._mark("resumed_run", "", "", report.begun.last_round, self._resumed(report))
        elif event == "failure" and not report.failure.consequence:
            yield self._mark("failed", report.member, "", 0, report.failure.cause)
        elif event == "joined":
            yield self._mark("joined", report.member, "", 0, member_joined(report))
        elif event == "membership_event":
            told = report.membership_event
            name = (
                MembershipEventKind.Name(told.what) if told.what in MembershipEventKind.values() else event
            )  # of a later version
            kind = "left" if told.cause.endswith(LEFT) else _KINDS.get(name, name.lower())
            cause = f"{told.slot} is suspended: {told.cause}" if told.what == SUSPENDED else told.cause
            for line in lines or [cause]:
                yield self._mark(kind, told.slot, told.replica, told.round, line)
        else:
            for line in lines:
                yield self._mark(str(event), report.member, "", 0, line)

    def _resumed(self, report: Report) -> str:
        note = f"; {report.begun.note}" if report.begun.note else ""
        return f"resuming after round {report.begun.last_round}{note}"

    def _mark(self, kind: str, member: str, replica: str, round_: int, text: str) -> dict[str, Any]:
        known = member if member in self._replicas else None
        of = replica or (self._replicas[member] if known else None)
        return {"kind": kind, "member": known, "replica": of, "round": round_ or None, "text": text[:_CHARACTERS_MAX]}
