"""State of slots, replicas and contributions from membership events: vacant, late, excluded.

Pure: every time comes from a report. Without faults there is nothing to show.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hetero_pp.config.changed_keys import Changes
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.messages.messages_pb2 import MembershipEvent, MembershipEventKind, Report, RoundRecord
from hetero_pp.run.spec import RunSpec
from replica_groups.rounds.slot import with_name


class Outcome(StrEnum):
    """Outcome of a replica's contribution to a closed round."""

    INCLUDED = "included"
    LATE = "late"
    """Not complete when the round closed."""
    LOST = "lost"
    """A slot of the replica was vacant at some moment of the round."""
    REJECTED = "rejected"
    """Far too large, or as an audit decided."""
    ABSENT = "absent"
    """The replica had not joined, or took no part."""


@dataclass
class SlotState:
    """Slot of a member."""

    replica: str
    incarnation: int = 0
    """Incarnation: number of times the slot has been taken, over all starts of the run."""
    vacant: str | None = None
    """Reason why no member holds the slot; None if one does."""
    taken_again: int = 0
    """Number of times the slot was taken again, after another holder, since the run began or resumed."""
    changes: list[tuple[float, bool, str]] = field(default_factory=list)
    """(time, whether the slot is held from then on, reason if not), in order of time."""

    def at(self, time: float) -> str | None:
        """Return why the slot was vacant at a time; None if it was held."""
        index = bisect_right(self.changes, time, key=lambda change: change[0])
        return self.changes[index - 1][2] if index and not self.changes[index - 1][1] else None

    def between(self, start: float, end: float) -> str | None:
        """Return the last reason why the slot was vacant at some moment from `start` to `end`; None if it never was."""
        found = [cause for time, is_held, cause in self.changes if not is_held and start < time <= end]
        return found[-1] if found else self.at(start)


@dataclass
class RoundCounted:
    """Contributions of a closed round."""

    time: float
    counted: frozenset[str]
    late: frozenset[str]
    """Replicas that took part, but were excluded as late."""
    left_out: frozenset[str]
    """Replicas whose contributions were excluded as too large."""
    tokens: int


@dataclass
class Pause:
    """Pause of a round below quorum."""

    round: int
    start: float
    cause: str
    end: float | None = None
    """None while the pause lasts."""


