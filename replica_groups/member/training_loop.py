"""The training loop of a member: inner steps, outer round and evaluation, repeated for each round."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from enum import Enum, auto
from functools import partial
from pathlib import Path

from hetero_pp.core.device import computing, peak_bytes
from hetero_pp.core.errors import LinkError, PeerAtFault, Stopped, Suspended, TermOver
from hetero_pp.messages.messages_pb2 import AssignReply, Doing, Evaluation, LinkUse, MemberRound, StateSaving
from hetero_pp.rpc.memory import give_freed_memory_back
from hetero_pp.run.snapshot import MOMENTUM, momentum_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.store.faults import NO_FAULTS, Faults, Phase
from replica_groups.member.commitments import Commitments
from replica_groups.member.gate import Gate
from replica_groups.member.inner_loops import Ahead, InnerLoop, StepsTaken, Terms
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.reporter import Reporter
from replica_groups.member.round_length import RoundLength
from replica_groups.member.saved_states import SavedStates
from replica_groups.member.seat import Seat
from replica_groups.member.stopping import NEVER_STOPPED, Stopping
from replica_groups.member.training_member import TrainingMember
from stages.activity import Timing

SECONDS_BETWEEN_LINK_REPORTS = 0.5

SECONDS_TO_SHOW = 600.0
"""Longest time for which a member stays after the last round to show a checkpoint to an audit."""


class _Position(Enum):
    """Where a member is between the rounds `holds` and `holds + 1`."""

    CATCHING_UP = auto()
    """Theta, moments and error feedback may belong to different rounds."""
    AT_START = auto()
    """Theta, moments and error feedback are those after round `holds`."""
    IN_ROUND = auto()
    """The next round has begun; `undo` returns to its start."""


class TrainingLoop:
    """Runs a member's rounds, and recovers when its replica reforms or its incarnation is over."""

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
        commitments: Commitments | None = None,
    ) -> None:
        """Create the loop of one member.

        `gate` is asked before every inner step, by members that are threads; reports are delivered before each round.
        `undoes`: whether the member can restore the moments from the start of a round. `commitments`: if the run is
        audited by recomputation.
        """
        self.member, self.replica, self.outer, self.seat = member, replica, outer, seat
        self.reporter, self.states, self.length, self.steps, self.gate = reporter, states, length, steps, gate
        self.faults, self.stopping, self._undoes = faults, stopping, undoes
        self.commitments = commitments
        self.holds = 0
        """Round after which the member holds theta."""
        self._unsaved = 0
        """Number of consecutive checkpoints that could not be saved."""
        self._seconds_to_save = 0.0
        """Duration of the newest save."""
        self._saved: int | None = None
        """Round of the loaded member checkpoint, until the rounds since then are caught up."""
        self._has_started = False
        """Whether a round was reached since this process started."""
        self._position = _Position.CATCHING_UP
        self.ahead = Ahead()

    def load(self, saved: int) -> None:
        """Restore the member checkpoint after round `saved`. Theta and the outer optimizer stay as they are."""
        folder = self.states.path(saved)
        self.member.load(folder)
        self.outer.load(folder)
        self.outer.restore()
        self.steps.load(folder)
        self.ahead.load(folder)

    def run(self, holds: int, saved: int | None, spec: RunSpec) -> None:
        """Train until the run is over, from theta after round `holds` and the member checkpoint after round `saved`."""
        self.holds, self._saved = holds, saved
        try:
            self._train_rounds(spec)
            if self.commitments is not None:
                with self._allowed_to_stop():
                    self.commitments.wait(SECONDS_TO_SHOW)
        except Stopped:
            self._save_before_the_end()
            raise
        self.seat.pulse.finished()
        over = self.reporter.new()
        over.finished.SetInParent()
        self.reporter.send(over)

    def _train_rounds(self, spec: RunSpec) -> None:
        while (work := self._ask()).round:
            try:
                if work.changed != spec.changes.mark:
                    spec = spec.with_changes(self.seat.exchange.changes())
                self._reach(work, spec.config.snapshots.every)
                self._train_round(work, spec)
            except (Suspended, TermOver, LinkError) as error:
                self._return(error)
            self.stopping.check(self.outer.ranks)

    def _ask(self) -> AssignReply:
        self.reporter.does(Doing.WAITING_FOR_ROUND)
        work = self.seat.ask(self.holds, self.outer.own.beyond(self.holds))
        if self.commitments is not None and work.HasField("shows"):
            self.commitments.show(work.shows)
        return work

    def _save_before_the_end(self) -> None:
        """Save the state after the last closed round, if it is not saved yet. The round in progress is dropped."""
        if self._position is _Position.CATCHING_UP:
            return
        missed = self._closed_without_it()
        if not missed and (self.holds == 0 or self.states.has(self.holds)):
            return
        if self._position is _Position.IN_ROUND and not self._undoes:
            print(
                f"{self.reporter.member}: states.undo is false, so no state can be saved within a round",
                file=sys.stderr,
            )
            return
        self._undo_round()
        self.outer.feedback.take_back()
        try:
            self._catch_up_before_the_end(missed)
        except (Suspended, TermOver, LinkError) as error:
            print(f"{self.reporter.member}: its state was not saved: {error}", file=sys.stderr, flush=True)
            return
        self.reporter.flush(lambda: True)
        if not self.states.has(self.holds):
            self._save_state(self.holds)

    def _catch_up_before_the_end(self, missed: range) -> None:
        for round_ in missed:
            one = range(round_, round_ + 1)
            self.outer.catch_up(one, range(0) if self._load_settled(one) else one)
            self.holds = round_
            self.steps.catch_up(round_, lambda one: self.outer.calls.record(one))

    def _closed_without_it(self) -> range:
        """Return the rounds that others may have finished and this member has not, as it was late.

        With overlap there are none: a round that was trained ahead depends on the one before as this replica knew it.
        """
        closed = max(self.outer.ranks.gather(float(self.stopping.closed or 0)))
        return range(0) if self.outer.settings.overlap else range(self.holds + 1, int(closed) + 1)

    # ---- where a round starts ----

    def _reach(self, work: AssignReply, snapshots_every: int) -> None:
        """Bring the member to the start of the assigned round."""
        saves_first = self.states.is_due(work.round) and not self.outer.settings.overlap
        self.length.begin(work.elapsed + (self._seconds_to_save if saves_first else 0.0))
        self.reporter.does(Doing.CATCHING_UP)
        self._position = _Position.CATCHING_UP
        if work.heals:
            self._heal()
            if self.holds >= work.round:
                raise Suspended(f"round {work.round} closed in the meantime")
        before, is_settled = work.round - 1, self._load_settled(range(self.holds + 1, work.round))
        if before > self.holds + self._has_started and (self._saved is None or is_settled):
            self._take_newer_snapshot(before, snapshots_every if self._has_started else 1)
        missed = range(self.holds + 1, work.round)
        # A contribution restored to error feedback may have been included, if the incarnation ended before the reply.
        self.outer.catch_up(missed, missed if self._saved is None else range(self._saved + 1, work.round))
        self.holds, self._saved = before, None
        self.steps.catch_up(before, lambda round_: self.outer.calls.record(round_))
        if missed or not self._has_started:
            self.member.start_round(self.outer)
            self._has_started = True
        self._position = _Position.AT_START
        with self._allowed_to_stop():
            ends = self.seat.form(work)
        if ends is not None:
            self.member.relink(ends)
        if work.is_first:
            self._evaluate(before)  # repeated after a resume, as the run may have died before the report
            if before == 0:
                self._report_links(0)

    def _load_settled(self, missed: range) -> bool:
        """Load the pending member checkpoint, if one of the missed rounds includes the contribution that it awaits.

        The member has returned to the start of that round, or is a new process, and the contribution stayed.
        """
        round_ = self.states.pending if missed else 0
        if round_ not in missed:
            return False
        entry = self.outer.calls.entry(self.outer.calls.record(round_))
        if not self.states.settle(round_, entry, reads=True):
            return False
        self.load(round_)
        self._saved = round_
        return True

    def _take_newer_snapshot(self, before: int, least: int) -> None:
        """Load the newest run checkpoint instead of replaying rounds, if it is at least `least` rounds newer.

        This applies to a member that waited for its replica to be complete, or for a round that includes it. The log
        may no longer contain the contributions of the missed rounds.
        """
        newest = self.seat.exchange.newest_snapshot()[0]
        if self.holds + least <= newest <= before and self.outer.is_settled:
            self._heal()

    def _heal(self) -> None:
        """Recover theta and the outer optimizer's state from the run log."""
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
        """Return to the start of the round in progress.

        After a link error, report that a neighbour cannot be reached.
        """
        print(f"{self.reporter.member}: returns to round {self.holds}: {error}", file=sys.stderr, flush=True)
        epoch = self.seat.leave_links(str(error))
        self._undo_round()
        if isinstance(error, LinkError) and epoch is not None:
            blames = error.peer if isinstance(error, PeerAtFault) else ""
            with suppress(TermOver):
                self.seat.exchange.broken(self.seat.member, epoch, str(error), blames)

    def _undo_round(self) -> None:
        """Return to the start of the round, if one has begun."""
        if self._position is _Position.IN_ROUND:
            self.outer.undo()
            self.member.undo(self.outer)
            self._position, self.ahead.loop = _Position.AT_START, None

    # ---- a round ----

    def _train_round(self, work: AssignReply, spec: RunSpec) -> None:
        round_ = work.round
        if self.gate is not None:
            self.reporter.flush()
        self.faults.touch(self.outer.theta)
        loop = self._inner_loop_of(work, spec)
        started, spent_ahead, self.outer.calls.blocked = time.monotonic(), 0.0, 0.0

        def contributed() -> None:
            nonlocal spent_ahead
            self.length.contributed(time.monotonic() - started - (self._seconds_to_save if saves_first else 0.0))
            if spec.config.outer.overlap and round_ < spec.latest.outer.rounds:
                spent_ahead = -time.monotonic()
                self._train_ahead(round_, spec)
                spent_ahead += time.monotonic()

        # A run may be extended after its last round, so that one is always saved.
        is_saved = self.states.is_due(round_) or round_ == spec.latest.outer.rounds
        # With overlap, the state has what is trained ahead while the contribution is in transit.
        saves_first = is_saved and not spec.config.outer.overlap
        before_last = partial(self._save_state, round_, loop.steps) if saves_first else lambda: None
        self.reporter.does(Doing.OUTER_ROUND)
        if self.commitments is not None:
            with self._allowed_to_stop():
                self.commitments.wait(SECONDS_TO_SHOW)  # no round counts a member that owes a checkpoint
        with computing("outer round", self.outer.ranks.device):
            record = self.outer.synchronise(round_, work.epoch, loop.steps, contributed, before_last)
        self._position, self.holds = _Position.AT_START, round_
        is_undone = self.commitments is not None and self.outer.calls.entry(record) is None
        if is_undone:  # the error feedback is undone, too (OuterRound)
            self.member.undo(self.outer)
        self.steps.end_round(None if is_undone else loop.steps, record)
        self.seat.pulse.trains(None, work.epoch)
        self.member.start_round(self.outer)
        spent = loop.timing
        times = MemberRound(
            round=round_,
            compute_seconds=spent.compute,
            wait_seconds=spent.waited_previous + spent.waited_next,
            wait_previous_seconds=spent.waited_previous,
            wait_next_seconds=spent.waited_next,
            device_bytes=peak_bytes(self.outer.ranks.device),
        )
        self._finish(round_, times, started + spent_ahead)
        if is_saved:
            self.reporter.flush(lambda: self.stopping.is_asked)  # a run that resumes from here has lost no report
            is_settled = self.states.settle(round_, self.outer.calls.entry(record))
            if not is_settled and not (saves_first and self._unsaved):  # the disk took nothing a moment ago
                self._save_state(round_)

    def _inner_loop_of(self, work: AssignReply, spec: RunSpec) -> InnerLoop:
        """Return the inner loop of the assigned round: the one trained ahead if it is valid, else a new one.

        The loop trained ahead is valid if all members of the replica have it, with the learning rates and share that
        apply now.
        """
        round_, ahead, terms = work.round, self.ahead.loop, self._terms(work.round, spec)
        self.ahead.loop = None
        if work.trained == round_ and self.ahead.is_valid(round_, terms):
            if ahead is None:  # it came from a member checkpoint, or the member returned to it: nothing was remembered
                self.member.remember(ahead=True)
            self._position = _Position.IN_ROUND
            self.seat.pulse.trains(round_, work.epoch)
            return ahead or InnerLoop(spec.config.inner.require_steps("rounds overlap"), Timing())
        if ahead is not None:
            self.member.undo(self.outer)
        self.outer.own.trained.clear()
        self.outer.start_local(round_, work.trained)
        if self.commitments is not None:
            self.commitments.begin(round_, work.committed)
        self.member.remember()
        self._position = _Position.IN_ROUND
        self.seat.pulse.trains(round_, work.epoch)
        loop = self._train(round_, round_, terms)
        if spec.config.outer.overlap:
            self.outer.end_inner_loop(round_)
        return loop

    def _train_ahead(self, round_: int, spec: RunSpec) -> None:
        """Train the inner loop of the next round while a contribution is in transit.

        `undo` returns to the beginning of this inner loop.
        """
        self.member.remember(ahead=True)
        self.outer.start_ahead()
        loop = self._train(round_ + 1, round_, self._terms(round_ + 1, spec))
        self.outer.end_inner_loop(round_ + 1)
        self.ahead.loop = loop

    def _terms(self, round_: int, spec: RunSpec) -> Terms:
        """Return the learning rates and the share of a round, as far as they are known."""
        first = self.steps.before(round_)
        return spec.rates_in(round_, first, self.steps.last), spec.share_of(self.replica, round_)

    def _train(self, round_: int, under_way: int, terms: Terms) -> InnerLoop:
        """Train the inner steps of `round_` while `under_way`, the same round or the one before, is in progress."""
        rates, share = terms
        first = self.steps.before(round_)
        self.member.follow(rates)
        self.member.take_share(share, first)
        ahead_of = under_way if under_way < round_ else None
        self._give_memory_back()
        self.reporter.does(self.member.doing)
        with self.seat.pulse.computing(self.member.activity), self._allowed_to_stop(ahead_of):
            steps = self._take_steps(round_, first, under_way)
        self._give_memory_back()
        self.ahead.trained(round_, terms)
        self.reporter.does(Doing.OUTER_ROUND)
        return InnerLoop(steps, self.member.timing())

    def _give_memory_back(self) -> None:
        """Return what the outer round, or the inner loop, has freed: the other one needs other sizes.

        A thread beside other members leaves this to them.
        """
        if self.gate is None:
            give_freed_memory_back()

    def _take_steps(self, round_: int, first: int, under_way: int) -> int:
        """Run all inner steps of a round; return their number."""
        reported = time.monotonic()
        steps, is_over = 0, False
        while not is_over:
            if self.gate is not None and self.gate.enter(self.reporter.member, under_way):
                self.length.begin(0.0)
            self.stopping.check(self.outer.ranks, under_way if under_way < round_ else None)
            is_last = self.length.is_last(round_, steps)
            with computing("inner step", self.outer.ranks.device):
                done = self.member.inner_step(round_, steps, first + steps, bool(is_last))
            self.reporter.tell(inner_step=done)
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
        """Evaluate the result of a round, if the whole replica is still there, and report the times."""
        synchronised = time.monotonic()
        self.faults.reached(Phase.EVALUATING, round_)
        try:
            self._evaluate(round_)
        except LinkError as error:
            self._return(error)
        times.outer_seconds, times.blocked_seconds = synchronised - started, self.outer.calls.blocked
        times.evaluation_seconds = time.monotonic() - synchronised
        self.member.timing()
        self._report_links(round_)  # first, so that the link use is known once the round is reported
        self.reporter.tell(member_round=times)

    def _save_state(self, round_: int, steps: int | None = None) -> None:
        """Save the state after a round. If the disk fails, the member trains on and reports it at growing intervals.

        With `steps`, the contribution of so many steps is undecided, and the state is that after a round with it.
        """
        awaits, began = None if steps is None else self.outer.feedback.undecided, time.monotonic()
        failure = self.states.save(round_, partial(self._save, round_, steps), awaits)
        self._seconds_to_save = time.monotonic() - began
        has_failed, self._unsaved = self._unsaved, self._unsaved + 1 if failure else 0
        is_told = has_failed > 0
        if failure:  # the 1st, 2nd, 4th, 8th, ... consecutive failure
            is_told = self._unsaved & (self._unsaved - 1) == 0
            print(f"{self.reporter.member}: its state after round {round_} was not saved: {failure}", file=sys.stderr)
        if is_told and self.outer.ranks.is_first:
            self.reporter.tell(state_saving=StateSaving(round=round_, failure=failure))

    def _save(self, round_: int, steps: int | None, folder: Path) -> None:
        self.faults.write()
        self.member.save(folder)
        self.faults.reached(Phase.SAVING, round_)
        self.outer.save(folder)
        self.steps.save(folder, None if steps is None else (round_, steps))
        if self.outer.own.trained:
            self.ahead.save(folder)

    def _evaluate(self, round_: int) -> None:
        self.reporter.does(Doing.EVALUATING)
        with self._allowed_to_stop(), computing("evaluation", self.outer.ranks.device):
            outcome = self.member.evaluate(round_)
        if outcome is None:
            return
        loss, tokens = outcome
        self.reporter.tell(evaluation=Evaluation(replica=self.replica, round=round_, loss=loss, tokens=tokens))

    def _allowed_to_stop(self, round_: int | None = None) -> AbstractContextManager[None]:
        """Allow Stopped at any instruction of a block; not on several ranks, which have to leave it together.

        With `round_` the block trains ahead of that round; see Stopping.allowed.
        """
        return nullcontext() if self.outer.ranks.in_group else self.stopping.allowed(round_)

    def _report_links(self, round_: int) -> None:
        for link, direction, ledger in self.seat.links.ledgers:
            count = ledger.of_round(round_)
            self.reporter.tell(link_use=LinkUse(link=link, direction=direction, round=round_, **asdict(count)))
