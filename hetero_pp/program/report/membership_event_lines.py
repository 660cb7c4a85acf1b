"""Membership events (`membership_event_lines`) of a run as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_pp.core.units import format_number, format_seconds
from hetero_pp.messages.messages_pb2 import STORING, MembershipEvent, MembershipEventKind, Report, StateSaving
from hetero_pp.run.spec import RunSpec
from replica_groups.rounds.slot import with_name


class MembershipEventLines:
    """Turns the reports of one start of a run into lines, in order, without repeating a cause."""

    def __init__(self, spec: RunSpec) -> None:
        self._members = spec.members
        self._returned, self._keeps_local = spec.config.outer.returned, spec.config.outer.keep_local
        self._has_begun = False
        self._told_of: dict[str, str] = {}
        """Last reported cause by slot, for slots without a member."""
        self._lost: dict[str, str] = {}
        """Vacant slot by replica, until the effect on the replica is reported."""
        self._paused_at: float | None = None

    def lines(self, report: Report) -> Iterator[str]:
        """Yield the lines of a report; usually none."""
        match report.WhichOneof("event"):
            case "begun":
                self._has_begun = True
            case "joined" if self._has_begun and report.member in self._members:
                self._told_of.pop(report.member, None)
                yield member_joined(report)
            case "waiting" if report.waiting.awaited == STORING and not report.waiting.store_error:
                seconds = format_seconds(max(1, round(report.waiting.seconds)))
                yield f"resuming after {seconds}: reads and writes succeed again"
            case "state_saving":
                yield self._state_saving(report.member, report.state_saving)
            case "membership_event":
                yield from self._membership_event(report.time, report.membership_event)

    def _state_saving(self, member: str, told: StateSaving) -> str:
        if not told.failure:
            return f"{member} saved its state after round {told.round}; saving works again"
        lost = "it continues training, and saves its next state on schedule"
        return f"{member} could not save its state after round {told.round}: {told.failure}; {lost}"

    def _membership_event(self, time: float, told: MembershipEvent) -> Iterator[str]:
        match told.what:
            case MembershipEventKind.RESTARTED | MembershipEventKind.GIVEN_UP:
                self._told_of[told.slot] = told.cause
                yield told.cause
            case MembershipEventKind.INJECTED:
                yield f"injected fault: {told.cause}"
            case MembershipEventKind.INCARNATION_OVER | MembershipEventKind.SILENT:
                yield from self._over(told, with_name(told.slot, told.cause))
            case MembershipEventKind.SUSPENDED if told.replica in self._lost:
                slot = self._lost.pop(told.replica)
                yield f"{told.replica} returns to the start of its round and waits for {slot}"
            case MembershipEventKind.LATE:
                became = "it continues from its own parameters" if self._keeps_local else self._what_becomes_of_it()
                yield f"{told.replica} was too late for round {told.round}: {became}"
            case MembershipEventKind.LEFT_OUT:
                became = self._what_becomes_of_it()
                why = f"is excluded ({told.cause})" if told.cause else "is far larger than expected and is excluded"
                yield f"{told.replica}: its contribution to round {told.round} {why}: {became}"
            case MembershipEventKind.SCALED:
                larger = f"is larger than expected and is scaled by {told.cause}"
                yield f"{told.replica}: its contribution to round {told.round} {larger}"
            case MembershipEventKind.PAUSED:
                self._paused_at = time
                yield f"round {told.round} is paused: {told.cause}; it continues when more replicas join"
            case MembershipEventKind.WENT_ON if self._paused_at is not None:
                yield f"round {told.round} continues after {format_seconds(time - self._paused_at)}"
            case MembershipEventKind.HEALED:
                yield f"after round {told.round}, {told.slot} {told.cause}; it recovers from the run log"
            case MembershipEventKind.EXCLUDED | MembershipEventKind.AUDITED:
                yield told.cause
            case MembershipEventKind.UNAUDITED:
                yield f"unaudited: {told.cause}"
            case MembershipEventKind.NOT_AWAITED:
                included = "its contributions are included if they arrive in time"
                yield f"{told.replica} {told.cause} do not wait for it; {included}"

    def _over(self, told: MembershipEvent, cause: str) -> Iterator[str]:
        self._lost[told.replica] = told.slot
        if not self._told_of.get(told.slot, "").startswith(cause):
            self._told_of[told.slot] = cause
            yield f"{cause}; its slot is vacant"

    def _what_becomes_of_it(self) -> str:
        if self._returned == 0:
            return "its contribution is discarded"
        share = "" if self._returned == 1 else f"{format_number(100 * self._returned)} % of "
        return f"{share}its contribution is restored to its error feedback"


def member_joined(report: Report) -> str:
    """Return the line of a member that has joined, with its incarnation if it is not the slot's first."""
    incarnation = report.joined.incarnation
    return f"{report.member} has joined{f' again (incarnation {incarnation})' if incarnation > 1 else ''}"