class MembershipState:
    """Follows a run's membership events and closed rounds."""

    def __init__(self, spec: RunSpec) -> None:
        self.slots = {name: SlotState(member.replica.name) for name, member in spec.members.items()}
        self._spec = spec
        self.rounds: dict[int, RoundCounted] = {}
        self.suspended: Counter[str] = Counter()
        """Number of times that each replica returned to the start of a round."""
        self.restarts: Counter[str] = Counter()
        """Restarts by process, on the machine that supervises it."""
        self.given_up: dict[str, str] = {}
        self.healed: Counter[str] = Counter()
        """Recoveries by slot."""
        self.returned: defaultdict[str, list[int]] = defaultdict(list)
        """Rounds for which a replica was late, by replica."""
        self.unaudited: str | None = None
        """Why nobody audits the run any more; None if somebody does, or nobody has to."""
        self._out_by_audit: dict[tuple[int, str], str] = {}
        """(round, replica) -> why an audit excluded the replica's contribution."""
        self.pauses: list[Pause] = []
        self.has_begun = False
        """Whether a start of the run was reported. A resumed run has no earlier reports before that."""
        self._lost: set[str] = set()
        """Replicas that have lost a member, and have not been reported as suspended since."""

    # ---- writing ----

    def apply(self, report: Report) -> None:
        """Take in one report. Members that are not of this run are ignored."""
        match report.WhichOneof("event"):
            case "begun":
                self.has_begun = True
                if report.begun.changes:
                    self._spec = self._spec.with_changes(Changes.from_json(report.begun.changes))
            case "joined" if report.member in self.slots:
                self._joined(report.time, self.slots[report.member], report.joined.incarnation)
            case "round_closed":
                self._closed(report.time, report.round_closed)
            case "membership_event":
                self._happened(report.time, report.membership_event)

    def _joined(self, time: float, slot: SlotState, incarnation: int) -> None:
        insort(slot.changes, (time, True, ""))
        if incarnation >= slot.incarnation:  # a resumed run reports earlier starts later, with lower incarnations
            slot.taken_again += self.has_begun and incarnation > max(slot.incarnation, 1)
            slot.incarnation, slot.vacant = incarnation, None

    def _closed(self, time: float, record: RoundRecord) -> None:
        counted = frozenset(one.replica for one in record.contributions)
        tokens = sum(one.tokens for one in record.contributions)
        late, left_out = frozenset(record.late), frozenset(record.left_out)
        self.rounds[record.round] = RoundCounted(time, counted, late, left_out, tokens)

    def _happened(self, time: float, told: MembershipEvent) -> None:
        match told.what:
            case MembershipEventKind.INCARNATION_OVER | MembershipEventKind.SILENT:
                self._over(time, told)
            case MembershipEventKind.SUSPENDED:
                self.suspended[told.replica] += told.replica in self._lost
                self._lost.discard(told.replica)
            case MembershipEventKind.LATE:
                self.returned[told.replica].append(told.round)
            case MembershipEventKind.PAUSED:
                self.pauses.append(Pause(told.round, time, told.cause))
            case MembershipEventKind.WENT_ON if self.pauses:
                self.pauses[-1].end = time
            case MembershipEventKind.LEFT_OUT if told.cause:
                self._out_by_audit[told.round, told.replica] = told.cause
            case MembershipEventKind.UNAUDITED | MembershipEventKind.AUDITED:
                self.unaudited = told.cause if told.what == MembershipEventKind.UNAUDITED else None
            case MembershipEventKind.HEALED:
                self.healed[told.slot] += 1
            case MembershipEventKind.RESTARTED:
                self.restarts[told.slot] += 1
            case MembershipEventKind.GIVEN_UP:
                self.given_up[told.slot] = told.cause

    def _over(self, time: float, told: MembershipEvent) -> None:
        slot = self.slots.get(told.slot)
        if slot is None:
            return
        cause = with_name(told.slot, told.cause)
        insort(slot.changes, (time, False, cause))
        if told.incarnation >= slot.incarnation:
            slot.vacant = cause
        self._lost.add(told.replica)

    # ---- reading ----

    def awaited(self, round_: int) -> list[str]:
        """Return the replicas that a round should include. Optional replicas are not missed."""
        return self._spec.awaited_in(round_)

    def of_round(self, round_: int) -> Sequence[ReplicaSettings]:
        """Return the replicas that take part in a round if they are present."""
        return self._spec.replicas_in(round_)

    @property
    def vacant(self) -> dict[str, str]:
        """Reasons of vacant slots, by slot."""
        return {name: slot.vacant for name, slot in self.slots.items() if slot.vacant is not None}

    @property
    def pause(self) -> Pause | None:
        """The current pause; None if there is none."""
        return self.pauses[-1] if self.pauses and self.pauses[-1].end is None else None

    def not_counted(self, round_: int) -> dict[str, str]:
        """Return the excluded replicas of a closed round, each with the reason."""
        closed = self.rounds.get(round_)
        if closed is None or not closed.counted:
            return {}
        return {name: self._excluded(name, round_)[1] for name in self.awaited(round_) if name not in closed.counted}

    def outcomes(self, round_: int) -> dict[str, Outcome]:
        """Return what became of each replica's contribution to a closed round.

        An optional replica that sent none is left out.
        """
        closed = self.rounds[round_]
        sent = closed.counted | closed.late | closed.left_out
        names = [one.name for one in self.of_round(round_) if not one.optional or one.name in sent]
        return {name: self.outcome(name, round_) for name in {*names, *closed.counted}}

    def outcome(self, replica: str, round_: int) -> Outcome:
        """Return what became of a replica's contribution to a closed round."""
        return Outcome.INCLUDED if replica in self.rounds[round_].counted else self._excluded(replica, round_)[0]

    def _excluded(self, replica: str, round_: int) -> tuple[Outcome, str]:
        """Return why a closed round excludes a replica, as a kind and in words."""
        closed, before = self.rounds[round_], self.rounds.get(round_ - 1)
        if replica in closed.left_out:  # a fact of the record, even if a slot was vacant for a moment
            why = self._out_by_audit.get((round_, replica))
            return Outcome.REJECTED, f"{replica}: {why}" if why else f"{replica} sent a contribution that is too large"
        gone = self.gone(replica, 0.0 if before is None else before.time, closed.time)
        if gone is not None:
            return Outcome.LOST, gone
        if all(not slot.changes for slot in self.slots.values() if slot.replica == replica):
            return Outcome.ABSENT, f"{replica} has not joined yet"
        if replica in closed.late:
            return Outcome.LATE, f"{replica} was late"
        return Outcome.ABSENT, f"{replica} did not take part"

    def gone(self, replica: str, start: float, end: float) -> str | None:
        """Return why a slot of a replica was vacant at some moment between two times; None if none was."""
        causes = (slot.between(start, end) for slot in self.slots.values() if slot.replica == replica)
        return next((cause for cause in causes if cause is not None), None)

    @property
    def counted_tokens(self) -> int:
        """Tokens of all contributions that rounds include."""
        return sum(closed.tokens for closed in self.rounds.values())

    def summary(self) -> dict[str, Any]:
        missed = {round_: self.not_counted(round_) for round_ in sorted(self.rounds)}
        return {
            "not_counted": [
                {"round": round_, "replica": replica, "cause": cause}
                for round_, causes in missed.items()
                for replica, cause in causes.items()
            ],
            "late": dict(self.returned),
            "suspended": dict(self.suspended),
            "pauses": [
                {"round": one.round, "seconds": None if one.end is None else one.end - one.start, "cause": one.cause}
                for one in self.pauses
            ],
            "members": dict(self._members()),
        }

    def _members(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the members with events, and the exchange if it was restarted."""
        for name in [*self.slots, *(one for one in self.restarts if one not in self.slots)]:
            slot = self.slots.get(name)
            found = {
                "taken_again": 0 if slot is None else slot.taken_again,
                "restarts": self.restarts[name],
                "healed": self.healed[name],
            }
            vacant = self.given_up.get(name) or (None if slot is None else slot.vacant)
            if any(found.values()) or vacant is not None:
                yield name, found | {"incarnation": None if slot is None else slot.incarnation, "gone": vacant}
