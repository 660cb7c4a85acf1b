"""State of a run: the one fold of its reports, which the terminal, `status`, the page, metrics and the summary read.

Pure: every time comes from a report or an argument. One thread calls `apply`; a reader in another one holds `lock`
meanwhile.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from hetero_pp.config.changes import Changes
from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, WAYS, Direction, Line, LinkSpec, Way
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.bounded import ROUNDS_GAP_MAX
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import LinkUse, MemberRound, MembershipEventKind, Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds, complaint
from replica_groups.exchange.tally import Tally
from replica_groups.rounds.state import with_name

_KINDS = frozenset(Kind)
_WORK = ("inner_step", "evaluation", "link_use", "member_round", "round_closed", "round_verified")
"""Events that only a training run reports."""
_BUSY = ("inner_step", "evaluation", "member_round")
"""Events that show that their member has joined, and trains again if it was suspended."""
_GONE = (MembershipEventKind.INCARNATION_OVER, MembershipEventKind.SILENT)
DIVERGED_NATS = 1.0
"""Nats above the loss of the untrained model that no honest run reaches, in an evaluation or as the mean of a round."""
MOST_STEPS_SHOWN = 1_000_000  # most inner steps of a round whose number of steps is not known beforehand
PARTS = ("compute", "wait", "outer", "blocked", "evaluation")
"""Parts of a member's round. `blocked` is waiting for the exchange, and `outer` is the rest of the outer round."""
NEIGHBOURS = ("previous", "next")  # parts of `wait`: for messages of the previous stage, and of the next one
STILL_TOLD = 8  # rounds after which a round is no longer reported on
RECENT_SECONDS = 5.0  # length of the window over which current rates are measured, in seconds


class MemberPresence(StrEnum):
    MISSING = "missing"  # it has not joined yet
    PRESENT = "present"
    VACANT = "vacant"  # it has left or died, and its slot is empty
    GIVEN_UP = "given_up"  # it failed too often to be restarted
    FINISHED = "finished"


class Outcome(StrEnum):
    """Outcome of a replica's contribution to a closed round."""

    INCLUDED = "included"
    LATE = "late"  # not complete when the round closed
    LOST = "lost"  # A slot of the replica was vacant at some moment of the round
    REJECTED = "rejected"  # far too large, or as an audit decided
    ABSENT = "absent"  # the replica had not joined, or took no part


class Exclusion(NamedTuple):
    """Why a closed round excludes a replica."""

    outcome: Outcome
    slot: str  # the vacant slot, or the replica's name
    cause: str  # in words, which begin with the slot


class ClosedRound(NamedTuple):
    time: float
    sizes: Mapping[str, int]  # bytes of each included contribution, by replica
    bytes: int  # their sum
    kept_values: int
    tokens: int  # tokens of the included contributions
    late: frozenset[str]  # replicas that took part, but were excluded as late
    rejected: frozenset[str]  # replicas whose contributions were excluded as too large, or by an audit
    tokens_until: int  # tokens of all replicas up to the end of the round


class Divergence(NamedTuple):
    """First loss of a replica that is far above that of the untrained model."""

    replica: str
    round: int
    loss: float
    untrained_loss: float  # loss of the untrained model: that of a guess, or of the initial weights if it is larger


@dataclass
class Pause:
    """Pause of a round below quorum."""

    round: int
    start: float
    cause: str
    end: float | None = None  # none while the pause lasts


class News(NamedTuple):
    """A report on a membership event, with what was known before it."""

    report: Report
    is_line: bool = True  # whether a terminal shows it. Others were told in an earlier line, or are no news there
    paused: float = 0.0  # seconds for which a round was paused that goes on


# ---- traffic ----


class RoundBytes(NamedTuple):
    """Bytes of one round; 0 if none were reported."""

    payload_bytes: int = 0
    wire_bytes: int = 0


class Traffic:
    """Bytes in one direction of a link, from the reports of its sender; or in one way of a line, over its links."""

    def __init__(self, bandwidth: float | None) -> None:
        self.bandwidth = bandwidth  # in bits per second; None is unlimited
        self.carried: list[Traffic] = []  # directions of links that pass a line; a direction has none
        self.unreported_bytes = 0  # bytes on the wire of which no report is known, only the sum
        # By round; round 0 is the traffic before the first step. A long run has too many rounds for an object of each.
        self._payload, self._wire, self._busy = array("Q"), array("Q"), array("d")
        self._recent: deque[tuple[float, int]] = deque()

    def apply(self, time: float, use: LinkUse, since: float) -> None:
        """Replace the count of a round, reported at `time`. The first count of all has grown since `since`."""
        if not self._recent:
            self._recent.append((since, 0))
        missing, at = use.round + 1 - len(self._wire), use.round
        for column in (self._payload, self._wire, self._busy):
            column.extend([0] * missing)
        self._payload[at], self._wire[at], self._busy[at] = use.payload_bytes, use.wire_bytes, use.busy_seconds
        self._recent.append((time, sum(self._wire)))
        while len(self._recent) > 2 and self._recent[1][0] <= time - RECENT_SECONDS:
            self._recent.popleft()

    def of_round(self, round_: int) -> RoundBytes:
        own = RoundBytes(self._payload[round_], self._wire[round_]) if round_ < len(self._wire) else RoundBytes()
        rounds = [own, *(direction.of_round(round_) for direction in self.carried)]
        return RoundBytes(sum(each.payload_bytes for each in rounds), sum(each.wire_bytes for each in rounds))

    @property
    def payload_bytes(self) -> int:
        return sum(self._payload) + sum(direction.payload_bytes for direction in self.carried)

    @property
    def wire_bytes(self) -> int:
        own = self.unreported_bytes + (self._recent[-1][1] if self._recent else 0)
        return own + sum(direction.wire_bytes for direction in self.carried)

    @property
    def busy_seconds(self) -> float:
        """Seconds since the first inner step for which a direction was busy, or that a line needs for its bytes."""
        if self.carried and self.bandwidth is not None:
            return 8 * (self.wire_bytes - self.of_round(0).wire_bytes) / self.bandwidth
        return sum(self._busy[1:])

    def busy_share(self, training_seconds: float) -> float | None:
        """Return the busy share of the time since the first inner step; None without a bandwidth limit."""
        if self.bandwidth is None:
            return None
        return min(1.0, self.busy_seconds / training_seconds) if training_seconds > 0 else 0.0

    def recent_bytes_per_second(self, now: float) -> float:
        """Return the bytes per second on the wire over about the last RECENT_SECONDS."""
        rate = sum(direction.recent_bytes_per_second(now) for direction in self.carried)
        if not self._recent or now <= self._recent[0][0]:
            return rate
        time, count = self._recent[0]
        for sample in self._recent:  # in order of time; mostly one step
            if sample[0] > now - RECENT_SECONDS:
                break
            time, count = sample
        return rate + (self._recent[-1][1] - count) / (now - time)


