"""Reports: checks those of members, acts on failures and on ends, and passes all on to the watchers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hetero_pp.config.links import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds
from hetero_pp.outer.exchange_service import Caller
from replica_groups.exchange.member_reports import MemberReports
from replica_groups.exchange.presence import Presence
from replica_groups.exchange.run_state import RunState
from replica_groups.exchange.standing import reports_of
from replica_groups.exchange.watchers import Watchers
from replica_groups.protocol import events as e


class Reports:
    """Reports of one run. Thread-safe."""

    def __init__(self, state: RunState, presence: Presence, bounds: ReportBounds) -> None:
        self.watchers = Watchers()
        self.steps_told = 0
        """Number of inner steps that members have reported."""
        self.devices: dict[str, str] = {}
        """Member -> name of the device on which it computes, as its present process has reported."""
        self.changes: dict[str, tuple[float, str]] = {}
        """Slot -> time (monotonic clock) at which it was last taken, lost or suspended, and why it was lost."""
        self._state, self._presence = state, presence
        self._reports, self._reporting = MemberReports(state.roster, bounds), threading.Lock()
        self._failed: dict[str, str] = {}
        """Member -> replica, of members that reported their failure and whose slot nobody has taken since."""

    def report(self, request: pb.ReportRequest, caller: Caller) -> pb.ReportReply:
        """Pass on what is in range, then raise Refused if something was not.

        A failure that is the consequence of another ends nothing, because its member joins again. Nor does the failure
        of a process whose slot another process has taken: it cannot join again after its incarnation.
        """
        complaints = []
        for report in request.reports:
            why = None if report.member == EXCHANGE else self._complaint(report)
            if why is None:
                self._pass_on(report, caller.term)
            else:
                complaints.append(self._state.refused(report.member, why, Kind.MALFORMED))
        if complaints:
            raise complaints[0]
        return pb.ReportReply()

    def _complaint(self, report: pb.Report) -> str | None:
        """Return why a member's report is refused; None if it is not."""
        state = self._state
        with state.changed:
            newest = min(state.coordinator.last_round + 1 + state.coordinator.rules.overlap, state.rounds)
            if state.goes_on and not state.has_begun:
                newest = state.rounds  # members train already, and the log is being read
        with self._reporting:
            return self._reports.check(report, newest)

    def check_verified(self, member: str) -> str | None:
        """Return why a hash that a member's confirmation completes is not reported; None if it is."""
        with self._reporting:
            return self._reports.check_verified(member, self._state.coordinator.last_round)

    def _pass_on(self, report: pb.Report, term: int | None) -> None:
        member, state = report.member, self._state
        if report.HasField("failure") and self._is_over(member, term):
            report.failure.consequence = True
        if report.HasField("failure") and not report.failure.consequence and not self._ends_run(member):
            self._presence.end(member, report.failure.cause, term)
            return
        self._tell([report])
        self._presence.heard(member)
        if report.HasField("computes"):
            self.devices[member] = report.computes.device
        if report.HasField("inner_step"):
            with state.changed:
                self.steps_told += 1
        if report.HasField("finished") and member in state.roster.members:
            state.decisions.tell(e.Left(member, state.term(Caller(member, term))))
        if report.HasField("failure") and not report.failure.consequence:
            cause = report.failure.cause
            state.decisions.fail(cause if member == EXCHANGE else f"{member}: {cause}")

    def _is_over(self, member: str, term: int | None) -> bool:
        """Return whether a named incarnation of a member is over."""
        state = self._state
        return term is not None and member in state.roster.members and not state.coordinator.holds(member, term)

    def _ends_run(self, member: str) -> bool:
        """Return whether a failure leaves too few replicas, so that the run would wait forever.

        Otherwise the slot becomes vacant. Before the run begins, the failure of any required member ends it.
        """
        state = self._state
        replica = state.roster.members.get(member)
        if replica is None:
            return True
        rules = state.coordinator.rules
        with state.changed:
            if not state.has_begun:
                return replica not in rules.optional
            self._failed[member] = replica
            return not state.coordinator.is_over and rules.is_lost_without(self._failed.values())

    def joined(self, member: str, address: str, term: int) -> None:
        """Report that a process has taken a slot, and forget the failure of the one before."""
        with self._state.changed:
            self._failed.pop(member, None)
            self.devices.pop(member, None)
            self.changes[member] = time.monotonic(), ""
        self._tell([pb.Report(member=member, joined=pb.Joined(address=address, term=term))])

    def tell_own(self, report: pb.Report) -> None:
        """Pass on a report of the exchange itself."""
        report.member = EXCHANGE
        self._pass_on(report, None)

    def tell_waiting(self, waiting: pb.Waiting) -> None:
        """Report the members that the exchange waits for."""
        self.tell_own(pb.Report(waiting=waiting))

    def tell_reading(self, what: str, share: float) -> None:
        """Report the progress of a long operation for which members wait."""
        self.tell_own(pb.Report(reading=pb.Reading(what=what, share=share)))

    def tell_effect(self, effect: e.Effect) -> None:
        """Report a decision of the rules."""
        if isinstance(effect, e.Closed):
            closed = self._state.decisions.kept(effect.record.round)
            self._tell([pb.Report(member=EXCHANGE, round_closed=closed)])
        else:
            found = list(reports_of(effect, self._state.roster.members))
            for one in found:
                if one.standing.what in (pb.SILENT, pb.TERM_OVER, pb.SUSPENDED):
                    self.changes[one.standing.place] = time.monotonic(), one.standing.cause
            self._tell(found)

    def _tell(self, reports: Sequence[pb.Report]) -> None:
        """Date reports by one clock that is never set back, and pass them on in that order."""
        with self._reporting:
            kept = []
            for report in reports:
                if report.member == EXCHANGE:
                    report.time = self._reports.now()
                    kept.append(report)
                elif self._reports.take(report):
                    kept.append(report)
            self.watchers.tell(kept)
