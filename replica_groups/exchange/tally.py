"""Counters of a run so far: rounds, tokens and bytes of each replica, and time. Also the newest report on what holds.

The exchange remembers only its newest reports, so it tells a watcher this state in place of the others. A launcher has
all reports, and counts them by the same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from hetero_pp.messages.messages_pb2 import Credit, MembershipEventKind, Report, RoundRecord, SoFar

_ROUNDS_TOLD = 8  # newest rounds of a direction of a link whose count may still be replaced

_GONE = (MembershipEventKind.INCARNATION_OVER, MembershipEventKind.SILENT)
_ENDED_BY: Mapping[MembershipEventKind, MembershipEventKind] = {
    MembershipEventKind.WENT_ON: MembershipEventKind.PAUSED,
    MembershipEventKind.AUDITED: MembershipEventKind.UNAUDITED,
}
_KEPT = (*_GONE, *_ENDED_BY.values(), MembershipEventKind.EXCLUDED, MembershipEventKind.SUSPENDED)
"""Membership events that hold until another one ends them."""


class Tally:
    """Counts of one run, from its reports in their order. Not thread-safe."""

    def __init__(self, members: Mapping[str, str], awaited: Callable[[int], Collection[str]]) -> None:
        """`members`: slot -> replica. `awaited`: returns the replicas that a round should include."""
        self.awaited = awaited
        self.credits: dict[str, Credit] = {}
        self.last_round = self.refusals = 0
        self._members = members
        self._slots: dict[str, set[str]] = {}  # slots by replica
        for slot, replica in members.items():
            self._slots.setdefault(replica, set()).add(slot)
        self._held: set[str] = set()
        self._began_with: set[str] = set()
        """Replicas that were complete as the last round closed, or had been and still have a member."""
        self._lacked: set[str] = set()  # replicas with a vacant slot at some moment of the open round
        self._started: float | None = None
        self._first_step: float | None = None
        self._carried: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        """(link, direction) -> round -> bytes on the wire; round -1: those of all earlier rounds."""
        self._count = 0
        self._newest: dict[tuple[object, str], tuple[int, Report]] = {}
        """Subject of a report -> number and content of the newest report on it, in the order in which they came."""

    def apply(self, report: Report) -> None:
        event, told = report.WhichOneof("event"), report.membership_event
        self._started = report.time if self._started is None else min(self._started, report.time)
        match event:
            case "joined" if report.member in self._members:
                self._held.add(report.member)
                self._newest.pop(("gone", report.member), None)
            case "membership_event" if told.what in _GONE and told.slot in self._members:
                self._held.discard(told.slot)
                self._lacked.add(self._members[told.slot])
            case "inner_step":
                self._first_step = self._first_step or report.time
            case "link_use":
                rounds = self._carried[report.link_use.link, report.link_use.direction]
                rounds[report.link_use.round] = report.link_use.wire_bytes
                if len(rounds) > _ROUNDS_TOLD:
                    rounds[-1] = rounds.pop(-1, 0) + rounds.pop(min(rounds.keys() - {-1}))
            case "refusal":
                self.refusals += report.refusal.count or 1
            case "round_closed":
                self._closed(report.round_closed)
        self._keep(event, report)
        self._count += 1

    def _closed(self, record: RoundRecord) -> None:
        """Count a round. A replica that nobody had to wait for misses it if it lost a member during the round."""
        counted = {entry.replica for entry in record.contributions}
        for entry in record.contributions:
            credit = self._credit(entry.replica)
            credit.included, credit.tokens = credit.included + 1, credit.tokens + entry.tokens
            credit.bytes += sum(blob.size for blob in entry.blobs)
            for ended in (MembershipEventKind.EXCLUDED, MembershipEventKind.SUSPENDED):
                self._newest.pop((ended, entry.replica), None)
        expected = {*self.awaited(record.round), *record.late, *record.left_out, *(self._began_with & self._lacked)}
        for replica in expected - counted if counted else ():
            self._credit(replica).missed += 1
        whole = {replica for replica, slots in self._slots.items() if slots <= self._held}
        there = {self._members[slot] for slot in self._held}
        self._began_with = whole | (self._began_with & there)
        self._lacked = self._slots.keys() - whole
        self.last_round = max(self.last_round, record.round)

    def _credit(self, replica: str) -> Credit:
        return self.credits.setdefault(replica, Credit(replica=replica))

    @property
    def participation(self) -> float | None:
        """Share of the contributions that rounds should have included, and did; None before the first round."""
        included = sum(credit.included for credit in self.credits.values())
        missed = sum(credit.missed for credit in self.credits.values())
        return included / (included + missed) if included else None

    def _keep(self, event: str | None, report: Report) -> None:
        """Remember a report that says what holds now, and forget the one that it replaces."""
        told, ends = report.membership_event, False
        about: tuple[object, str] = (event, "")
        match event:
            case "joined" | "computes" | "activity" | "finished":
                about = event, report.member
            case "begun" | "over" | "scores":
                pass
            case "failure":
                ends = report.failure.consequence
            case "waiting":
                ends = not (report.waiting.missing or report.waiting.store_error)
            case "reading":
                ends = report.reading.share >= 1
            case "evaluation":
                about = event, report.evaluation.replica
            case "inner_step" if report.inner_step.HasField("loss"):
                about = event, report.inner_step.replica
            case "membership_event" if told.what in _GONE:
                about = "gone", told.slot
            case "membership_event" if told.what in _KEPT:
                about = told.what, told.replica
            case "membership_event" if told.what in _ENDED_BY:
                about, ends = (_ENDED_BY[told.what], told.replica), True
            case _:
                return
        self._newest.pop(about, None)
        if not ends:
            self._newest[about] = self._count, report

    def told(self, now: float) -> SoFar:
        """Return the counters at a time."""
        found = SoFar(last_round=self.last_round, refusals=self.refusals, credits=self.credits.values())
        found.seconds = max(0.0, now - (self._started or now))
        found.training_seconds = max(0.0, now - (self._first_step or now))
        for (link, direction), rounds in self._carried.items():
            found.carried.add(link=link, direction=direction, wire_bytes=sum(rounds.values()))
        return found

    def last_change(self, slot: str) -> Report | None:
        """Return the report with which a slot was last taken, lost or suspended; None if there is none."""
        if (gone := self._newest.get(("gone", slot))) is not None:
            return gone[1]
        changes = ("joined", slot), (MembershipEventKind.SUSPENDED, self._members.get(slot, ""))
        found = [self._newest[about] for about in changes if about in self._newest]
        return max(found, key=lambda one: one[0], default=(0, None))[1]

    def newest(self, but_last: int = 0) -> list[Report]:
        """Return the newest report on each thing that holds now, without those among the last `but_last` reports."""
        return [report for number, report in self._newest.values() if number < self._count - but_last]

    def count_on(self, told: SoFar, now: float) -> None:
        """Continue from the counters of a time."""
        self.credits.clear()
        for one in told.credits:
            self._credit(one.replica).CopyFrom(one)
        self.last_round, self.refusals = told.last_round, told.refusals
        self._started = now - told.seconds
        self._first_step = now - told.training_seconds if told.training_seconds else None
        self._carried.clear()
        for use in told.carried:
            self._carried[use.link, use.direction] = {-1: use.wire_bytes}
