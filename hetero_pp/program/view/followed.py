"""Follows a run for the page: its state, and what its reports tell beyond that. Old rounds are kept as means."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hetero_pp.messages.messages_pb2 import EXCLUDED, SUSPENDED, Doing, MemberRound, MembershipEvent, Report
from hetero_pp.program.report.replica_state import STILL_TOLD
from hetero_pp.program.report.spent import PARTS, split
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.marks import MARKED, Marks
from hetero_pp.program.view.topology import SIDES

MOST_POINTS = 1000
"""Points of a curve, after thinning."""
MOST_MARKS = 5000
"""Marks that are kept: the newest ones."""
_MOST_PROBLEMS = 20
_BUSY = ("inner_step", "evaluation", "member_round")
"""Events that show that a suspended member trains again."""


@dataclass
class MemberDetails:
    """One member, from its own reports and those about it. Times are seconds since the epoch."""

    device: str | None = None
    round: int | None = None
    heard: float | None = None
    doing: Doing = Doing.DOING_UNSPECIFIED
    """Its last reported activity."""
    since: float | None = None
    """Time of the last event that changed whether it takes part."""
    is_suspended: bool = False


class Curve:
    """Loss over the steps of one replica: at most twice MOST_POINTS points [time, step, loss]."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self._every = 1
        self._unsent = 0
        """Number of the first step that `take_new` has not returned."""

    def add(self, time: float, step: int, loss: float) -> None:
        """Add a point. A step that is trained again replaces its point and those after it."""
        while self.points and self.points[-1][1] >= step:
            self.points.pop()
            self._unsent = min(self._unsent, step)
        if step % self._every == 0:
            self.points.append([time, step, loss])
        if len(self.points) >= 2 * MOST_POINTS:
            self._every *= 2
            self.points = [point for point in self.points if point[1] % self._every == 0]

    def take_new(self) -> list[list[float]]:
        """Return the points since the last call."""
        found = self.points[bisect_left([point[1] for point in self.points], self._unsent) :]
        if found:
            self._unsent = int(found[-1][1]) + 1
        return found


