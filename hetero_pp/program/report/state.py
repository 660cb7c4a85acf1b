"""State of a run, derived from its members' reports alone.

Pure: every time comes from a report or an argument. The launcher's thread calls `apply`; a reader in another thread
holds `lock` meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from hetero_pp.config.changed_keys import Changes
from hetero_pp.config.links import DIRECTIONS, EXCHANGE
from hetero_pp.core.bounded import ROUNDS_GAP_MAX
from hetero_pp.messages.messages_pb2 import (
    Begun,
    Evaluation,
    Failure,
    InnerStep,
    Judgement,
    LinkUse,
    Over,
    Reading,
    Refusal,
    Report,
    RoundRecord,
    RoundVerified,
    Score,
    SoFar,
    Waiting,
)
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds, complaint
from hetero_pp.program.report.carried import DirectionState, LinkState, lines_of
from hetero_pp.program.report.membership_state import MembershipState
from hetero_pp.program.report.pauses import Pauses
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.spent import Spent
from hetero_pp.run.spec import RunSpec
from replica_groups.exchange.tally import Tally

_KINDS = frozenset(Kind)
_ANY = ReportBounds()
DIVERGED_NATS = 1.0
"""Nats above the loss of the untrained model that no honest run reaches, in an evaluation or as the mean of a round."""
MOST_STEPS_SHOWN = 1_000_000
"""Most inner steps of a round whose number of steps is not known beforehand."""


class MemberPresence(StrEnum):
    MISSING = "missing"
    """It has not joined yet."""
    PRESENT = "present"
    VACANT = "vacant"
    """It has left or died, and its slot is empty."""
    GIVEN_UP = "given_up"
    """It failed too often to be restarted."""
    FINISHED = "finished"


@dataclass(frozen=True)
class ClosedRound:
    """A closed round: its time, and the sizes of its included contributions."""

    round: int
    time: float
    bytes: int
    kept_values: int


@dataclass(frozen=True)
class Divergence:
    """First loss of a replica that is far above that of the untrained model."""

    replica: str
    round: int
    loss: float
    untrained_loss: float
    """Loss of the untrained model: that of a guess, or of the initial weights if it is larger."""


class RunState:
    """Everything that the display, the summary and the pictures show."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        self.rounds_planned = spec.latest.outer.rounds
        self.changes = spec.changes
        self.inner_steps = spec.config.inner.steps
        self._optional = {replica.name: replica for replica in spec.replicas_ever if replica.optional}
        self.replicas = {
            replica.name: ReplicaState(replica.name, replica.kind, self.inner_steps)
            for replica in spec.replicas_ever
            if not replica.optional
        }
        """Required replicas, past or present, and optional replicas from their first appearance in a report."""
        self._links = {
            name: LinkState(link, {way: DirectionState(link.shape(way).bandwidth) for way in DIRECTIONS})
            for name, link in spec.links.items()
        }
        self.lines = lines_of(spec, self._links)
        self.closed: dict[int, ClosedRound] = {}
        self._last_closed = 0
        self.closed_earlier = 0
        """Number of the last round that an earlier start of the run closed; 0 for a new run."""
        self.refusals: Counter[str] = Counter()
        """Refused messages by kind."""
        self.refusals_told: Counter[str] = Counter()
        """Refused messages by the process that reported them: the exchange, or a member, which may lie."""
        self.joined: set[str] = set()
        self.joined_at: float | None = None
        """Time of the report with which all required members had joined; None if it has not been received."""
        self.links = self._links_of_those_who_came()
        """Links by name, for members that are required or have joined."""
        self.waiting: Waiting | None = None
        """The exchange's last report about what it waits for; None if there is progress."""
        self.waiting_told: float | None = None
        """Time of that report."""
        self.reading: Reading | None = None
        """Progress of a long reading that members wait for; None if there is none."""
        self.failed: str | None = None
        self.started: float | None = None
        self.first_step: float | None = None
        self.latest: float | None = None
        self.scores: dict[str, Score] = {}
        """Newest scores, by replica; empty without audits."""
        self.checks = 0
        """Number of recomputations of a replica's round."""
        self.failed_checks: list[Judgement] = []
        """Recomputations that found something else than a replica had contributed."""
        self.diverged: dict[str, Divergence] = {}
        """Replicas that have diverged."""
        self.membership_state = MembershipState(spec)
        self.tally = Tally(
            {name: member.replica.name for name, member in spec.members.items()}, self.membership_state.awaited
        )
        """Counters of the whole run, also where reports of its beginning are missing."""
        self.spent = {name: Spent() for name in spec.members}
        """Seconds of each member's rounds."""
        self.devices: dict[str, str] = {}
        """Member -> name of the device on which it computes."""
        self.device_bytes: dict[str, int] = {}
        """Member -> most memory that it had in use on its accelerator."""
        self._pauses = Pauses()
        self._finished: set[str] = set()
        self._over: Over | None = None
        """Report that every round is closed; None before."""

    # ---- writing ----

    def apply(self, report: Report) -> bool:
        """Take in one report. Reports on unknown replicas, links or rounds, and values out of range, are ignored.

        Return False for values out of range.
        """
        newest = max(self.rounds_planned, self._last_closed + 2)
        if not math.isfinite(report.time) or complaint(report, newest, _ANY) or not self._is_possible(report):
            return False
        with self.lock:
            self.started = report.time if self.started is None else min(self.started, report.time)
            self.latest = report.time if self.latest is None else max(self.latest, report.time)
            self._pauses.apply(report)
            self.membership_state.apply(report)
            self.tally.apply(report)
            match report.WhichOneof("event"):
                case "begun":
                    self._begun(report.begun)
                case "inner_step":
                    self._came(report.member)
                    self._step(report.time, report.inner_step)
                case "evaluation":
                    self._came(report.member)
                    self._evaluated(report.evaluation)
                case "member_round":
                    self._came(report.member)
                    if report.member in self.spent:
                        self.spent[report.member].apply(report.member_round)
                        if report.member_round.HasField("device_bytes"):
                            self.device_bytes[report.member] = report.member_round.device_bytes
                case "computes" if report.member in self.spec.members:
                    self.devices[report.member] = report.computes.device
                    self.device_bytes.pop(report.member, None)
                case "link_use":
                    self._used(report.time, report.link_use)
                case "round_closed":
                    self._closed(report.time, report.round_closed)
                case "round_verified":
                    self._verified(report.round_verified)
                case "failure":
                    self._failure(report.member, report.failure)
                case "refusal":
                    self._refused(report.member, report.refusal)
                case "finished":
                    self._finished.add(report.member)
                case "over":
                    self._over = report.over
                case "joined":
                    self._joined(report.time, report.member)
                case "reading":
                    self.reading = report.reading if report.reading.share < 1 else None
                case "scores":
                    self.scores |= {one.replica: one for one in report.scores.scores if self._replica(one.replica)}
                case "judged" if report.judged.HasField("recomputed"):
                    self.checks += 1
                    self.failed_checks += [] if report.judged.recomputed.is_equal else [report.judged]
                case "so_far":
                    self._so_far(report.time, report.so_far)
                case "waiting":
                    self.waiting = report.waiting if report.waiting.missing or report.waiting.store_error else None
                    self.waiting_told = report.time
        return True

    def _is_possible(self, report: Report) -> bool:
        """Return False for a round of the exchange that would take memory and time without bound."""
        event = report.WhichOneof("event")
        if event not in ("round_closed", "round_verified", "membership_event"):
            return True
        told, last = getattr(report, event), max(self._last_closed, self.rounds_planned) + ROUNDS_GAP_MAX
        if told.round > last or event != "round_closed":
            return bool(told.round <= last)
        most = self.inner_steps or MOST_STEPS_SHOWN
        return told.round >= 1 and all(one.steps <= most for one in told.contributions)

    def _refused(self, member: str, refusal: Refusal) -> None:
        """Count refused messages. An unknown kind, which a member may make up, counts as unexpected."""
        kind = refusal.kind if refusal.kind in _KINDS else Kind.UNEXPECTED
        self.refusals[kind] += refusal.count or 1
        self.refusals_told[member] += refusal.count or 1

    def _so_far(self, time: float, told: SoFar) -> None:
        """Take in the counters of a run of which reports are missing. Its pauses are in none of its times."""
        pauses = self._pauses.between(0.0, time)
        self.started = time - told.seconds - pauses
        self.first_step = time - told.training_seconds - pauses if told.training_seconds else None
        self._last_closed = max(self._last_closed, told.last_round)
        for credit in told.credits:
            replica, own = self._replica(credit.replica), self.tally.credits.get(credit.replica)
            if replica is not None:
                replica.tokens += credit.tokens - (0 if own is None else own.tokens)
        for use in told.carried:
            link = self._links.get(use.link)
            for way in DIRECTIONS:
                if link is not None and way == use.direction:
                    link.directions[way].unreported_bytes += use.wire_bytes - link.directions[way].wire_bytes
        self.refusals[Kind.UNEXPECTED] += told.refusals - self.refusals.total()
        self.tally.count_on(told, time)

    def fail(self, cause: str) -> None:
        """Record why the run ended early. The launcher knows the cause better than any member."""
        with self.lock:
            self.failed = cause

    def _joined(self, time: float, member: str) -> None:
        had_all = self.has_all_needed
        self._came(member)
        if self.has_all_needed and not had_all:
            self.joined_at = time

    def _came(self, *members: str) -> None:
        """Note that these members have joined. Other reports show it if a `joined` report was missed."""
        new = (self.spec.members.keys() & members) - self.joined
        if new:
            self.joined |= new
            for name, replica in self._optional.items():
                if name not in self.replicas and self.joined.issuperset(replica.members):
                    self.replicas[name] = ReplicaState(name, replica.kind, self.inner_steps)
            self.links = self._links_of_those_who_came()

    def _replica(self, name: str) -> ReplicaState | None:
        """Return the replica that a report names; None if the run has none of that name.

        A replica that trains has all its members, so the `joined` reports of an optional one need not have arrived.
        """
        if name in self._optional and name not in self.replicas:
            self._came(*self._optional[name].members)
        return self.replicas.get(name)

    def _links_of_those_who_came(self) -> Mapping[str, LinkState]:
        came = {EXCHANGE, *self.spec.needed, *self.joined}
        return {name: link for name, link in self._links.items() if came >= {link.spec.source, link.spec.target}}

    def _begun(self, begun: Begun) -> None:
        """Take in a start of the run: reading is over, and changed keys are known."""
        self.reading = None
        if begun.changes:
            spec = self.spec.with_changes(Changes.from_json(begun.changes))
            self.changes, self.rounds_planned = spec.changes, spec.latest.outer.rounds
            for replica in spec.replicas_ever:
                if not replica.optional and replica.name not in self.replicas:
                    self.replicas[replica.name] = ReplicaState(replica.name, replica.kind, self.inner_steps)

    def _step(self, time: float, step: InnerStep) -> None:
        replica = self._replica(step.replica)
        fits = self.inner_steps is None or step.step < self.inner_steps
        if replica is not None and 1 <= step.round <= self.rounds_planned and fits:
            replica.apply(time, step)
            self.first_step = time if self.first_step is None else min(self.first_step, time)

    def _evaluated(self, evaluation: Evaluation) -> None:
        replica = self._replica(evaluation.replica)
        if replica is not None:
            replica.validation_loss[evaluation.round] = evaluation.loss
            self._compare(replica, evaluation.round, evaluation.loss)

    def _compare(self, replica: ReplicaState, round_: int, loss: float | None) -> None:
        """Compare a loss with that of the untrained model, and keep the first that is far above it."""
        untrained = max(math.log(self.spec.shape.vocabulary), replica.validation_loss.get(0, 0.0))
        if loss is not None and loss > untrained + DIVERGED_NATS and replica.name not in self.diverged:
            self.diverged[replica.name] = Divergence(replica.name, round_, loss, untrained)

    def _used(self, time: float, use: LinkUse) -> None:
        link = self._links.get(use.link)
        for way in DIRECTIONS:
            if link is not None and way == use.direction:
                link.directions[way].apply(time, use, time if self.first_step is None else self.first_step)

    def _closed(self, time: float, record: RoundRecord) -> None:
        rows = {replica.name: replica.batch_size for replica in self.spec.replicas_ever}
        for contribution in record.contributions:
            one = self._replica(contribution.replica)
            if one is not None and contribution.steps > 0:
                tokens = rows.get(one.name, 0) * self.spec.config.data.sequence_length
                one.keep(record.round, contribution.steps, tokens)
        for replica in self.replicas.values():
            self._compare(replica, record.round, replica.round_loss(record.round))
            replica.settle(record.round)
        for link in self._links.values():
            for direction in link.directions.values():
                direction.settle(record.round)
        self._last_closed = max(self._last_closed, record.round)
        blobs = [blob for contribution in record.contributions for blob in contribution.blobs]
        self.closed[record.round] = ClosedRound(
            record.round, time, sum(blob.size for blob in blobs), sum(blob.kept_values for blob in blobs)
        )

    def _verified(self, verified: RoundVerified) -> None:
        replica = self._replica(verified.replica)
        if replica is not None:
            replica.sha256[verified.round] = verified.parameters_sha256.hex()

    def _failure(self, member: str, failure: Failure) -> None:
        if self.failed is None and not failure.consequence:
            self.failed = failure.cause if member == EXCHANGE else f"{member}: {failure.cause}"

    # ---- reading ----

    @property
    def is_over(self) -> bool:
        """Whether every round is closed, and all remaining members have finished.

        Members that were given up are not waited for. Neither are members of a replica that took no part in the last
        round or has since lost a member.
        """
        came = self.spec.needed.keys() | (self.joined & self.spec.members.keys())
        vacant = self.membership_state.vacant.keys()
        left = came - self._finished - vacant - self.membership_state.given_up.keys()
        if self._over is not None:
            replicas = {name: member.replica.name for name, member in self.spec.members.items()}
            awaited = set(self._over.finishing) - {replicas[name] for name in vacant if name in replicas}
            left = {name for name in left if replicas[name] in awaited}
        return self.rounds >= self.rounds_planned and not left

    @property
    def has_closed_all_rounds(self) -> bool:
        """Whether every round is closed. Members may still apply the last one."""
        return self._over is not None or self.rounds >= self.rounds_planned

    @property
    def contribution_bytes(self) -> int:
        """Bytes of all contributions that rounds include."""
        return sum(credit.bytes for credit in self.tally.credits.values())

    @property
    def finished(self) -> frozenset[str]:
        """Members that have finished all their rounds."""
        return frozenset(self._finished)

    def presence(self, member: str) -> MemberPresence:
        """Return whether a member takes part now, and if not, why."""
        if member in self.membership_state.given_up:
            return MemberPresence.GIVEN_UP
        if self.membership_state.slots[member].vacant is not None:
            return MemberPresence.VACANT
        if member in self._finished:
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
    def rounds(self) -> int:
        """Number of the last closed round. Rounds close in order, so it is known even if a report was missed."""
        return self._last_closed

    def progress_of_open_round(self, now: float) -> tuple[float, float]:
        """Return (done, total) of the open round's inner loop, in steps of the slowest replica or in seconds."""
        if self.inner_steps is None:
            whole = self.spec.config.inner.seconds or 0.0
            before = self.closed[self.rounds].time if self.rounds in self.closed else self.first_step
            return min(self._seconds(before, now), whole), whole
        done = self._steps_done - self.rounds * self.inner_steps
        return max(0, min(done, self.inner_steps)), self.inner_steps

    @property
    def _steps_done(self) -> int:
        """Inner steps of the slowest required replica; if all are optional, of the fastest one."""
        awaited = self.membership_state.awaited(self.rounds + 1)
        needed = [self.replicas[name].steps_done for name in awaited if name in self.replicas]
        return min(needed) if needed else max((one.steps_done for one in self.replicas.values()), default=0)

    def elapsed(self, now: float | None = None) -> float:
        """Return the seconds since the first report, until `now` or else the last report, without pauses."""
        return self._seconds(self.started, self.latest if now is None else now)

    @property
    def clock(self) -> tuple[float | None, int]:
        """Time of the first report, and number of pauses: times without pauses depend on both."""
        return self.started, len(self._pauses)

    def training_seconds(self, now: float | None = None) -> float:
        """Return the seconds since the first inner step, until `now` or else the last report, without pauses."""
        return self._seconds(self.first_step, self.latest if now is None else now)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, from the rounds so far; None until the first has closed."""
        if not self.closed or self.first_step is None:
            return None
        last = max(self.closed.values(), key=lambda closed: closed.round)
        a_round = self._seconds(self.first_step, last.time) / last.round
        return max(0.0, a_round * (self.rounds_planned - last.round) - self._seconds(last.time, now))

    def round_seconds(self, round_: int) -> float:
        """Return the seconds of a round without pauses: from the previous close or the first inner step to its own."""
        before = self.closed[round_ - 1].time if round_ - 1 in self.closed else self.first_step
        return self._seconds(before, self.closed[round_].time)

    def _seconds(self, start: float | None, end: float | None) -> float:
        """Return the seconds between two times, without pauses; 0 if either is None."""
        if start is None or end is None:
            return 0.0
        return max(0.0, end - start - self._pauses.between(start, end))

    def tokens_per_second(self, replica: ReplicaState | None = None, now: float | None = None) -> float:
        """Return the tokens per second of one replica or all, over the time since the first inner step."""
        tokens = sum(each.tokens for each in ([replica] if replica else self.replicas.values()))
        seconds = self.training_seconds(now)
        return tokens / seconds if seconds > 0 else 0.0

    def of_round(self, round_: int) -> Mapping[str, ReplicaState]:
        """Return the replicas of a round: the required ones, and all optional ones that have ever joined."""
        names = [replica.name for replica in self.membership_state.of_round(round_)]
        return {name: self.replicas[name] for name in names if name in self.replicas}

    def mean_validation_loss(self, round_: int) -> float | None:
        """Return the mean validation loss after a round, each replica's in its replica forward.

        None until all required replicas have reported theirs.
        """
        losses = {name: replica.validation_loss.get(round_) for name, replica in self.of_round(round_).items()}
        known = [loss for loss in losses.values() if loss is not None]
        is_lacking = any(losses.get(name) is None for name in self.membership_state.awaited(round_))
        return fmean(known) if known and not is_lacking else None

    def mean_validation_losses(self) -> dict[int, float]:
        """Return the known mean validation losses by round, in the order of rounds; round 0 is before training."""
        told = sorted(set[int]().union(*(replica.validation_loss for replica in self.replicas.values())))
        means = {round_: self.mean_validation_loss(round_) for round_ in told}
        return {round_: mean for round_, mean in means.items() if mean is not None}

    def awaited_losses(self, round_: int) -> list[str]:
        """Return the required replicas that have not reported a validation loss after a round."""
        awaited = [self.replicas[name] for name in self.membership_state.awaited(round_) if name in self.replicas]
        return [replica.name for replica in awaited if round_ not in replica.validation_loss]

    def contributing_members(self, round_: int) -> list[str]:
        """Return the members whose contributions a round waits for: an optional replica only while it is complete."""
        gone = {self.membership_state.slots[slot].replica for slot in self.membership_state.vacant}
        return [
            member
            for replica in self.membership_state.of_round(round_)
            if not replica.optional or (replica.name in self.replicas and replica.name not in gone)
            for member in replica.members
        ]

    def goodput(self) -> tuple[float, float | None]:
        """Return tokens of included contributions per second, and their share of all tokens trained for closed rounds.

        The share is an upper estimate: tokens that a killed process trained and did not report are missing from the
        total.
        """
        counted, seconds = self.membership_state.counted_tokens, self.training_seconds()
        trained = sum(replica.trained.get(round_, 0) for replica in self.replicas.values() for round_ in self.closed)
        return counted / seconds if seconds > 0 else 0.0, min(1.0, counted / trained) if trained else None

    def missing_losses(self, round_: int) -> dict[str, str]:
        """Return why required replicas did not report a validation loss after a round, where that is known."""
        closed = self.closed.get(round_)
        untold = self.awaited_losses(round_)
        if closed is None or not untold:
            return {}
        after = self.closed.get(round_ + 1)
        end = (self.latest or closed.time) if after is None else after.time
        overlap = self.spec.config.outer.overlap  # with overlap, a round is carried during this many further rounds
        since = self.closed.get(round_ - overlap, closed).time
        why = {name: self.membership_state.gone(name, since, end) for name in untold}
        return {name: cause for name, cause in why.items() if cause is not None}

    def final_sha256(self) -> dict[str, str]:
        """Return the SHA-256 of each replica's parameters after the last round that all present ones reported."""
        gone = {self.membership_state.slots[slot].replica for slot in self.membership_state.vacant}
        gone |= {name for name, replica in self.replicas.items() if name in self._optional and not replica.sha256}
        gone |= self.replicas.keys() - {replica.name for replica in self.spec.config.replicas}
        there = {name: replica for name, replica in self.replicas.items() if name not in gone} or self.replicas
        common = set.intersection(*(set(replica.sha256) for replica in there.values())) if there else set()
        return {name: replica.sha256[max(common)] for name, replica in there.items()} if common else {}