class LinkState(NamedTuple):
    """Traffic of both directions of one link."""

    name: str
    spec: LinkSpec
    ways: Mapping[Direction, Traffic]

    @property
    def wire_bytes(self) -> int:
        return sum(direction.wire_bytes for direction in self.ways.values())


class LineState(NamedTuple):
    """Traffic up and down one line."""

    name: str
    spec: Line
    ways: Mapping[Way, Traffic]


# ---- one replica ----


@dataclass
class Step:
    """One inner step of a replica, merged from the reports of its first and last stage."""

    loss: float | None = None
    tokens: int = 0
    told_at: float | None = None
    """Time of the report with the tokens. A step that is trained again has another time; a repeated report does not."""


@dataclass
class ReplicaState:
    """A replica, from the reports of its inner steps. Only the losses of old rounds are kept."""

    name: str
    kind: str
    inner_steps: int | None  # its inner steps of every round; None if they are not known beforehand
    share: float = 1.0  # its inner steps, as a share of those of the other replicas
    rounds: dict[int, dict[int, Step]] = field(default_factory=dict)
    """Steps of recent rounds, by round and step number from 0."""
    settled: dict[int, array[float]] = field(default_factory=dict)
    """Losses of the reported steps of earlier rounds, four bytes each."""
    tokens: int = 0  # tokens of all steps, each step counted once
    trained: Counter[int] = field(default_factory=Counter)
    """Tokens of all steps trained for a round, counted as often as they were trained."""
    steps_done: int = 0  # inner steps over the whole run
    loss: float | None = None  # training loss of the latest step
    validation_loss: dict[int, float] = field(default_factory=dict)
    """Validation loss of the synced model by round, in the replica forward."""
    sha256: dict[int, str] = field(default_factory=dict)
    latest: tuple[int, int] = (0, 0)  # round and number of the latest step with a loss
    _settled_steps: int = 0
    _settled_means: dict[int, float | None] = field(default_factory=dict)  # exact, unlike the losses in four bytes

    def apply(self, time: float, report: pb.InnerStep) -> None:
        """Merge one report of an inner step. A repeated report replaces itself."""
        if report.round in self.settled:
            return
        step = self.rounds.setdefault(report.round, {}).setdefault(report.step, Step())
        if report.tokens:
            self.tokens += report.tokens - step.tokens
            if time != step.told_at:
                self.trained[report.round] += report.tokens
            step.tokens, step.told_at = report.tokens, time
        if report.HasField("loss"):
            step.loss = report.loss
            if (report.round, report.step) >= self.latest:
                self.latest = report.round, report.step
                self.steps_done, self.loss = self.index(report.round, report.step) + 1, report.loss

    def keep(self, round_: int, steps: int, tokens: int) -> None:
        """Keep this many steps, of `tokens` each, of a round that closed.

        Further reported steps belong to an attempt that was discarded. Steps without a report were trained too: the
        report may still arrive, or it was lost with its process, which then resumed from a state after these steps.
        """
        if round_ in self.settled:
            return
        told = self.rounds.setdefault(round_, {})
        for number in range(steps):
            step = told.setdefault(number, Step())
            if not step.tokens:
                step.tokens = tokens
                self.tokens += tokens
        for number in [number for number in told if number >= steps]:
            self.tokens -= told.pop(number).tokens
        if self.latest[0] == round_ and self.latest[1] >= steps and told:
            self.latest = round_, steps - 1
            self.steps_done = self.index(*self.latest) + 1

    def settle(self, closed: int) -> None:
        """Keep only the losses of rounds long before the round that closed, because they get no further report."""
        for round_ in [round_ for round_ in self.rounds if round_ <= closed - STILL_TOLD]:
            self._settled_means[round_] = self.round_loss(round_)
            self._settled_steps += max(self.rounds[round_], default=-1) + 1
            self.settled[round_] = array("f", self.losses(round_))
            del self.rounds[round_]

    def index(self, round_: int, step: int) -> int:
        """Return the number of a step over the whole run, from 0, for a step of a recent round."""
        if self.inner_steps is not None:
            return (round_ - 1) * self.inner_steps + step
        before = sum(max(steps, default=-1) + 1 for other, steps in self.rounds.items() if other < round_)
        return self._settled_steps + before + step

    def tokens_until(self, round_: int) -> int:
        """Return the tokens of all steps up to a round that has just ended, without those of a later round."""
        later = (steps for other, steps in self.rounds.items() if other > round_)
        return self.tokens - sum(step.tokens for steps in later for step in steps.values())

    def losses(self, round_: int) -> Sequence[float]:
        """Return the training losses of the reported steps of a round; nan where unknown."""
        if round_ in self.settled:
            return self.settled[round_]
        told = sorted(self.rounds.get(round_, {}).items())
        return [math.nan if step.loss is None else step.loss for _, step in told]

    def steps(self, round_: int) -> int:
        """Return the number of reported steps of a round."""
        return len(self.settled[round_] if round_ in self.settled else self.rounds.get(round_, ()))

    def round_loss(self, round_: int) -> float | None:
        """Return the mean training loss over the inner steps of a round."""
        if round_ in self.settled:
            return self._settled_means[round_]
        known = [step.loss for step in self.rounds.get(round_, {}).values() if step.loss is not None]
        return fmean(known) if known else None

    def training_losses(self) -> Iterator[tuple[float, float]]:
        """Yield (position at which a step ends, training loss) in the order of steps.

        The position is in inner steps of replicas that take all, or in rounds if their steps vary.
        """
        for round_ in range(1, self.last_round + 1):
            losses = self.losses(round_)
            for number, loss in enumerate(losses, 1):
                if not math.isnan(loss):
                    before = (round_ - 1) * (self.inner_steps or 1)
                    own = before + (number / len(losses) if self.inner_steps is None else number)
                    yield own / self.share, loss

    @property
    def last_round(self) -> int:
        """Last round with a reported step; 0 if there is none."""
        return max([*self.rounds, *self.settled], default=0)

    @property
    def last_validation_loss(self) -> float | None:
        """Last known validation loss."""
        return self.validation_loss[max(self.validation_loss)] if self.validation_loss else None