@dataclass
class RoundTimes:
    """Seconds of each round by replica: of each member while a round is reported on, then their means."""

    recent: defaultdict[int, defaultdict[str, dict[str, list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    settled: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, replica: str, member: str, told: MemberRound) -> None:
        """Take in a member's times of a round. A repeated report replaces the earlier one."""
        if told.round not in self.settled:
            self.recent[told.round][replica][member] = list(split(told).values())

    def settle(self, closed: int) -> None:
        """Keep only the means of rounds long before the one that closed."""
        for round_ in [one for one in self.recent if one <= closed - STILL_TOLD]:
            self.settled[round_] = {replica: _means(found) for replica, found in self.recent.pop(round_).items()}

    def of(self, round_: int, replica: str) -> dict[str, float | None]:
        """Return the mean over a replica's members of the seconds of each part; None if none was reported."""
        if round_ in self.settled:
            means = self.settled[round_].get(replica)
        else:
            members = self.recent[round_].get(replica) if round_ in self.recent else None
            means = _means(members) if members else None
        return dict.fromkeys(PARTS) if means is None else dict(zip(PARTS, means, strict=True))


def _means(members: dict[str, list[float]]) -> list[float]:
    return [fmean(times) for times in zip(*members.values(), strict=True)]


class FollowedReports:
    """Follows a run: its state, and what reports tell beyond it.

    Apply each report to `state` first, then give it to `take`. Readers hold `state.lock`.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.own: tuple[str, ...] = ()
        """Members on this host, if it has joined a run of another host."""
        self.text = ""
        """First digits of the digest of the run's text; empty if unknown."""
        self.is_live = True
        self.outcome: str | None = None
        """How the run ended: `over`, or `failed: ` and the cause; None while it is not known to have ended."""
        self.version = 0
        """Changes with everything that the page shows."""
        self.members = {name: MemberDetails() for name in state.spec.members}
        self.curves: dict[str, Curve] = {}
        self.times = RoundTimes()
        self.contributed: dict[int, dict[str, int]] = {}
        """Bytes of each included contribution, by round and replica."""
        self.tokens: dict[int, int] = {}
        """Tokens of all replicas up to the end of each round."""
        self.limits = {
            name: {side: link.bottleneck(way) for side, way in SIDES.items()} for name, link in state.spec.links.items()
        }
        """Bits per second of each side of each link, with its lines; None is unlimited."""
        self.barred: set[str] = set()
        self.stale = ""
        """Why the page may be behind the run; empty if it is not known to be."""
        self.has_told_the_end = False
        """Whether the exchange has reported that every round is closed."""
        self._marks: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self._marked = 0
        """Number of marks so far."""
        self.problems: list[str] = []
        self._replicas = {name: member.replica.name for name, member in state.spec.members.items()}
        self._told = Marks(state.spec)
        self._heard_at = time.monotonic()
        self._changed_rounds: set[int] = set()

    # ---- writing ----

    def take(self, report: Report) -> bool:
        """Take in a report that the state has accepted. Return whether it has a mark."""
        self.version += 1
        self._heard_at = time.monotonic()
        event, found = report.WhichOneof("event"), list[dict[str, Any]]()
        if event in MARKED:
            found = [{"time": report.time} | mark for mark in self._told.of(report)]
            self._marks.extend({"id": self._marked + index} | mark for index, mark in enumerate(found))
            self._marked += len(found)
        if report.member in self.members:
            self._of_member(self.members[report.member], report)
        match event:
            case "inner_step":
                self._stepped(report)
            case "evaluation":
                self._changed_rounds.add(report.evaluation.round)
            case "round_closed":
                self._closed(report)
            case "membership_event":
                self._happened(report.time, report.membership_event)
            case "over":
                self.has_told_the_end = True
        return bool(found)

    def end(self, outcome: str | None, is_live: bool) -> None:
        """Note how the run ended, or that it runs."""
        if (outcome, is_live) != (self.outcome, self.is_live):
            self.outcome, self.is_live = outcome, is_live
            self.version += 1

    def note_stale(self, why: str) -> None:
        """Note why the page may be behind the run."""
        if why != self.stale:
            self.stale = why
            self.version += 1

    def complain(self, problem: str) -> None:
        """Note something that is missing or damaged. Only the first ones are kept."""
        if len(self.problems) < _MOST_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)
            self.version += 1

    def complain_of_missing_rounds(self) -> None:
        """Note that curves and events of early rounds are missing, if they are."""
        if missing := min(self.state.closed, default=1) - 1:
            told = f"curves and events of rounds 1 to {missing} are missing: the exchange has its last 10,000 reports"
            self.complain(f"{told}; counters are of the whole run")

    def _of_member(self, member: MemberDetails, report: Report) -> None:
        event = report.WhichOneof("event")
        member.heard = report.time
        if event == "joined":
            self.members[report.member] = MemberDetails(heard=report.time, since=report.time)
        elif event == "activity":
            member.doing = report.activity.doing
        elif event == "computes":
            member.device = report.computes.device
        elif event == "finished":
            member.since = report.time
        elif event in _BUSY:
            member.is_suspended = False
            member.round = getattr(report, event).round
        if event == "member_round":
            self.times.add(self._replicas[report.member], report.member, report.member_round)
            self._changed_rounds.add(report.member_round.round)

    def _stepped(self, report: Report) -> None:
        step = report.inner_step
        replica = self.state.replicas.get(step.replica)
        if replica is not None and step.HasField("loss") and step.round not in replica.settled:
            index = replica.index(step.round, step.step)
            self.curves.setdefault(step.replica, Curve()).add(self.since_start(report.time), index, step.loss)

    def _closed(self, report: Report) -> None:
        record = report.round_closed
        self.times.settle(record.round)
        self.tokens[record.round] = sum(one.tokens_until(record.round) for one in self.state.replicas.values())
        self.contributed[record.round] = {
            one.replica: sum(blob.size for blob in one.blobs) for one in record.contributions
        }
        self.barred -= self.contributed[record.round].keys()
        self._changed_rounds.add(record.round)

    def _happened(self, when: float, told: MembershipEvent) -> None:
        if told.what == EXCLUDED:
            self.barred.add(told.replica)
        if told.what == SUSPENDED and told.slot in self.members:
            member = self.members[told.slot]
            member.is_suspended, member.since = True, when
        if told.slot in self.members and told.what != SUSPENDED:
            self.members[told.slot].since = when

    # ---- reading ----

    def since_start(self, when: float) -> float:
        """Return a time as seconds since the run's first report, without pauses between two sittings."""
        return round(self.state.elapsed(when), 3)

    def round_seconds(self, round_: int) -> float | None:
        """Return the seconds of a closed round; None if it is not known when the round before closed."""
        return self.state.round_seconds(round_) if round_ == 1 or round_ - 1 in self.state.closed else None

    def now(self) -> float:
        """Return the present time by the clock of the reports: it stands still once the run has ended."""
        latest = self.state.latest or 0.0
        return latest + (time.monotonic() - self._heard_at) if self.is_live and self.state.latest else latest

    def marks(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the marks from a number on, in order of time: a run that goes on reports its earlier start later."""
        found = sorted((mark for mark in self._marks if mark["id"] >= since), key=lambda mark: mark["time"])
        return [mark | {"time": self.since_start(mark["time"])} for mark in found]
