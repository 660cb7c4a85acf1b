"""Checks reports of members before they are used: their numbers, how many there are, and their times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from hetero_pp.core.steady_clock import steady_clock
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds, complaint, drop_unknown
from hetero_pp.run.spec import Roster

TRIES = 8
"""Number of times that one round may be reported, because a replica that reforms trains its round again."""
ROUNDS_BEFORE = 8
"""Rounds added to those of the run, for reports before the first round and after the last."""
_LINK_REPORTS_A_SECOND = 4.0
"""Reports per second for one direction of one link. A member sends two while it trains."""
_ACTIVITIES_A_SECOND = 4.0
"""A member sends at most two."""
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 2.0, 100
"""A member reports 20 refusals at once and then one a second; each process that takes its slot may do so again."""

DEVICE_CHARACTERS = 80
"""Characters of the name of a device."""
REFUSAL_CHARACTERS = 200
"""Characters of each text of a reported refusal. Only refusals grow with time instead of with rounds."""


class MemberReports:
    """Reports of one run's members. Not thread-safe."""

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
        """(member, event) -> accepted reports."""
        self._newest: dict[str, float] = {}
        """Member -> time of its newest report, by this process's clock."""
        self._now = self._first = self._clock()

    def now(self) -> float:
        """Return the seconds since 1970, never less than before."""
        self._now = max(self._now, self._clock())
        return self._now

    def check(self, report: Report, last_round: int) -> str | None:
        """Return why a report is refused; None if it is accepted. `last_round`: newest round that may be trained."""
        found = complaint(report, last_round, self._bounds)
        if found is not None:
            return found
        if report.HasField("refusal") and report.refusal.kind not in frozenset(Kind):
            return f"`refusal.kind`: got `{report.refusal.kind[:40]}`, expected one of: {', '.join(Kind)}"
        event = report.WhichOneof("event") or ""
        return self._count(report.member, event, last_round)

    def check_verified(self, member: str, last_round: int) -> str | None:
        """Return why a hash that a member's confirmation completes is not reported; None if it is."""
        return self._count(member, "round_verified", last_round)

    def _count(self, sender: str, event: str, last_round: int) -> str | None:
        most = self._most(sender, event, last_round)
        if self._told[sender, event] >= most:
            return f"`{event}`: got more than {most} reports up to round {last_round}"
        self._told[sender, event] += 1
        return None

    def _most(self, member: str, event: str, last_round: int) -> int:
        """Return the number of reports of one kind that a member may have sent by now."""
        rounds, seconds = TRIES * (last_round + ROUNDS_BEFORE), self._clock() - self._first
        match event:
            case "inner_step":
                return rounds * self._bounds.steps
            case "link_use":
                return max(1, self._directions[member]) * (rounds + math.ceil(_LINK_REPORTS_A_SECOND * seconds))
            case "activity":
                return rounds + math.ceil(_ACTIVITIES_A_SECOND * seconds)
            case "refusal":
                return _REFUSALS_AT_ONCE + math.ceil(_REFUSALS_A_SECOND * seconds)
        return rounds

    def take(self, report: Report) -> bool:
        """Date an accepted report; return False if nothing useful is left of it.

        Its time becomes the exchange's time of its arrival, less its age when it was sent. A member cannot date a
        report before its previous one.
        """
        now = self.now()
        age = report.sent - report.time if report.HasField("sent") else 0.0
        made = now - age if 0 < age < math.inf else now
        if report.HasField("refusal"):
            refusal = report.refusal
            refusal.sender, refusal.reason = (text[:REFUSAL_CHARACTERS] for text in (refusal.sender, refusal.reason))
        if report.HasField("computes"):
            report.computes.device = report.computes.device[:DEVICE_CHARACTERS]
        report.time = self._newest[report.member] = max(made, self._newest.get(report.member, self._first))
        return drop_unknown(report)
