"""One member's part in a run, from joining to the last round; the same in a process, on ranks and in a thread.

`take_part` agrees with the run, joins it and builds the trainer. `TrainingLoop.run` then asks for one round after the
other: reaches its start, trains the inner steps, contributes and applies the record, evaluates, and saves. If its
group loses a stage before its contribution is complete, it keeps the inner steps that it has applied. Otherwise it
returns to the start of the round if its replica reforms or its incarnation is over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import exchange_link_name
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.core.device import computing, name_of, peak_bytes, use
from hetero_pp.core.errors import IncarnationOver, LinkError, PeerAtFault, Stopped, Suspended
from hetero_pp.core.files import keep_trying
from hetero_pp.data.sources import open_source, tokens_digest
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.memory import give_freed_memory_back
from hetero_pp.store.faults import NO_FAULTS, FaultPhase, Faults
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.member.gate import Gate
from replica_groups.member.inner_loops import (
    InnerLoop,
    OverlappedRound,
    RoundInputs,
    RoundLength,
    RoundPosition,
    StepsOf,
    StepsTaken,
    round_length,
)
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.reporter import SECONDS_BETWEEN_LINK_REPORTS, Reporter
from replica_groups.member.saved_states import SavedStates, newest_usable_state, states_of
from replica_groups.member.session import Connections, ExchangeLine, MemberSession
from replica_groups.member.stopping import NEVER_STOPPED, Stopping
from replica_groups.member.trainers import TrainingMember, build_from_checkpoint


class MemberAudit:
    """A member's part in the audits of a run that has none; replica_groups/audit has that of others."""

    undoes_uncounted = False  # whether a round that does not count the member leaves no trace in its state

    def begin(self, round_: int, committed: bytes) -> None:
        """Begin a round. `committed`: digest of the state that the exchange expects; empty: a fresh one."""

    def trains(self, round_: int) -> None:
        """Note that the inner steps of a round begin; with overlap, before the round before it is decided."""

    def contributes(self, round_: int, steps: int) -> None:
        """Note that the member is about to compress and send its contribution to a round."""

    def show(self, asked: pb.Asked) -> None:
        """Begin to send to the exchange what it asked for."""

    def wait(self, allowed_to_stop: AbstractContextManager[None]) -> None:
        """Wait until the exchange has what it asked for, within limits; a wait may end by Stopped."""


NOT_AUDITED = MemberAudit()

AuditedMember = Callable[[RunSpec, RunFolder, MemberSession, TrainingMember, OuterRound, StepsTaken], MemberAudit]
"""Returns the part of one member. It may note the contribution, and set the session's commitment, after compression."""


def take_part(
    spec: RunSpec,
    member: MemberSpec,
    connections: Connections,
    folder: RunFolder,
    ranks: Ranks = ALONE,
    gate: Gate | None = None,
    steps_of: StepsOf | None = None,
    faults: Faults = NO_FAULTS,
    stopping: Stopping = NEVER_STOPPED,
    audited: AuditedMember = lambda *parts: NOT_AUDITED,
) -> None:
    """Train all remaining rounds as one member of a run, on `ranks.device`, or as one of several ranks that form it.

    The caller closes the connections, or aborts them if this function raises HeteroPPError, which means that the run
    failed. `gate` delays each round until it is open. `steps_of` replaces the clock in rounds of a fixed time. `faults`
    are injected. `stopping` asks to save the state and leave. `audited` makes the member's part in audits of the run.
    """
    config, say = spec.config, partial(print, f"{member.name}:", file=sys.stderr, flush=True)
    use(ranks.device)
    line = ExchangeLine(spec.links[exchange_link_name(member.name)], config.seed, connections.lines)
    exchange, overlaps = connections.exchange if ranks.is_first else None, bool(config.outer.overlap)
    name, replica = member.name, member.replica.name
    session = MemberSession(exchange, name, replica, "", line, ranks, stopping, faults, overlaps=overlaps)
    # What every member of a run has to have in common is compared before it takes a slot.
    reads = member.reads_data and config.rehearsal is None
    source = keep_trying(lambda: open_source(config.data, folder.cache), say) if reads else None
    session.run = session.agree(name, spec.agreed, tokens_digest(source))
    states = states_of(spec, session, folder)
    available = states.find()

    with session.joined(member, connections, available):
        saved = newest_usable_state(session, states, available)
        spec = spec.with_changes(session.changes())
        # A thread shares its output with all members, so it does not tell how long the checkpoint took to read.
        tell = say if gate is None else None
        trainer, outer, holds = build_from_checkpoint(spec, member, session, source, folder.path, tell)
        reporter = Reporter(session, name)
        reporter.tell(computes=pb.Computes(device=name_of(ranks.device)))
        steps = StepsTaken(replica, spec.steps_of(replica), overlaps)
        length = round_length(spec, member, ranks, steps_of)
        states = replace(states, every=spec.latest.states_every)
        audit = audited(spec, folder, session, trainer, outer, steps)
        loop = TrainingLoop(
            spec, trainer, outer, session, reporter, states, length, steps, holds=holds, gate=gate, audit=audit
        )
        if saved is not None:
            loop.load(saved)
        stopping.listen()
        try:
            loop.run()
            states.drain()
        except Stopped:
            stopping.leave()
            raise
        finally:
            stopping.end()  # a member that fails ends soon after a signal: see there
            states.end()
            reporter.close()


