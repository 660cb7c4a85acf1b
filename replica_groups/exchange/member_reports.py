"""Checks each report of a member before anybody reads it: its numbers, how many reports there are, and their times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.refusals import Kind
from hetero_pp.report_bounds import ReportBounds, complaint, drop_unknown
from hetero_pp.run.spec import Roster
from hetero_pp.steady_clock import steady_clock

TRIES = 8
"""Times that one round may be reported: a replica that is formed anew trains its round again."""
ROUNDS_BEFORE = 8
"""Rounds that are added to those of the run: a member reports before the first round, and after the last."""
_LINK_REPORTS_A_SECOND = 4.0
"""Of one direction of one link. A member sends two while it trains."""
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 2.0, 100
"""A member reports 20 refusals at once and then one a second; each process that takes its slot may do so again."""

REFUSAL_CHARACTERS = 200
"""Characters of each text of a reported refusal. Only refusals grow with time instead of with rounds."""


class MemberReports:
    """The reports of one run's members. Not safe to use from several threads at once."""

    def __init__(
        self,
        roster: Roster,
        bounds: ReportBounds,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: seconds since 1970, by default those of a steady clock."""
        self._roster, self._bounds, self._clock = roster, bounds, clock or steady_clock()
        self._directions = Counter(roster.counts.values())
        self._told: Counter[tuple[str, str]] = Counter()
        """(member, event) -> reports that were let in."""
        self._newest: dict[str, float] = {}
        """Member -> time of its newest report, by this process's clock."""
        self._now = self._first = self._clock()

    def now(self) -> float:
        """Seconds since 1970, never less than before."""
        self._now = max(self._now, self._clock())
        return self._now

    def check(self, report: Report, last_round: int) -> str | None:
        """Say why a report is refused; None if it is let in. `last_round`: the newest that any member may train."""
        found = complaint(report, last_round, self._bounds)
        if found is not None:
            return found
        if report.HasField("refusal") and report.refusal.kind not in frozenset(Kind):
            return f"`refusal.kind`: got `{report.refusal.kind[:40]}`, expected one of: {', '.join(Kind)}"
        event = report.WhichOneof("event") or ""
        return self._count(report.member, event, last_round)

    def check_verified(self, member: str, last_round: int) -> str | None:
        """Say why a hash that a member's confirmation completes is not reported; None if it is."""
        return self._count(member, "round_verified", last_round)

    def _count(self, sender: str, event: str, last_round: int) -> str | None:
        most = self._most(sender, event, last_round)
        if self._told[sender, event] >= most:
            return f"`{event}`: got more than {most} reports up to round {last_round}"
        self._told[sender, event] += 1
        return None

    def _most(self, member: str, event: str, last_round: int) -> int:
        """How many reports of one kind a member may have sent by now."""
        rounds, seconds = TRIES * (last_round + ROUNDS_BEFORE), self._clock() - self._first
        match event:
            case "inner_step":
                return rounds * self._bounds.steps
            case "link_use":
                return max(1, self._directions[member]) * (rounds + math.ceil(_LINK_REPORTS_A_SECOND * seconds))
            case "refusal":
                return _REFUSALS_AT_ONCE + math.ceil(_REFUSALS_A_SECOND * seconds)
        return rounds

    def take(self, report: Report) -> bool:
        """Date a report that was let in; False if nothing is left of it that anybody could use.

        Its time becomes this process's: of its arrival, less its age when it was sent. A member cannot date a report
        before its own report before.
        """
        now = self.now()
        age = report.sent - report.time if report.HasField("sent") else 0.0
        made = now - age if 0 < age < math.inf else now
        if report.HasField("refusal"):
            refusal = report.refusal
            refusal.sender, refusal.reason = (text[:REFUSAL_CHARACTERS] for text in (refusal.sender, refusal.reason))
        report.time = self._newest[report.member] = max(made, self._newest.get(report.member, self._first))
        return drop_unknown(report)
