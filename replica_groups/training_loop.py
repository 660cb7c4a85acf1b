"""The rounds of a member that trains: inner steps, the outer round, evaluation; and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from hetero_pp.data.shares import Share
from hetero_pp.errors import LinkError, PeerAtFault, Stopped, Suspended, TermOver
from hetero_pp.faults import NO_FAULTS, Faults, Phase
from hetero_pp.learning_rates import LearningRates
from hetero_pp.link.ends import LinkEnds
from hetero_pp.messages.messages_pb2 import InnerStep, MemberRound
from hetero_pp.outer.exchange_service import Assignment
from hetero_pp.outer.step import parameter_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.snapshot import MOMENTUM
from replica_groups.exchange.reporter import Reporter
from replica_groups.gate import Gate
from replica_groups.outer_round import OuterRound
from replica_groups.parameter_store import ParameterStore
from replica_groups.round_length import RoundLength
from replica_groups.saved_states import SavedStates
from replica_groups.seat import Seat
from replica_groups.steps_taken import StepsTaken
from replica_groups.stopping import NEVER_STOPPED, Stopping


class TrainingMember(Protocol):
    """A whole replica, or one stage of one."""

    @property
    def parameters(self) -> ParameterStore:
        """The parameters that it trains."""

    def follow(self, rates: LearningRates) -> None:
        """From the next step on other learning rates."""

    def take_share(self, share: Share, step: int) -> None:
        """Read this part of the text in the round whose first step is `step`."""

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
        """One inner step; what is known here of loss, norm and learning rate, and whether it was told to be the last.

        `is_last`: who decides how long a round is says that no other step of it follows.
        """

    def end_inner_loop(self, round_: int) -> None:
        """Make sure that every step has been applied."""

    def remember(self, ahead: bool = False) -> None:
        """Where a round starts: copy what `undo` brings back. Synced parameters are in the outer round.

        `ahead`: while the one before is not decided, whose text may have to be read again.
        """

    def undo(self, outer: OuterRound) -> None:
        """Go back to what was remembered and to theta of the outer round: the round can be trained again, to its bits.

        May be called again. A step that was under way is dropped, wherever it was.
        """

    def relink(self, ends: LinkEnds) -> None:
        """Go on with other links to the stages beside this one, after `undo` or between two inner loops."""

    def start_round(self, outer: OuterRound) -> None:
        """Derive what follows from the synced parameters: the split of the token embedding."""

    def evaluate(self, round_: int) -> tuple[float, int] | None:
        """Loss of the synced parameters in this replica's own forward, and tokens seen; None where it is not known."""

    def save(self, folder: Path) -> None:
        """Write all that its next step depends on and no snapshot has."""

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in a member that started from the snapshot of that round."""

    def activity(self) -> tuple[int, bool]:
        """Another number whenever it has done something, and whether it is busy, for another thread to see."""

    def timing(self) -> tuple[float, float]:
        """Seconds of compute and of waiting for links since the last call."""


SECONDS_BETWEEN_LINK_REPORTS = 0.5

_TERMS = "terms.json"

_SECONDS_TO_REPORT = 2.0
"""How long a member that was asked to stop waits until its reports are delivered."""


@dataclass(frozen=True)
class _InnerLoop:
    """One that this process has trained."""

    steps: int
    compute_seconds: float
    wait_seconds: float


class TrainingLoop:
    """A member's rounds, and how it goes on when its replica is formed anew, or its term is over."""

    def __init__(
        self,
        member: TrainingMember,
        replica: str,
        outer: OuterRound,
        seat: Seat,
        reporter: Reporter,
        states: SavedStates,
        length: RoundLength,
        steps: StepsTaken,
        gate: Gate | None = None,
        faults: Faults = NO_FAULTS,
        stopping: Stopping = NEVER_STOPPED,
        undoes: bool = True,
    ) -> None:
        """`gate`: asked before every inner step, by members that are threads; what was done before a round is told
        before. `undoes`: whether the member can go back to the moments of the start of a round.
        """
        self.member, self.replica, self.outer, self.seat = member, replica, outer, seat
        self.reporter, self.states, self.length, self.steps, self.gate = reporter, states, length, steps, gate
        self.faults, self.stopping, self._undoes = faults, stopping, undoes
        self.holds = 0
        """The round after which the member holds theta."""
        self._unsaved = 0
        """States in a row that could not be saved."""
        self._saved: int | None = None
        """The round after which its state was saved, until the rounds since are caught up with."""
        self._has_started = False
        self._is_in_step = False
        """Whether theta, moments and error feedback are those after round `holds`, but for the round under way."""
        self._under_way = False
        """Whether a round was begun that `undo` brings back to its start."""
        self._ahead: _InnerLoop | None = None
        """Of the round that `outer` has trained ahead, if that was here and can be undone."""
        self._trained_with: dict[int, str] = {}
        """By round, of the last two, the terms that it was trained with: those that are due now may be others."""

    def run(self, holds: int, saved: int | None, spec: RunSpec) -> None:
        """Train until the run is over, from theta after round `holds`; what else it has is from after round `saved`."""
        self.holds, self._saved = holds, saved
        try:
            self._train_rounds(spec)
        except Stopped:
            self._save_before_the_end()
            raise
        self.seat.pulse.finished()
        over = self.reporter.new()
        over.finished.SetInParent()
        self.reporter.send(over)

    def _train_rounds(self, spec: RunSpec) -> None:
        while (work := self.seat.ask(self.holds, self.outer.trained_beyond(self.holds))).round:
            try:
                if work.changed != spec.changes.mark:
                    spec = spec.with_changes(self.seat.exchange.changes())
                self._reach(work, spec.config.snapshots.every)
                self._train_round(work, spec)
            except (Suspended, TermOver, LinkError) as error:
                self._return(error)
            self.stopping.check(self.outer.ranks)

    def _save_before_the_end(self) -> None:
        """Save the state after the last finished round, if it is not saved yet. The round under way is dropped."""
        if not self._is_in_step or self.holds == 0 or self.states.has(self.holds):
            return
        if self._under_way and not self._undoes:
            print(
                f"{self.reporter.member}: states.undo is false: no state can be saved within a round", file=sys.stderr
            )
            return
        if self._under_way:
            self.outer.undo()
            self.member.undo(self.outer)
            self._under_way, self._ahead = False, None
        self.outer.take_back_undecided()
        self.reporter.flush(_SECONDS_TO_REPORT)
        self._save_state(self.holds)

    # ---- where a round starts ----

    def _reach(self, work: Assignment, snapshots_every: int) -> None:
        """Come to where the assigned round starts, with all of the replica."""
        self.length.begin(work.elapsed)
        self._is_in_step = False
        if work.heals:
            self._heal()
            if self.holds >= work.round:
                raise Suspended(f"round {work.round} has closed in the meantime")
        before = work.round - 1
        if before > self.holds + self._has_started and self._saved is None:
            self._take_newer_snapshot(before, snapshots_every if self._has_started else 1)
        missed = range(self.holds + 1, work.round)
        # What was taken back may have been counted nevertheless, if this member's term ended before it heard of that.
        self.outer.catch_up(missed, missed if self._saved is None else range(self._saved + 1, work.round))
        self.holds, self._saved = before, None
        self.steps.catch_up(before, lambda round_: self.outer.exchange.record(round_, self.outer.member))
        if missed or not self._has_started:
            self.member.start_round(self.outer)
            self._has_started = True
        self._is_in_step = True
        with self._allowed_to_stop():
            ends = self.seat.form(work)
        if ends is not None:
            self.member.relink(ends)
        if work.is_first:
            self._evaluate(before)  # again, if the run goes on: it may have died before it was reported
            if before == 0:
                self._report_links(0)

    def _take_newer_snapshot(self, before: int, least: int) -> None:
        """One that is so many rounds newer, rather than replay them: of who has waited for its replica to be whole, or
        for a round that is to count it. The log may have no more what they counted.
        """
        newest = self.seat.exchange.newest_snapshot()[0]
        if self.holds + least <= newest <= before and self.outer.is_settled:
            self._heal()

    def _heal(self) -> None:
        """Take theta from the log again, and the outer optimizer's state."""
        round_, names = self.seat.exchange.newest_snapshot()
        kept = momentum_of(names, self.outer.theta)
        tensors = self.seat.exchange.snapshot([*self.outer.theta, *kept], round_)
        momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in kept}
        self.outer.reset({name: tensors[name] for name in self.outer.theta}, momentum, round_)
        self.outer.catch_up(range(round_ + 1, self.holds + 1))
        self.holds = max(self.holds, round_)
        self.outer.restore()
        self.member.start_round(self.outer)

    def _return(self, error: Exception) -> None:
        """To where the round that was under way started. Whoever cannot reach a neighbour says so."""
        print(f"{self.reporter.member}: returns to round {self.holds}: {error}", file=sys.stderr, flush=True)
        epoch = self.seat.leave_links(str(error))
        if self._under_way:
            self.outer.undo()
            self.member.undo(self.outer)
            self._under_way, self._ahead = False, None
        if isinstance(error, LinkError) and epoch is not None:
            blames = error.peer if isinstance(error, PeerAtFault) else ""
            with suppress(TermOver):
                self.seat.exchange.broken(self.seat.member, epoch, str(error), blames)

    # ---- a round ----

    def _train_round(self, work: Assignment, spec: RunSpec) -> None:
        round_ = work.round
        if self.gate is not None:
            self.reporter.flush()
        self.faults.touch(self.outer.theta)
        loop = self._inner_loop_of(work, spec)
        started, spent_ahead, self.outer.blocked = time.monotonic(), 0.0, 0.0

        def contributed() -> None:
            nonlocal spent_ahead
            self.length.contributed(time.monotonic() - started)
            if spec.config.outer.overlap and round_ < spec.latest.outer.rounds:
                spent_ahead = -time.monotonic()
                self._train_ahead(round_, spec)
                spent_ahead += time.monotonic()

        record = self.outer.synchronise(round_, work.epoch, loop.steps, contributed)
        self._under_way, self.holds = False, round_
        self.steps.end_round(loop.steps, record)
        self.seat.pulse.trains(None, work.epoch)
        self.member.start_round(self.outer)
        times = MemberRound(round=round_, compute_seconds=loop.compute_seconds, wait_seconds=loop.wait_seconds)
        self._finish(round_, times, started + spent_ahead)
        if self.states.is_due(round_) or round_ == spec.latest.outer.rounds:  # from the last the run may be extended
            self.reporter.flush()  # a run that goes on from this state has lost no report from before it
            self._save_state(round_)

    def _inner_loop_of(self, work: Assignment, spec: RunSpec) -> _InnerLoop:
        """That of the assigned round: trained now, unless all of the replica has trained it ahead, as it is due now."""
        round_, ahead, terms = work.round, self._ahead, self._terms(work.round, spec)
        self._ahead = None
        if work.trained == round_ and self._trained_with.get(round_) == repr(terms):
            if ahead is None:  # it is from a saved state, or was returned to: there is nothing to undo it by
                self.member.remember(ahead=True)
            self._under_way = True
            self.seat.pulse.trains(round_, work.epoch)
            return ahead or _InnerLoop(spec.config.inner.require_steps("rounds overlap"), 0.0, 0.0)
        if ahead is not None:
            self.member.undo(self.outer)
        self.outer.trained.clear()
        self.outer.start_local(round_, work.trained)
        self.member.remember()
        self._under_way = True
        self.seat.pulse.trains(round_, work.epoch)
        loop = self._train(round_, round_, terms)
        if spec.config.outer.overlap:
            self.outer.end_inner_loop(round_)
        return loop

    def _train_ahead(self, round_: int, spec: RunSpec) -> None:
        """The inner loop of the round after one that is on its way; `undo` brings back to where it begins."""
        self.member.remember(ahead=True)
        self.outer.start_ahead()
        loop = self._train(round_ + 1, round_, self._terms(round_ + 1, spec))
        self.outer.end_inner_loop(round_ + 1)
        self._ahead = loop

    def _terms(self, round_: int, spec: RunSpec) -> tuple[LearningRates, Share]:
        """What is true of a round as far as it is known."""
        first = self.steps.before(round_)
        return spec.rates_in(round_, first, self.steps.last), spec.share_of(self.replica, round_)

    def _train(self, round_: int, under_way: int, terms: tuple[LearningRates, Share]) -> _InnerLoop:
        """The inner steps of a round, while one is under way: that, or the one before."""
        rates, share = terms
        first = self.steps.before(round_)
        self.member.follow(rates)
        self.member.take_share(share, first)
        with self.seat.pulse.computing(self.member.activity), self._allowed_to_stop():
            steps = self._take_steps(round_, first, under_way)
        self._trained_with = {before: one for before, one in self._trained_with.items() if before == round_ - 1}
        self._trained_with[round_] = repr(terms)
        return _InnerLoop(steps, *self.member.timing())

    def _take_steps(self, round_: int, first: int, under_way: int) -> int:
        """All of a round: how many there were."""
        reported = time.monotonic()
        steps, is_over = 0, False
        while not is_over:
            if self.gate is not None and self.gate.enter(self.reporter.member, under_way):
                self.length.begin(0.0)
            self.stopping.check(self.outer.ranks)
            report = self.reporter.new()
            is_last = self.length.is_last(round_, steps)
            done = self.member.inner_step(round_, steps, first + steps, bool(is_last))
            report.inner_step.CopyFrom(done)
            self.reporter.send(report)
            if steps == 0:
                self.faults.reached(Phase.TRAINING, round_)
            is_over = self.length.is_over(steps, done.is_last)
            steps += 1
            self.seat.pulse.progressed()
            if time.monotonic() - reported > SECONDS_BETWEEN_LINK_REPORTS:
                self._report_links(round_)
                reported = time.monotonic()
        self.member.end_inner_loop(round_)
        return steps

    def _finish(self, round_: int, times: MemberRound, started: float) -> None:
        """The evaluation of what a round came to, if all of the replica is still there for it, and what it took."""
        synchronised = time.monotonic()
        self.faults.reached(Phase.EVALUATING, round_)
        try:
            self._evaluate(round_)
        except LinkError as error:
            self._return(error)
        times.outer_seconds, times.blocked_seconds = synchronised - started, self.outer.blocked
        times.evaluation_seconds = time.monotonic() - synchronised
        report = self.reporter.new()
        report.member_round.CopyFrom(times)
        self.member.timing()
        self._report_links(round_)  # first: whoever hears that the round is over knows what it sent
        self.reporter.send(report)

    def _save_state(self, round_: int) -> None:
        """Save the state after a round. If the disk does not take it the member trains on, and says so now and then."""
        failure = self.states.save(round_, partial(self._save, round_))
        has_failed, self._unsaved = self._unsaved, self._unsaved + 1 if failure else 0
        is_told = has_failed > 0
        if failure:  # the 1st, 2nd, 4th, 8th, ... in a row
            is_told = self._unsaved & (self._unsaved - 1) == 0
            print(f"{self.reporter.member}: its state after round {round_} is not saved: {failure}", file=sys.stderr)
        if is_told and self.outer.ranks.is_first:
            report = self.reporter.new()
            report.state_saving.round, report.state_saving.failure = round_, failure
            self.reporter.send(report)

    def _save(self, round_: int, folder: Path) -> None:
        self.faults.write()
        self.member.save(folder)
        self.faults.reached(Phase.SAVING, round_)
        self.outer.save(folder)
        self.steps.save(folder)
        if self.outer.trained:
            (folder / _TERMS).write_text(json.dumps(self._trained_with), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on with rounds that were trained ahead of a saved state."""
        if (folder / _TERMS).exists():
            self._trained_with = {
                int(number): one for number, one in json.loads((folder / _TERMS).read_text(encoding="utf-8")).items()
            }

    def _evaluate(self, round_: int) -> None:
        with self._allowed_to_stop():
            outcome = self.member.evaluate(round_)
        if outcome is None:
            return
        report = self.reporter.new()
        report.evaluation.replica = self.replica
        report.evaluation.round = round_
        report.evaluation.loss, report.evaluation.tokens = outcome
        self.reporter.send(report)

    def _allowed_to_stop(self) -> AbstractContextManager[None]:
        """A block that an exception may end at any instruction; not on ranks, which have to leave it together."""
        return nullcontext() if self.outer.ranks.in_group else self.stopping.allowed()

    def _report_links(self, round_: int) -> None:
        for link, direction, ledger in self.seat.links.ledgers:
            count = ledger.of_round(round_)
            report = self.reporter.new()
            use = report.link_use
            use.link, use.direction, use.round = link, direction, round_
            use.messages, use.busy_seconds = count.messages, count.busy_seconds
            use.payload_bytes, use.wire_bytes = count.payload_bytes, count.wire_bytes
            self.reporter.send(report)


def momentum_of(names: Sequence[str], parameters: Collection[str]) -> list[str]:
    """Which tensors of a snapshot are the outer optimizer's, of these parameters."""
    found = (name for name in names if name.startswith(MOMENTUM))
    return [name for name in found if any(_is_of(name.removeprefix(MOMENTUM), one) for one in parameters)]


def _is_of(state: str, parameter: str) -> bool:
    """Whether what an optimizer keeps is of a parameter: under its name, or its name and what it is."""
    return parameter_of(state) == parameter