@dataclass(eq=False)
class TrainingLoop:
    """Runs a member's rounds, and recovers when its replica reforms or its incarnation is over."""

    spec: RunSpec
    member: TrainingMember
    outer: OuterRound
    session: MemberSession
    reporter: Reporter
    states: SavedStates
    length: RoundLength
    steps: StepsTaken
    holds: int  # round after which the member holds theta
    gate: Gate | None = None  # is asked before every inner step, by members that are threads
    audit: MemberAudit = NOT_AUDITED
    saved: int | None = None  # round of the loaded saved state, until the rounds since then are caught up
    seconds_to_save: float = 0.0  # duration of the newest save
    has_started: bool = False  # whether a round was reached since this process started
    position: RoundPosition = RoundPosition.CATCHING_UP
    kept: pb.KeptSteps | None = None
    """The steps that it keeps if its group is suspended, from the first inner step until the record is applied."""
    overlapped: OverlappedRound = field(default_factory=OverlappedRound)

    def load(self, saved: int) -> None:
        """Restore the saved state after round `saved`. Theta and the outer optimizer stay as they are."""
        folder = self.states.path(saved)
        self.member.load(folder)
        self.outer.load(folder)
        self.outer.restore()
        self.steps.load(folder)
        self.overlapped.load(folder)
        self.saved = saved

    def run(self) -> None:
        """Train until the run is over, from theta after round `holds` and the saved state that was loaded."""
        try:
            while True:
                self.reporter.does(pb.WAITING_FOR_ROUND)
                work = self.session.ask(self.holds, self.outer.own.beyond(self.holds), self.kept)
                if work.HasField("shows"):
                    self.audit.show(work.shows)
                if not work.round:
                    break
                try:
                    if work.changed != self.spec.changes.mark:
                        self.spec = self.spec.with_changes(self.session.changes())
                    self._reach(work)
                    self._train_round(work)
                except (Suspended, IncarnationOver, LinkError) as error:
                    self._return(error)
                self.session.stopping.check(self.outer.ranks)
            self.audit.wait(self.session.allowed_to_stop())
        except Stopped:
            self._save_before_the_end()
            raise
        self.session.heartbeats.finished = True
        self.reporter.tell(finished=pb.Nothing())

    # ---- where a round starts ----

    def _reach(self, work: pb.AssignReply) -> None:
        """Bring the member to the start of the assigned round, or to the step of it at which its group resumes."""
        saves_first = self.states.is_due(work.round) and not self.session.overlaps
        self.length.begin(work.elapsed + (self.seconds_to_save if saves_first else 0.0), work.resumption.step)
        self.reporter.does(pb.CATCHING_UP)
        if self._keeps(work):
            self._form(work)
            return
        self.session.heartbeats.differs |= work.heals  # it says so again, if it does not come to recover now
        self._undo_round()
        restarts = self._own_restarts(work.resumption.restarts)
        if work.HasField("resumption") and restarts[-1:] != [work.resumption.step]:
            cause = f"it does not keep the inner steps of round {work.round} that it is expected to have"
            self.session.broken(self.session.member, work.generation, cause)
            raise Suspended(cause)
        self.position = RoundPosition.CATCHING_UP
        if work.heals:
            self._heal()
            self.session.heartbeats.differs = False
            if self.holds >= work.round:
                raise Suspended(f"round {work.round} closed in the meantime")
        before = work.round - 1
        # A new process, or a member that returned to its start, may miss a round that includes its contribution.
        if settled := self.states.settled_in(range(self.holds + 1, work.round), self.session):
            self.load(settled)
        if before > self.holds + self.has_started and (self.saved is None or settled):
            # The member waited for its replica to be complete, or for a round that includes it: a newer run checkpoint
            # takes the place of rounds to replay, whose contributions the log may no longer have.
            newest = self.session.newest_checkpoint()[0]
            least = self.spec.config.checkpoints.every if self.has_started else 1
            if self.holds + least <= newest <= before and self.outer.is_settled:
                self._heal(goes_on=True)
        missed = before > self.holds
        self._catch_up(before)
        if missed or not self.has_started:
            self.member.start_round(self.outer)
            self.has_started = True
        self.position = RoundPosition.AT_START
        self._form(work)
        if work.is_first and not work.HasField("resumption"):
            self._evaluate(before)  # repeated after a resume, as the run may have died before the report
            if before == 0:
                self.reporter.links(self.session.ledgers, 0)

    def _keeps(self, work: pb.AssignReply) -> bool:
        """Return whether the member goes on with the inner steps that it keeps; they then are of this generation."""
        kept, resumption = self.kept, work.resumption
        if kept is None or not work.HasField("resumption") or kept.round != work.round:
            return False
        known, told = map(self._own_restarts, (kept.restarts, resumption.restarts))
        is_same = kept.generation == resumption.generation and len(known) == len(told)
        if not is_same or not 0 <= resumption.step - kept.applied <= kept.has_next:
            return False
        kept.generation = work.generation
        kept.ClearField("restarts")
        kept.restarts.extend(resumption.restarts)
        return True

    def _own_restarts(self, restarts: Iterable[pb.Restart]) -> list[int]:
        """Return the steps of the round at which holders of this member's slot began."""
        return [one.step for one in restarts if one.slot == self.session.member]

    def _form(self, work: pb.AssignReply) -> None:
        with self.session.allowed_to_stop():
            ends = self.session.form(work)
        if ends is not None:
            self.member.relink(ends)

    def _catch_up(self, before: int) -> None:
        """Apply the rounds up to this one that closed without this member."""
        missed = range(self.holds + 1, before + 1)
        # A contribution restored to error feedback may have been included, if the incarnation ended before the reply.
        self.outer.catch_up(missed, missed if self.saved is None else range(self.saved + 1, before + 1))
        self.holds, self.saved = before, None
        self.steps.catch_up(before, self.session.record_of, self.spec.latest.outer.tokens is not None)

    def _heal(self, goes_on: bool = False) -> None:
        """Recover theta and the outer optimizer's state from the run log.

        `goes_on`: whether it only takes the place of missed rounds.
        """
        round_, theta, momentum = self.session.newest_tensors(self.outer.theta)
        since = max(self.holds, self.saved or 0) if goes_on else round_
        self.outer.reset(theta, momentum, round_, range(since + 1, round_ + 1))
        self.outer.catch_up(range(round_ + 1, self.holds + 1))
        self.holds = max(self.holds, round_)
        self.outer.restore()
        self.member.start_round(self.outer)

    def _return(self, error: Exception) -> None:
        """Leave the round in progress; after a link error, report which neighbour is to blame.

        The member keeps the inner steps that it has applied, and takes its contribution back. Without any, or if its
        group does not resume, it returns to the start of the round.
        """
        generation = self.session.leave_links(str(error))
        if self.kept is not None:
            self.outer.undo()
            self.kept.applied, self.kept.has_next = self.member.suspend()
            began = self._own_restarts(self.kept.restarts)[-1:] or [0]
            if self.kept.applied == began[0] and not self.kept.has_next:
                self.kept = None  # it has nothing to keep
        if self.kept is None:
            self.reporter.say(f"returns to round {self.holds}: {error}")
            self._undo_round()
        else:
            self.reporter.say(f"waits after {self.kept.applied} inner steps of round {self.kept.round}: {error}")
        if isinstance(error, LinkError) and generation is not None:
            blames = error.peer if isinstance(error, PeerAtFault) else ""
            with suppress(IncarnationOver):
                self.session.broken(self.session.member, generation, str(error), blames)

    def _undo_round(self) -> None:
        self.kept = None
        if self.position is RoundPosition.IN_ROUND:
            self.outer.undo()
            self.member.undo(self.outer)
            self.position, self.overlapped.loop = RoundPosition.AT_START, None

    # ---- a round ----

    def _train_round(self, work: pb.AssignReply) -> None:
        """Train the assigned round, contribute, apply its record, evaluate and save."""
        round_, spec, session, outer = work.round, self.spec, self.session, self.outer
        if self.gate is not None:
            self.reporter.flush()
        session.faults.touch(outer.theta)

        # The inner loop trained ahead is valid if all members of the replica have it, with the learning rates and the
        # share that apply now. Otherwise the round is trained from theta, or from the replica's own parameters.
        inputs, loop, self.overlapped.loop = self.steps.inputs(round_, spec), self.overlapped.loop, None
        is_trained = work.trained == round_ and self.overlapped.is_valid(round_, inputs)
        if is_trained and loop is None:  # it came from a saved state, or the member returned to it
            self.member.remember(ahead=True)
            loop = InnerLoop(spec.steps_of(session.replica) or 0)  # rounds that overlap have a number of steps
        elif not is_trained and self.kept is None:
            if loop is not None:
                self.member.undo(outer)
                loop = None
            outer.own.trained.clear()
            outer.start_local(round_, work.trained)
            self.audit.begin(round_, work.committed)
            self.member.remember()
        if spec.config.outer.is_streaming and self.kept is None:
            outer.start_streaming(is_trained)
            self.member.start_round(outer)
        self.position = RoundPosition.IN_ROUND
        session.heartbeats.trains(round_, work.generation, session.resumption)
        if loop is None:
            loop = self._train(round_, round_, inputs, work)
            if session.overlaps:
                outer.end_inner_loop(round_)

        started, ahead_seconds, session.blocked = time.monotonic(), 0.0, 0.0
        # A run may be extended after its last round, so that one is always saved. With overlap, the state has what is
        # trained ahead while the contribution is in transit.
        ends = spec.latest.outer
        is_saved = self.states.is_due(round_) or round_ == ends.rounds
        saves_first = is_saved and not session.overlaps
        before_last = partial(self._save_state, round_, loop.steps) if saves_first else lambda: None

        def contributed() -> None:
            nonlocal ahead_seconds
            self.length.contributed(time.monotonic() - started - (self.seconds_to_save if saves_first else 0.0))
            if session.overlaps and (ends.rounds is None or round_ < ends.rounds):
                # The inner loop of the next round; `undo` then returns to the beginning of this inner loop.
                began = time.monotonic()
                self.member.remember(ahead=True)
                outer.start_ahead()
                trained_ahead = self._train(round_ + 1, round_, self.steps.inputs(round_ + 1, spec))
                outer.end_inner_loop(round_ + 1)
                self.overlapped.loop, ahead_seconds = trained_ahead, time.monotonic() - began

        self.reporter.does(pb.OUTER_ROUND)
        self.audit.contributes(round_, loop.steps)
        self.audit.wait(self.session.allowed_to_stop())  # no round counts a member that owes what it has to show
        with computing("outer round", outer.ranks.device):
            record = outer.synchronise(round_, work.generation, loop.steps, contributed, before_last)
        self.position, self.holds, self.kept = RoundPosition.AT_START, round_, None
        is_saved = is_saved or ends.is_over(round_, record.tokens)  # only the record says so, if tokens end the run
        is_undone = self.audit.undoes_uncounted and session.entry(record) is None
        if is_undone:  # the error feedback is undone, too (OuterRound)
            self.member.undo(outer)
        self.steps.end_round(None if is_undone else loop.steps, record)
        session.heartbeats.trains(None, work.generation)
        self.member.start_round(outer)

        # The replica's links may break during the evaluation, but the round is over.
        synchronised, times = time.monotonic(), loop.report(round_, peak_bytes(outer.ranks.device))
        times.outer_seconds = synchronised - started - ahead_seconds
        session.faults.reached(FaultPhase.EVALUATING, round_)
        try:
            self._evaluate(round_)
        except LinkError as error:
            self._return(error)
        times.blocked_seconds, times.evaluation_seconds = session.blocked, time.monotonic() - synchronised
        self.member.timing()
        self.reporter.links(session.ledgers, round_)  # first: it is known once the round is reported
        self.reporter.tell(member_round=times)
        if is_saved:
            self.reporter.flush(lambda: session.stopping.is_asked)  # a run that resumes from here has lost no report
            is_settled = self.states.settle(round_, session.entry(record))
            if not is_settled and not (saves_first and self.reporter.unsaved):  # the disk took nothing a moment ago
                self._save_state(round_)

    def _train(self, round_: int, under_way: int, inputs: RoundInputs, work: pb.AssignReply | None = None) -> InnerLoop:
        """Train the inner steps of `round_` while `under_way`, the same round or the one before, is in progress.

        `work`: the assignment of the round, unless it is trained ahead. It may resume within the round.
        """
        rates, share = inputs
        first, ahead_of = self.steps.before(round_), under_way if under_way < round_ else None
        steps, keeps = 0 if work is None else work.resumption.step, self.kept is not None
        self.member.follow(rates)
        self.member.take_share(share, first)
        if not keeps:
            self.audit.trains(round_)
        if work is not None and steps:
            self.member.resume(steps, first + steps, keeps, not work.resumption.restarts)
        if work is not None and self.spec.resumes and self.spec.members[self.session.member].stage is not None:
            restarts = work.resumption.restarts
            self.kept = pb.KeptSteps(round=round_, generation=work.generation, restarts=restarts, changed=work.changed)
        # The outer round and the inner loop free memory of which the other needs other sizes. A thread beside other
        # members leaves this to them.
        give_memory_back = give_freed_memory_back if self.gate is None else lambda: None
        give_memory_back()
        self.reporter.does(self.member.doing)
        with self.session.heartbeats.computing(self.member.activity), self.session.allowed_to_stop(ahead_of):
            is_over = steps > 0 and self.length.is_over(steps - 1, told=False)  # its group lost a stage afterwards
            while not is_over:
                if self.gate is not None and self.gate.enter(self.reporter.member, under_way):
                    self.length.begin(0.0)
                self.session.stopping.check(self.outer.ranks, ahead_of)
                is_last = self.length.is_last(round_, steps)
                with computing("inner step", self.outer.ranks.device):
                    done = self.member.inner_step(round_, steps, first + steps, bool(is_last))
                self.reporter.tell(inner_step=done)
                if steps == 0:
                    self.session.faults.reached(FaultPhase.TRAINING, round_)
                is_over = self.length.is_over(steps, done.is_last)
                steps += 1
                self.session.heartbeats.progressed()
                self.reporter.links(self.session.ledgers, round_, SECONDS_BETWEEN_LINK_REPORTS)
            self.member.end_inner_loop(round_)
        give_memory_back()
        self.overlapped.trained(round_, inputs)
        self.reporter.does(pb.OUTER_ROUND)
        return InnerLoop(steps, self.member.timing())

    def _evaluate(self, round_: int) -> None:
        self.reporter.does(pb.EVALUATING)
        with self.session.allowed_to_stop(), computing("evaluation", self.outer.ranks.device):
            evaluation = self.member.evaluate(round_)
        if evaluation is not None:
            self.reporter.tell(evaluation=evaluation)

    # ---- saving ----

    def _save_state(self, round_: int, steps: int | None = None) -> None:
        """Save the state after a round. If the disk fails, the member trains on, and reports it.

        With `steps`, the contribution of so many steps is undecided, and the state is that after a round with it.
        """

        def write(folder: Path) -> None:
            self.session.faults.write()
            self.member.save(folder)
            self.session.faults.reached(FaultPhase.SAVING, round_)
            self.outer.save(folder)
            self.steps.save(folder, None if steps is None else (round_, steps))
            if self.outer.own.trained:
                self.overlapped.save(folder)

        awaits, began = None if steps is None else self.outer.feedback.undecided, time.monotonic()
        failure = self.states.save(round_, write, awaits)
        self.seconds_to_save = time.monotonic() - began
        self.reporter.saved(round_, failure, self.outer.ranks.is_first)

    def _save_before_the_end(self) -> None:
        """Save the state after the last closed round, if it is not saved yet. The round in progress is dropped."""
        if self.position is RoundPosition.CATCHING_UP:
            return
        # Others may have finished rounds that this member has not, as it was late. With overlap there are none: a round
        # that was trained ahead depends on the one before as this replica knew it.
        closed = int(max(self.outer.ranks.gather(float(self.session.stopping.closed or 0))))
        last = self.holds if self.session.overlaps else max(self.holds, closed)
        if last == self.holds and (self.holds == 0 or self.states.has(self.holds)):
            return
        if self.position is RoundPosition.IN_ROUND and not self.spec.config.states.undo:
            self.reporter.say("states.undo is false, so no state can be saved within a round")
            return
        self._undo_round()
        self.outer.feedback.take_back()
        try:
            if settled := self.states.settled_in(range(self.holds + 1, last + 1), self.session):
                self.load(settled)
            self._catch_up(last)
        except (Suspended, IncarnationOver, LinkError) as error:
            self.reporter.say(f"its state was not saved: {error}")
            return
        self.reporter.flush(lambda: True)
        if not self.states.has(self.holds):
            self._save_state(self.holds)