# ---- one member ----


@dataclass
class MemberState:
    """A slot and its holder, from its own reports and those about it. Times are seconds since the epoch."""

    replica: str
    has_finished: bool = False
    incarnation: int = 0  # number of times the slot has been taken, over all starts of the run
    vacant: str | None = None  # reason why no member holds the slot; None if one does
    end_told: int = -1  # newest incarnation whose end was reported, by the exchange or by the supervisor of its process
    taken_again: int = 0
    """Number of times the slot was taken again, after another holder, since the run began or resumed."""
    changes: list[tuple[float, bool, str]] = field(default_factory=list)
    """(time, whether the slot is held from then on, reason if not), in order of time."""
    is_suspended: bool = False
    began_at: tuple[int, int] | None = None  # (round, step) within which this holder of the slot began
    since: float | None = None  # time of the last event that changed whether it takes part
    heard: float | None = None
    doing: pb.Doing = pb.DOING_UNSPECIFIED  # its last reported activity
    round: int | None = None
    device: str = ""  # name of the device on which it computes
    device_bytes: int = 0  # most memory that it had in use on its accelerator
    last_round: int = 0  # last finished round; 0 if there is none
    rounds: int = 0  # number of finished rounds
    seconds: Counter[str] = field(default_factory=Counter)  # of all finished rounds, by PARTS and NEIGHBOURS
    _last: Mapping[str, float] = field(default_factory=dict)  # of the last finished round

    def spend(self, told: MemberRound, earlier: Mapping[str, float] | None) -> Mapping[str, float]:
        """Take in the seconds of a finished round in place of those that were reported `earlier`; return them."""
        waits = {part: f"wait_{part}_seconds" for part in NEIGHBOURS}
        seconds = split(told) | {part: getattr(told, name) for part, name in waits.items() if told.HasField(name)}
        self.rounds += earlier is None
        self.seconds.update(seconds)
        self.seconds.subtract(earlier or {})
        if told.round >= self.last_round:
            self.last_round, self._last = told.round, seconds
        if told.HasField("device_bytes"):
            self.device_bytes = told.device_bytes
        return seconds

    def share(self, part: str) -> float | None:
        """Return the share of one of PARTS or NEIGHBOURS in the last finished round; None if it is not known."""
        whole = sum(self._last.get(each, 0.0) for each in PARTS)
        return self._last[part] / whole if part in self._last and whole > 0 else None


def sender(link: LinkSpec, way: str) -> str:
    """Return the member, or the exchange, that sends in a direction of a link."""
    return link.source if way == "forward" else link.target


def awaiting(link: LinkSpec, way: Direction) -> tuple[str, str]:
    """Return the receiver of a direction of a link, and the part of its rounds in which it waits for messages of it.

    The part contains the time in which the sender computes: a receiver cannot tell a late sender from a late link.
    """
    receiver = link.target if way == "forward" else link.source
    return receiver, "blocked" if sender(link, way) == EXCHANGE else "previous" if way == "forward" else "next"


def split(told: MemberRound) -> dict[str, float]:
    """Return the seconds of a round by part."""
    blocked = min(told.blocked_seconds, told.outer_seconds)
    parts = (told.compute_seconds, told.wait_seconds, told.outer_seconds - blocked, blocked, told.evaluation_seconds)
    return dict(zip(PARTS, parts, strict=True))


# ---- the run ----


class RunState:
    """Everything that is shown of a run."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec  # the run as it was known when it started
        self.changed = spec  # the run with all changes that were reported
        self.lock = threading.RLock()
        self.rounds_planned = spec.latest.rounds
        self.inner_steps = spec.config.inner.steps
        self.replicas: dict[str, ReplicaState] = {}
        """Required replicas, past or present, and optional replicas from their first appearance in a report."""
        self._optional = {replica.name: replica for replica in spec.replicas_ever if replica.optional}
        self._add_required()
        self.members = {name: MemberState(member.replica.name) for name, member in spec.members.items()}
        self.lines = {
            name: LineState(name, line, {way: Traffic(line.bandwidth_of(way)) for way in WAYS})
            for name, line in spec.lines.items()
        }
        self._links: dict[str, LinkState] = {}
        for name, link in spec.links.items():
            ways = {direction: Traffic(link.shape(direction).bandwidth) for direction in DIRECTIONS}
            self._links[name] = LinkState(name, link, ways)
            for direction, state in ways.items():
                for way, line in zip(WAYS, link.lines(direction), strict=True):
                    if line is not None:
                        self.lines[line.name].ways[way].carried.append(state)
        self.joined: set[str] = set()
        self.links: Mapping[str, LinkState] = {}  # links by name, for members that are required or have joined
        self._note_links()
        self.joined_at: float | None = None  # time of the report with which all required members had joined
        self.has_opened = False
        """Whether a start of the run was reported. A resumed run has no earlier reports before that."""
        self.closed: dict[int, ClosedRound] = {}
        self.rounds = 0
        """Number of the last closed round. Rounds close in order, so it is known even if a report was missed."""
        self.closed_earlier = 0  # number of the last round that an earlier start of the run closed; 0 for a new run
        self.news: News | None = None  # membership event of the last report; None if it had none
        self.tally = Tally({name: member.replica.name for name, member in spec.members.items()}, self.awaited)
        """Counters of the whole run, also where reports of its beginning are missing."""
        self.started: float | None = None
        self.first_step: float | None = None
        self.latest: float | None = None
        self.sittings = 0  # pauses between two starts of the run: times without pauses depend on them
        self._breaks: list[tuple[float, float]] = []
        self._last_work: float | None = None
        self._goes_on_after: int | None = None
        """Round after which the run resumed, until a replica trains again; else None."""
        self.waiting: pb.Waiting | None = None  # what the exchange waits for, as last reported; None: progress
        self.waiting_told = 0.0  # time of that report
        self.reading: pb.Reading | None = None  # progress of a long reading that members wait for
        self.pauses: list[Pause] = []
        self.failed: str | None = None
        self.over: pb.Over | None = None  # report that every round is closed; None before
        self.restarts: Counter[str] = Counter()  # restarts by process, on the machine that supervises it
        self.given_up: dict[str, str] = {}
        self.healed: Counter[str] = Counter()  # recoveries by slot
        self.suspended: Counter[str] = Counter()  # number of times that each replica lost a stage within a round
        self.late: defaultdict[str, list[int]] = defaultdict(list)  # rounds for which a replica was late, by replica
        self.barred: set[str] = set()  # replicas that are excluded from rounds since their last included contribution
        self.scores: dict[str, pb.Score] = {}  # newest scores, by replica; empty without audits
        self.checks = 0  # number of recomputations of a replica's round
        self.failed_checks: list[pb.Judgement] = []  # those that found something else than a replica had contributed
        self.unaudited: str | None = None  # why nobody audits the run any more; None if somebody does, or nobody has to
        self._out_by_audit: dict[tuple[int, str], str] = {}
        """(round, replica) -> why an audit excluded the replica's contribution."""
        self.diverged: dict[str, Divergence] = {}  # replicas that have diverged
        self.refusals: Counter[str] = Counter()  # refused messages by kind
        self.refusals_told: Counter[str] = Counter()  # by the process that reported them: a member may lie
        self._times: dict[int, dict[str, dict[str, Mapping[str, float]]]] = {}
        """Round -> replica -> member -> seconds of each part; in old rounds only the mean, of member ""."""

    # ---- writing ----

    def apply(self, report: Report) -> bool:
        """Take in one report. Reports on unknown replicas, links or rounds, and values out of range, are ignored.

        Return False for values out of range.
        """
        newest, event = max(self.rounds_planned, self.rounds + 2), report.WhichOneof("event")
        if not math.isfinite(report.time) or complaint(report, newest, ReportBounds()):
            return False
        if event in ("round_closed", "round_verified", "membership_event"):
            # A round of the exchange far ahead would take memory and time without bound.
            told, most = getattr(report, event), self.inner_steps or MOST_STEPS_SHOWN
            if told.round > max(self.rounds, self.rounds_planned) + ROUNDS_GAP_MAX:
                return False
            if event == "membership_event" and told.what not in MembershipEventKind.values():
                return False
            if event == "round_closed" and (told.round < 1 or any(one.steps > most for one in told.contributions)):
                return False
        with self.lock:
            self.news = self._news_of(report)  # it depends on what was known before
            self._fold(report, report.time, event)
        return True

    def _fold(self, report: Report, time: float, event: str | None) -> None:
        self.started = time if self.started is None else min(self.started, time)
        self.latest = time if self.latest is None else max(self.latest, time)
        self._follow_sittings(event, report)
        self.tally.apply(report)
        member = self.members.get(report.member)
        if member is not None:
            member.heard = time
        if event in _BUSY:
            self._came(report.member)
            if member is not None:
                member.is_suspended, member.round = False, getattr(report, event).round
        match event:
            # Start, end, and what the exchange waits for.
            case "begun":  # reading is over, and changed keys are known
                self.reading, self.has_opened = None, True
                if report.begun.changes:
                    self.changed = self.spec.with_changes(Changes.from_json(report.begun.changes))
                    self.rounds_planned = self.changed.latest.rounds
                    self._add_required()
            case "reading":
                self.reading = report.reading if report.reading.share < 1 else None
            case "waiting":
                self.waiting = report.waiting if report.waiting.missing or report.waiting.store_error else None
                self.waiting_told = time
            case "so_far":
                self._so_far(time, report.so_far)
            case "over":
                self.over = report.over
            case "failure" if self.failed is None and not report.failure.consequence:
                cause = report.failure.cause
                self.failed = cause if report.member == EXCHANGE else f"{report.member}: {cause}"
            case "refusal":  # an unknown kind, which a member may make up, counts as unexpected
                kind = report.refusal.kind if report.refusal.kind in _KINDS else Kind.UNEXPECTED
                self.refusals[kind] += report.refusal.count or 1
                self.refusals_told[report.member] += report.refusal.count or 1

            # Who is there.
            case "joined":
                had_all = self.has_all_needed
                self._came(report.member)
                if self.has_all_needed and not had_all:
                    self.joined_at = time
                if member is not None:
                    insort(member.changes, (time, True, ""))
                    member.since, member.doing, member.round = time, pb.DOING_UNSPECIFIED, None
                    member.is_suspended, incarnation = False, report.joined.incarnation
                    if incarnation >= member.incarnation:  # a resumed run reports earlier starts later
                        member.taken_again += self.has_opened and incarnation > max(member.incarnation, 1)
                        member.incarnation, member.vacant = incarnation, None
            case "membership_event":
                self._happened(time, report.membership_event)
            case "computes" if member is not None:
                member.device, member.device_bytes = report.computes.device, 0
            case "activity" if member is not None:
                member.doing = report.activity.doing
            case "finished" if member is not None:
                member.has_finished, member.since = True, time

            # Training.
            case "inner_step":
                step = report.inner_step
                replica, fits = self._replica(step.replica), self.inner_steps is None or step.step < self.inner_steps
                if replica is not None and 1 <= step.round <= self.rounds_planned and fits:
                    replica.apply(time, step)
                    self.first_step = time if self.first_step is None else min(self.first_step, time)
            case "evaluation":
                replica = self._replica(report.evaluation.replica)
                if replica is not None:
                    replica.validation_loss[report.evaluation.round] = report.evaluation.loss
                    self._compare(replica, report.evaluation.round, report.evaluation.loss)
            case "link_use":
                link = self._links.get(report.link_use.link)
                # A round far ahead would take memory without bound.
                if link is not None and report.link_use.round <= self.rounds + ROUNDS_GAP_MAX:
                    for way, direction in link.ways.items():
                        if way == report.link_use.direction:
                            direction.apply(time, report.link_use, time if self.first_step is None else self.first_step)
            case "member_round" if member is not None:
                of_round = self._times.setdefault(report.member_round.round, {}).setdefault(member.replica, {})
                if "" not in of_round:
                    of_round[report.member] = member.spend(report.member_round, of_round.get(report.member))
            case "round_closed":
                self._closed(time, report.round_closed)
            case "round_verified":
                replica = self._replica(report.round_verified.replica)
                if replica is not None:
                    replica.sha256[report.round_verified.round] = report.round_verified.parameters_sha256.hex()

            # Audits.
            case "scores":
                self.scores |= {score.replica: score for score in report.scores.scores if self._replica(score.replica)}
            case "judged" if report.judged.HasField("recomputed"):
                self.checks += 1
                self.failed_checks += [] if report.judged.recomputed.is_equal else [report.judged]

    def _news_of(self, report: Report) -> News | None:
        match report.WhichOneof("event"):
            case "begun" if report.begun.last_round:
                return News(report, is_line=False)
            case "failure" if not report.failure.consequence:
                return News(report, is_line=False)
            case "joined" if report.member in self.members:
                return News(report, is_line=self.has_opened)
            case "state_saving":
                return News(report)
            case "waiting" if report.waiting.awaited == pb.STORING and not report.waiting.store_error:
                return News(report)
            case "membership_event":
                told, member = report.membership_event, self.members.get(report.membership_event.slot)
                if told.what in _GONE:  # the supervisor may have said so already
                    return News(report, is_line=member is None or told.incarnation > member.end_told)
                if told.what == MembershipEventKind.WENT_ON:
                    paused = 0.0 if self.pause is None else report.time - self.pause.start
                    return News(report, is_line=self.pause is not None, paused=paused)
                return News(report)
        return None

    def _follow_sittings(self, event: str | None, report: Report) -> None:
        # A break lasts from the last report of one start of the run until the next start trains again: once a replica
        # has evaluated the parameters that it resumes from, or if it never stopped.
        if event == "begun" and report.begun.last_round > 0:
            if self._goes_on_after is None:
                self._breaks.append((report.time if self._last_work is None else self._last_work, report.time))
                self.sittings += 1
            self._goes_on_after = report.begun.last_round
        if self._goes_on_after is not None:
            start, end = self._breaks[-1]
            self._breaks[-1] = start, max(end, report.time)
            has_evaluated = event == "evaluation" and report.evaluation.round >= self._goes_on_after
            if has_evaluated or (event == "inner_step" and report.inner_step.round > self._goes_on_after):
                self._goes_on_after = None
        if event in _WORK:
            self._last_work = report.time if self._last_work is None else max(self._last_work, report.time)

    def _so_far(self, time: float, told: pb.SoFar) -> None:
        """Take in the counters of a run of which reports are missing. Its breaks are in none of its times."""
        breaks = self._broken(0.0, time)
        self.started = time - told.seconds - breaks
        self.first_step = time - told.training_seconds - breaks if told.training_seconds else None
        self.rounds = max(self.rounds, told.last_round)
        self._plan(told.last_round, sum(credit.tokens for credit in told.credits))
        for credit in told.credits:
            replica, own = self._replica(credit.replica), self.tally.credits.get(credit.replica)
            if replica is not None:
                replica.tokens += credit.tokens - (0 if own is None else own.tokens)
        for use in told.carried:
            link = self._links.get(use.link)
            for way, direction in link.ways.items() if link is not None else ():
                if way == use.direction:
                    direction.unreported_bytes += use.wire_bytes - direction.wire_bytes
        self.refusals[Kind.UNEXPECTED] += told.refusals - self.refusals.total()
        self.tally.count_on(told, time)

    def fail(self, cause: str) -> None:
        """Record why the run ended early. The launcher knows the cause better than any member."""
        with self.lock:
            self.failed = cause

    def _came(self, *members: str) -> None:
        """Note that these members have joined. Other reports show it if a `joined` report was missed."""
        new = (self.spec.members.keys() & members) - self.joined
        if new:
            self.joined |= new
            self._note_links()
            for name, replica in self._optional.items():
                if name not in self.replicas and self.joined.issuperset(replica.members):
                    self._add(replica)

    def _note_links(self) -> None:
        came = {EXCHANGE, *self.spec.needed, *self.joined}
        self.links = {name: link for name, link in self._links.items() if came >= {link.spec.source, link.spec.target}}

    def _replica(self, name: str) -> ReplicaState | None:
        """Return the replica that a report names; None if the run has none of that name.

        A replica that trains has all its members, so the `joined` reports of an optional one need not have arrived.
        """
        if name in self._optional and name not in self.replicas:
            self._came(*self._optional[name].members)
        return self.replicas.get(name)

    def _add_required(self) -> None:
        for replica in self.changed.replicas_ever:
            if not replica.optional and replica.name not in self.replicas:
                self._add(replica)

    def _add(self, replica: ReplicaSettings) -> None:
        own = self.changed.steps_of(replica.name)
        share = (own or 1) / (self.inner_steps or 1)
        self.replicas[replica.name] = ReplicaState(replica.name, replica.kind, own, share)

    def _compare(self, replica: ReplicaState, round_: int, loss: float | None) -> None:
        """Compare a loss with that of the untrained model, and keep the first that is far above it."""
        untrained = max(math.log(self.spec.shape.vocabulary), replica.validation_loss.get(0, 0.0))
        if loss is not None and loss > untrained + DIVERGED_NATS and replica.name not in self.diverged:
            self.diverged[replica.name] = Divergence(replica.name, round_, loss, untrained)

    def _closed(self, time: float, record: pb.RoundRecord) -> None:
        rows = {replica.name: replica.batch_size for replica in self.spec.replicas_ever}
        for entry in record.contributions:
            replica = self._replica(entry.replica)
            if replica is not None and entry.steps > 0:
                row_tokens = self.spec.config.data.sequence_length
                replica.keep(record.round, entry.steps, rows.get(replica.name, 0) * row_tokens)
        # Rounds long before this one get no further report: only their sums and means are kept.
        for replica in self.replicas.values():
            self._compare(replica, record.round, replica.round_loss(record.round))
            replica.settle(record.round)
        for round_, replicas in self._times.items():
            if round_ <= record.round - STILL_TOLD:
                for name, members in replicas.items():
                    replicas[name] = {"": _means(members)}
        self.rounds = max(self.rounds, record.round)
        self._plan(record.round, record.tokens)
        sizes = {entry.replica: sum(blob.size for blob in entry.blobs) for entry in record.contributions}
        self.closed[record.round] = ClosedRound(
            time=time,
            sizes=sizes,
            bytes=sum(sizes.values()),
            kept_values=sum(blob.kept_values for entry in record.contributions for blob in entry.blobs),
            tokens=sum(entry.tokens for entry in record.contributions),
            late=frozenset(record.late),
            rejected=frozenset(record.left_out),
            tokens_until=sum(replica.tokens_until(record.round) for replica in self.replicas.values()),
        )
        self.barred -= sizes.keys()

    def _plan(self, round_: int, tokens: int) -> None:
        """Estimate the number of rounds, if the run ends after a number of tokens and had `tokens` after a round."""
        outer = self.changed.latest.outer
        if outer.tokens is not None and tokens:
            self.rounds_planned = outer.planned(round_, tokens)

    def _happened(self, time: float, told: pb.MembershipEvent) -> None:
        member = self.members.get(told.slot)
        if member is not None:
            member.since = time
        match told.what:
            case MembershipEventKind.INCARNATION_OVER | MembershipEventKind.SILENT if member is not None:
                cause = with_name(told.slot, told.cause)
                insort(member.changes, (time, False, cause))
                if told.incarnation >= member.incarnation:
                    member.vacant = cause
                member.end_told = max(member.end_told, told.incarnation)
            case MembershipEventKind.SUSPENDED:
                self.suspended[told.replica] += 1
                for one in self.members.values():
                    if one.replica == told.replica and one.vacant is None:
                        one.is_suspended, one.since = True, time
            case MembershipEventKind.RESUMED:
                if member is not None:
                    member.began_at = told.round, told.step
                for one in self.members.values():
                    one.is_suspended = one.is_suspended and one.replica != told.replica
            case MembershipEventKind.LATE:
                self.late[told.replica].append(told.round)
            case MembershipEventKind.EXCLUDED:
                self.barred.add(told.replica)
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
            case MembershipEventKind.RESTARTED | MembershipEventKind.GIVEN_UP:
                if told.what == MembershipEventKind.RESTARTED:
                    self.restarts[told.slot] += 1
                else:
                    self.given_up[told.slot] = told.cause
                if member is not None:
                    member.end_told = max(member.end_told, member.incarnation)

    # ---- reading: members and rounds ----

    @property
    def is_over(self) -> bool:
        """Whether every round is closed, and all remaining members have finished.

        Members that were given up are not waited for. Neither are members of a replica that took no part in the last
        round or has since lost a member.
        """
        came = self.spec.needed.keys() | (self.joined & self.spec.members.keys())
        left = {name for name in came - self.given_up.keys() if not self.members[name].has_finished}
        left -= self.vacant.keys()
        if self.over is not None:
            awaited = set(self.over.finishing) - {self.members[name].replica for name in self.vacant}
            left = {name for name in left if self.members[name].replica in awaited}
        return self.rounds >= self.rounds_planned and not left

    @property
    def has_closed_all_rounds(self) -> bool:
        """Whether every round is closed. Members may still apply the last one."""
        return self.over is not None or self.rounds >= self.rounds_planned

    @property
    def contribution_bytes(self) -> int:
        """Bytes of all contributions that rounds include."""
        return sum(credit.bytes for credit in self.tally.credits.values())

    def presence(self, member: str) -> MemberPresence:
        """Return whether a member takes part now, and if not, why."""
        if member in self.given_up:
            return MemberPresence.GIVEN_UP
        if self.members[member].vacant is not None:
            return MemberPresence.VACANT
        if self.members[member].has_finished:
            return MemberPresence.FINISHED
        return MemberPresence.PRESENT if member in self.joined else MemberPresence.MISSING

    @property
    def has_begun(self) -> bool:
        """Whether training has begun. A record may overtake the reports of the round's inner steps."""
        return self.first_step is not None or self.rounds > 0

    @property
    def has_all_needed(self) -> bool:
        """Whether all members that the run requires have joined."""
        return self.joined >= self.spec.needed.keys()

    @property
    def vacant(self) -> dict[str, str]:
        """Reasons of vacant slots, by slot."""
        return {name: member.vacant for name, member in self.members.items() if member.vacant is not None}

    def gone(self, replica: str, start: float, end: float) -> tuple[str, str] | None:
        """Return a slot of a replica that was vacant at some moment between two times, with the reason; else None."""
        for name, member in self.members.items():
            if member.replica == replica:
                at_start = bisect_right(member.changes, start, key=lambda change: change[0])
                within = member.changes[max(0, at_start - 1) :]
                if causes := [cause for time, is_held, cause in within if not is_held and time <= end]:
                    return name, causes[-1]
        return None

    @property
    def pause(self) -> Pause | None:
        """The current pause below quorum; None if there is none."""
        return self.pauses[-1] if self.pauses and self.pauses[-1].end is None else None

    def awaited(self, round_: int) -> list[str]:
        """Return the replicas that a round should include. Optional replicas are not missed."""
        return self.changed.awaited_in(round_)

    def of_round(self, round_: int) -> Mapping[str, ReplicaState]:
        """Return the replicas of a round: the required ones, and all optional ones that have ever joined."""
        names = [replica.name for replica in self.changed.replicas_in(round_)]
        return {name: self.replicas[name] for name in names if name in self.replicas}

    def not_counted(self, round_: int) -> dict[str, Exclusion]:
        """Return the excluded replicas of a closed round, each with the reason."""
        closed = self.closed.get(round_)
        if closed is None or not closed.sizes:
            return {}
        return {name: self.exclusion(name, round_) for name in self.awaited(round_) if name not in closed.sizes}

    def outcomes(self, round_: int) -> dict[str, Outcome]:
        """Return what became of each replica's contribution to a closed round.

        An optional replica that sent none is left out.
        """
        closed = self.closed[round_]
        sent = closed.sizes.keys() | closed.late | closed.rejected
        replicas = self.changed.replicas_in(round_)
        names = {replica.name for replica in replicas if not replica.optional or replica.name in sent}
        excluded = {name: self.exclusion(name, round_).outcome for name in names - closed.sizes.keys()}
        return dict.fromkeys(closed.sizes, Outcome.INCLUDED) | excluded

    def exclusion(self, replica: str, round_: int) -> Exclusion:
        """Return why a closed round does not include a replica."""
        closed, before = self.closed[round_], self.closed.get(round_ - 1)
        if replica in closed.rejected:  # a fact of the record, even if a slot was vacant for a moment
            why = self._out_by_audit.get((round_, replica))
            cause = f"{replica}: {why}" if why else f"{replica} sent a contribution that is too large"
            return Exclusion(Outcome.REJECTED, replica, cause)
        gone = self.gone(replica, 0.0 if before is None else before.time, closed.time)
        if gone is not None:
            return Exclusion(Outcome.LOST, *gone)
        if all(not member.changes for member in self.members.values() if member.replica == replica):
            return Exclusion(Outcome.ABSENT, replica, f"{replica} has not joined yet")
        if replica in closed.late:
            return Exclusion(Outcome.LATE, replica, f"{replica} was late")
        return Exclusion(Outcome.ABSENT, replica, f"{replica} did not take part")

    def times(self, round_: int, replica: str) -> dict[str, float | None]:
        """Return the mean over a replica's members of the seconds of each part; None if none was reported."""
        members = self._times.get(round_, {}).get(replica)
        return dict(_means(members)) if members else dict.fromkeys(PARTS)

    # ---- reading: progress and time ----

    def progress_of_open_round(self, now: float) -> tuple[float, float]:
        """Return (done, total) of the open round's inner loop, in steps of the slowest replica or in seconds."""
        if self.inner_steps is None:
            whole = self.spec.config.inner.seconds or 0.0
            before = self.closed[self.rounds].time if self.rounds in self.closed else self.first_step
            return min(self._seconds(before, now), whole), whole
        # Of the slowest required replica; if all are optional, of the fastest one.
        every = {name: replica.steps_done / replica.share for name, replica in self.replicas.items()}
        required = [every[name] for name in self.awaited(self.rounds + 1) if name in every]
        steps = round(min(required) if required else max(every.values(), default=0))
        return max(0, min(steps - self.rounds * self.inner_steps, self.inner_steps)), self.inner_steps

    def elapsed(self, now: float | None = None) -> float:
        """Return the seconds since the first report, until `now` or else the last report, without breaks."""
        return self._seconds(self.started, self.latest if now is None else now)

    def training_seconds(self, now: float | None = None) -> float:
        """Return the seconds since the first inner step, until `now` or else the last report, without breaks."""
        return self._seconds(self.first_step, self.latest if now is None else now)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, from the rounds so far; None until the first has closed."""
        if not self.closed or self.first_step is None:
            return None
        last = max(self.closed)
        a_round = self._seconds(self.first_step, self.closed[last].time) / last
        return max(0.0, a_round * (self.rounds_planned - last) - self._seconds(self.closed[last].time, now))

    def round_seconds(self, round_: int) -> float:
        """Return the seconds of a round without breaks: from the previous close or the first inner step to its own."""
        before = self.closed[round_ - 1].time if round_ - 1 in self.closed else self.first_step
        return self._seconds(before, self.closed[round_].time)

    def _seconds(self, start: float | None, end: float | None) -> float:
        """Return the seconds between two times, without breaks; 0 if either is None."""
        if start is None or end is None:
            return 0.0
        return max(0.0, end - start - self._broken(start, end))

    def _broken(self, start: float, end: float) -> float:
        """Return the seconds of breaks from `start` to `end`. A break without an end lasts until `end`."""
        breaks = list(self._breaks)
        if self._goes_on_after is not None:
            breaks[-1] = breaks[-1][0], math.inf
        return sum((max(0.0, min(end, ended) - max(start, began)) for began, ended in breaks), 0.0)

    # ---- reading: results ----

    def tokens_per_second(self, replica: ReplicaState | None = None, now: float | None = None) -> float:
        """Return the tokens per second of one replica or all, over the time since the first inner step."""
        tokens = sum(each.tokens for each in ([replica] if replica else self.replicas.values()))
        seconds = self.training_seconds(now)
        return tokens / seconds if seconds > 0 else 0.0

    def mean_validation_loss(self, round_: int) -> float | None:
        """Return the mean validation loss after a round, each replica's in its replica forward.

        None until all required replicas have reported theirs.
        """
        known = {
            name: replica.validation_loss[round_]
            for name, replica in self.of_round(round_).items()
            if round_ in replica.validation_loss
        }
        return fmean(known.values()) if known and known.keys() >= set(self.awaited(round_)) else None

    def mean_validation_losses(self) -> dict[int, float]:
        """Return the known mean validation losses by round, in the order of rounds; round 0 is before training."""
        told = sorted(set[int]().union(*(replica.validation_loss for replica in self.replicas.values())))
        means = {round_: self.mean_validation_loss(round_) for round_ in told}
        return {round_: mean for round_, mean in means.items() if mean is not None}

    def awaited_losses(self, round_: int) -> list[str]:
        """Return the required replicas that have not reported a validation loss after a round."""
        awaited = [self.replicas[name] for name in self.awaited(round_) if name in self.replicas]
        return [replica.name for replica in awaited if round_ not in replica.validation_loss]

    def missing_losses(self, round_: int) -> dict[str, tuple[str, str]]:
        """Return why required replicas did not report a validation loss after a round, where a vacant slot explains it.

        The reason is the slot and its cause.
        """
        closed = self.closed.get(round_)
        untold = self.awaited_losses(round_)
        if closed is None or not untold:
            return {}
        after = self.closed.get(round_ + 1)
        end = (self.latest or closed.time) if after is None else after.time
        overlap = self.spec.config.outer.overlap  # with overlap, a round is carried during this many further rounds
        since = self.closed.get(round_ - overlap, closed).time
        return {name: gone for name in untold if (gone := self.gone(name, since, end)) is not None}

    def goodput(self) -> tuple[float, float | None]:
        """Return tokens of included contributions per second, and their share of all tokens trained for closed rounds.

        The share is an upper estimate: tokens that a killed process trained and did not report are missing from the
        total.
        """
        counted, seconds = sum(closed.tokens for closed in self.closed.values()), self.training_seconds()
        trained = sum(replica.trained[round_] for replica in self.replicas.values() for round_ in self.closed)
        return counted / seconds if seconds > 0 else 0.0, min(1.0, counted / trained) if trained else None

    def final_sha256(self) -> dict[str, str]:
        """Return the SHA-256 of each replica's parameters after the last round that all present ones reported."""
        gone = {self.members[slot].replica for slot in self.vacant}
        gone |= {name for name, replica in self.replicas.items() if name in self._optional and not replica.sha256}
        gone |= self.replicas.keys() - {replica.name for replica in self.spec.config.replicas}
        there = {name: replica for name, replica in self.replicas.items() if name not in gone} or self.replicas
        common = set.intersection(*(set(replica.sha256) for replica in there.values())) if there else set()
        return {name: replica.sha256[max(common)] for name, replica in there.items()} if common else {}


def _means(members: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    return {part: fmean(seconds[part] for seconds in members.values()) for part in PARTS}
