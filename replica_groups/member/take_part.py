"""One member's part in a run, from joining to the last round; the same in a process, on ranks and in a thread.

`take_part` agrees with the run, joins it and builds the trainer. Then, for each round that is assigned to the member,
TrainingLoop

    reaches its start     catches up with rounds that closed without the member, and forms links to its neighbours
    trains                the inner steps
    synchronises          contributes, waits for the record and applies it (OuterRound); with overlap, it trains the
                          next round while the contribution is in transit
    finishes              evaluates, reports and saves

and returns to the start of the round if its replica reforms or its incarnation is over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

from hetero_pp.config.checkpoint import BASIS, MOMENTUM, momentum_of
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import exchange_link_name
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.core.device import computing, name_of, peak_bytes, use
from hetero_pp.core.errors import IncarnationOver, LinkError, PeerAtFault, Stopped, Suspended
from hetero_pp.core.files import keep_trying
from hetero_pp.data.sources import Source, open_source, tokens_digest
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import (
    AssignReply,
    Computes,
    Doing,
    Evaluation,
    LinkUse,
    MemberRound,
    RoundRecord,
    StateSaving,
)
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.rpc.memory import give_freed_memory_back
from hetero_pp.store.faults import NO_FAULTS, FaultPhase, Faults
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.member.audit_hook import NOT_AUDITED, AuditedMember, MemberAudit
from replica_groups.member.gate import Gate
from replica_groups.member.inner_loops import (
    InnerLoop,
    OverlappedRound,
    RoundInputs,
    RoundLength,
    StepsOf,
    StepsTaken,
    round_length,
)
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.reporter import Reporter
from replica_groups.member.saved_states import SavedStates, StateCopies, newest_usable_state
from replica_groups.member.session import Connections, ExchangeLine, Links, MemberSession
from replica_groups.member.stopping import NEVER_STOPPED, Stopping
from replica_groups.member.trainers import Start, TrainingMember, build_member
from stages.worker import Timing

SECONDS_BETWEEN_LINK_REPORTS = 0.5


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
    failed here or elsewhere. `gate`, if set, delays each round until it is open. `steps_of`, if set, replaces the clock
    in rounds of a fixed time (`round_length`). `faults` are injected. `stopping` asks to save the state and leave.
    `audited` makes the member's part in the audits of the run.
    """

    def say(line: str) -> None:
        print(f"{member.name}: {line}", file=sys.stderr, flush=True)

    config, name, replica = spec.config, member.name, member.replica.name
    use(ranks.device)
    line = ExchangeLine(spec.links[exchange_link_name(name)], config.seed, connections.lines)
    exchange = connections.exchange if ranks.is_first else None
    overlaps = bool(config.outer.overlap)
    session = MemberSession(
        exchange, name, replica, line=line, ranks=ranks, stopping=stopping, faults=faults, overlaps=overlaps
    )

    # What every member of a run has to have in common is compared before it takes a slot.
    reads = member.reads_data and config.rehearsal is None
    source = keep_trying(lambda: open_source(config.data, folder.cache), say) if reads else None
    session.run = session.agree(name, spec.agreed, tokens_digest(source))
    copies = None
    if ranks.is_first and config.states.to == "store":  # another machine may take over the slot
        copies = StateCopies(config.store.open(config.name, folder.log), name)
    states = SavedStates(folder.state(name), session.run, config.states_every, ranks, copies)
    available, address = states.find(), connections.listen()

    with session.joined(address, available, Links(member, connections, line)):
        saved = newest_usable_state(session, states, available)
        spec = spec.with_changes(session.changes())
        # A thread shares its output with all members, so it does not tell how long the checkpoint took to read.
        trainer, outer, holds = _build(spec, member, session, source, folder.path, say if gate is None else None)
        reporter = Reporter(session, name)
        reporter.tell(computes=Computes(device=name_of(ranks.device)))
        steps = StepsTaken(replica, config.inner.steps)
        length = round_length(spec, member, time.monotonic, ranks, steps_of)
        states = replace(states, every=spec.latest.states_every)
        loop = TrainingLoop(
            trainer,
            outer,
            session,
            reporter,
            states,
            length,
            steps,
            gate=gate,
            faults=faults,
            stopping=stopping,
            undoes=config.states.undo,
            audit=audited(spec, folder, session, trainer, outer, steps),
        )
        if saved is not None:
            loop.load(saved)
        stopping.listen()
        try:
            loop.run(holds, saved, spec)
            if copies is not None:
                copies.drain()
        except Stopped:
            stopping.leave()
            raise
        finally:
            stopping.end()  # a member that fails ends soon after a signal: see there
            if copies is not None:
                copies.end()
            reporter.close()


def _build(
    spec: RunSpec,
    member: MemberSpec,
    session: MemberSession,
    source: Source | None,
    folder: Path,
    tell: Callable[[str], None] | None,
) -> tuple[TrainingMember, OuterRound, int]:
    """Build the trainer and the outer round from the newest run checkpoint; return them and its round.

    `tell` is given how long it took to read the checkpoint. In a rehearsal nothing is read.
    """
    round_, names = session.newest_checkpoint()
    if spec.config.rehearsal is not None:
        from replica_groups.member.rehearsed import build_rehearsed  # a run that trains does not need it

        return *build_rehearsed(spec, member, session), round_
    held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    basis = [] if spec.largest_rank is None else [BASIS]
    began = time.monotonic()
    tensors = session.checkpoint([*held, *basis, *momentum_of(names, held)], round_)
    if tell is not None:
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        tell(f"read {n_bytes:,} bytes of the run checkpoint after round {round_} in {time.monotonic() - began:.2f} s")
    start = Start({name: tensors[name] for name in held}, tensors.get(BASIS))
    trainer = build_member(spec, member, start, LinkEnds(), source, session.ranks, folder)
    keeps_undo = member.stage is not None or spec.config.states.undo or spec.config.outer.keep_local
    optimizer = round_optimizer(spec, start.basis)
    outer = OuterRound(session, trainer.parameters, start.parameters, spec.config.outer, optimizer, keeps_undo, folder)
    if round_ > 0:
        momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in momentum_of(names, held)}
        outer.reset(start.parameters, momentum, round_)
    return trainer, outer, round_


class _RoundPosition(Enum):
    """Where a member is between the rounds `holds` and `holds + 1`."""

    CATCHING_UP = auto()  # theta, moments and error feedback may belong to different rounds
    AT_START = auto()  # theta, moments and error feedback are those after round `holds`
    IN_ROUND = auto()  # the next round has begun; `undo` returns to its start


class TrainingLoop:
    """Runs a member's rounds, and recovers when its replica reforms or its incarnation is over."""

    def __init__(
        self,
        member: TrainingMember,
        outer: OuterRound,
        session: MemberSession,
        reporter: Reporter,
        states: SavedStates,
        length: RoundLength,
        steps: StepsTaken,
        gate: Gate | None = None,
        faults: Faults = NO_FAULTS,
        stopping: Stopping = NEVER_STOPPED,
        undoes: bool = True,
        audit: MemberAudit = NOT_AUDITED,
    ) -> None:
        """Create the loop of one member.

        `gate` is asked before every inner step, by members that are threads; reports are delivered before each round.
        `undoes`: whether the member can restore the moments from the start of a round.
        """
        self.member, self.outer, self.session, self.reporter = member, outer, session, reporter
        self.states, self.length, self.steps, self.gate = states, length, steps, gate
        self.faults, self.stopping, self._undoes, self.audit = faults, stopping, undoes, audit
        self.holds = 0  # round after which the member holds theta
        self._unsaved = 0  # number of consecutive checkpoints that could not be saved
        self._seconds_to_save = 0.0  # duration of the newest save
        self._saved: int | None = None  # round of the loaded saved state, until the rounds since then are caught up
        self._has_started = False  # whether a round was reached since this process started
        self._position = _RoundPosition.CATCHING_UP
        self.overlapped = OverlappedRound()

    def load(self, saved: int) -> None:
        """Restore the saved state after round `saved`. Theta and the outer optimizer stay as they are."""
        folder = self.states.path(saved)
        self.member.load(folder)
        self.outer.load(folder)
        self.outer.restore()
        self.steps.load(folder)
        self.overlapped.load(folder)

    def run(self, holds: int, saved: int | None, spec: RunSpec) -> None:
        """Train until the run is over, from theta after round `holds` and the saved state after round `saved`."""
        self.holds, self._saved = holds, saved
        try:
            while (work := self._ask()).round:
                try:
                    if work.changed != spec.changes.mark:
                        spec = spec.with_changes(self.session.changes())
                    self._reach(work, spec.config.checkpoints.every)
                    self._train_round(work, spec)
                except (Suspended, IncarnationOver, LinkError) as error:
                    self._return(error)
                self.stopping.check(self.outer.ranks)
            self.audit.wait(self._allowed_to_stop())
        except Stopped:
            self._save_before_the_end()
            raise
        self.session.heartbeats.finished()
        over = self.reporter.new()
        over.finished.SetInParent()
        self.reporter.send(over)

    def _ask(self) -> AssignReply:
        self.reporter.does(Doing.WAITING_FOR_ROUND)
        work = self.session.ask(self.holds, self.outer.own.beyond(self.holds))
        if work.HasField("shows"):
            self.audit.show(work.shows)
        return work

    # ---- where a round starts ----

    def _reach(self, work: AssignReply, checkpoints_every: int) -> None:
        """Bring the member to the start of the assigned round."""
        saves_first = self.states.is_due(work.round) and not self.session.overlaps
        self.length.begin(work.elapsed + (self._seconds_to_save if saves_first else 0.0))
        self.reporter.does(Doing.CATCHING_UP)
        self._position = _RoundPosition.CATCHING_UP
        if work.heals:
            self._heal()
            if self.holds >= work.round:
                raise Suspended(f"round {work.round} closed in the meantime")
        before, is_settled = work.round - 1, self._load_settled(range(self.holds + 1, work.round))
        if before > self.holds + self._has_started and (self._saved is None or is_settled):
            # The member waited for its replica to be complete, or for a round that includes it: a newer run checkpoint
            # takes the place of rounds to replay, whose contributions the log may no longer have.
            newest = self.session.newest_checkpoint()[0]
            least = checkpoints_every if self._has_started else 1
            if self.holds + least <= newest <= before and self.outer.is_settled:
                self._heal()
        missed = range(self.holds + 1, work.round)
        # A contribution restored to error feedback may have been included, if the incarnation ended before the reply.
        self.outer.catch_up(missed, missed if self._saved is None else range(self._saved + 1, work.round))
        self.holds, self._saved = before, None
        self.steps.catch_up(before, self.session.record_of)
        if missed or not self._has_started:
            self.member.start_round(self.outer)
            self._has_started = True
        self._position = _RoundPosition.AT_START
        with self._allowed_to_stop():
            ends = self.session.form(work)
        if ends is not None:
            self.member.relink(ends)
        if work.is_first:
            self._evaluate(before)  # repeated after a resume, as the run may have died before the report
            if before == 0:
                self._report_links(0)

    def _load_settled(self, missed: range) -> bool:
        """Load the pending saved state, if one of the missed rounds includes the contribution that it awaits.

        The member has returned to the start of that round, or is a new process, and the contribution stayed.
        """
        round_ = self.states.pending if missed else 0
        if round_ not in missed:
            return False
        entry = self.session.entry(self.session.record_of(round_))
        if not self.states.settle(round_, entry, reads=True):
            return False
        self.load(round_)
        self._saved = round_
        return True

    def _heal(self) -> None:
        """Recover theta and the outer optimizer's state from the run log."""
        round_, names = self.session.newest_checkpoint()
        kept = momentum_of(names, self.outer.theta)
        tensors = self.session.checkpoint([*self.outer.theta, *kept], round_)
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
        generation = self.session.leave_links(str(error))
        self._undo_round()
        if isinstance(error, LinkError) and generation is not None:
            blames = error.peer if isinstance(error, PeerAtFault) else ""
            with suppress(IncarnationOver):
                self.session.broken(self.session.member, generation, str(error), blames)

    def _undo_round(self) -> None:
        """Return to the start of the round, if one has begun."""
        if self._position is _RoundPosition.IN_ROUND:
            self.outer.undo()
            self.member.undo(self.outer)
            self._position, self.overlapped.loop = _RoundPosition.AT_START, None

    # ---- a round ----

    def _train_round(self, work: AssignReply, spec: RunSpec) -> None:
        round_ = work.round
        if self.gate is not None:
            self.reporter.flush()
        self.faults.touch(self.outer.theta)
        loop = self._inner_loop_of(work, spec)
        started, spent_ahead, self.session.blocked = time.monotonic(), 0.0, 0.0

        def contributed() -> None:
            nonlocal spent_ahead
            self.length.contributed(time.monotonic() - started - (self._seconds_to_save if saves_first else 0.0))
            if self.session.overlaps and round_ < spec.latest.outer.rounds:
                # The inner loop of the next round; `undo` then returns to the beginning of this inner loop.
                spent_ahead = -time.monotonic()
                self.member.remember(ahead=True)
                self.outer.start_ahead()
                trained_ahead = self._train(round_ + 1, round_, self._inputs(round_ + 1, spec))
                self.outer.end_inner_loop(round_ + 1)
                self.overlapped.loop = trained_ahead
                spent_ahead += time.monotonic()

        # A run may be extended after its last round, so that one is always saved.
        is_saved = self.states.is_due(round_) or round_ == spec.latest.outer.rounds
        # With overlap, the state has what is trained ahead while the contribution is in transit.
        saves_first = is_saved and not self.session.overlaps
        before_last = partial(self._save_state, round_, loop.steps) if saves_first else lambda: None
        self.reporter.does(Doing.OUTER_ROUND)
        self.audit.wait(self._allowed_to_stop())  # no round counts a member that owes a checkpoint
        with computing("outer round", self.outer.ranks.device):
            record = self.outer.synchronise(round_, work.generation, loop.steps, contributed, before_last)
        self._position, self.holds = _RoundPosition.AT_START, round_
        is_undone = self.audit.undoes_uncounted and self.session.entry(record) is None
        if is_undone:  # the error feedback is undone, too (OuterRound)
            self.member.undo(self.outer)
        self.steps.end_round(None if is_undone else loop.steps, record)
        self.session.heartbeats.trains(None, work.generation)
        self.member.start_round(self.outer)
        self._finish(record, loop.timing, started + spent_ahead)
        if is_saved:
            self.reporter.flush(lambda: self.stopping.is_asked)  # a run that resumes from here has lost no report
            is_settled = self.states.settle(round_, self.session.entry(record))
            if not is_settled and not (saves_first and self._unsaved):  # the disk took nothing a moment ago
                self._save_state(round_)

    def _inner_loop_of(self, work: AssignReply, spec: RunSpec) -> InnerLoop:
        """Return the inner loop of the assigned round: the one trained ahead if it is valid, else a new one.

        The loop trained ahead is valid if all members of the replica have it, with the learning rates and share that
        apply now.
        """
        round_, ahead, inputs = work.round, self.overlapped.loop, self._inputs(work.round, spec)
        self.overlapped.loop = None
        if work.trained == round_ and self.overlapped.is_valid(round_, inputs):
            if ahead is None:  # it came from a saved state, or the member returned to it: nothing was remembered
                self.member.remember(ahead=True)
            self._position = _RoundPosition.IN_ROUND
            self.session.heartbeats.trains(round_, work.generation)
            return ahead or InnerLoop(spec.config.inner.require_steps("rounds overlap"), Timing())
        if ahead is not None:
            self.member.undo(self.outer)
        self.outer.own.trained.clear()
        self.outer.start_local(round_, work.trained)
        self.audit.begin(round_, work.committed)
        self.member.remember()
        self._position = _RoundPosition.IN_ROUND
        self.session.heartbeats.trains(round_, work.generation)
        loop = self._train(round_, round_, inputs)
        if self.session.overlaps:
            self.outer.end_inner_loop(round_)
        return loop

    def _inputs(self, round_: int, spec: RunSpec) -> RoundInputs:
        """Return the learning rates and the share of a round, as far as they are known."""
        first = self.steps.before(round_)
        return spec.rates_in(round_, first, self.steps.last), spec.share_of(self.session.replica, round_)

    def _train(self, round_: int, under_way: int, inputs: RoundInputs) -> InnerLoop:
        """Train the inner steps of `round_` while `under_way`, the same round or the one before, is in progress."""
        rates, share = inputs
        first, ahead_of = self.steps.before(round_), under_way if under_way < round_ else None
        self.member.follow(rates)
        self.member.take_share(share, first)
        # The outer round and the inner loop free memory of which the other needs other sizes. A thread beside other
        # members leaves this to them.
        if self.gate is None:
            give_freed_memory_back()
        self.reporter.does(self.member.doing)
        with self.session.heartbeats.computing(self.member.activity), self._allowed_to_stop(ahead_of):
            reported, steps, is_over = time.monotonic(), 0, False
            while not is_over:
                if self.gate is not None and self.gate.enter(self.reporter.member, under_way):
                    self.length.begin(0.0)
                self.stopping.check(self.outer.ranks, ahead_of)
                is_last = self.length.is_last(round_, steps)
                with computing("inner step", self.outer.ranks.device):
                    done = self.member.inner_step(round_, steps, first + steps, bool(is_last))
                self.reporter.tell(inner_step=done)
                if steps == 0:
                    self.faults.reached(FaultPhase.TRAINING, round_)
                is_over = self.length.is_over(steps, done.is_last)
                steps += 1
                self.session.heartbeats.progressed()
                if time.monotonic() - reported > SECONDS_BETWEEN_LINK_REPORTS:
                    self._report_links(round_)
                    reported = time.monotonic()
            self.member.end_inner_loop(round_)
        if self.gate is None:
            give_freed_memory_back()
        self.overlapped.trained(round_, inputs)
        self.reporter.does(Doing.OUTER_ROUND)
        return InnerLoop(steps, self.member.timing())

    def _finish(self, record: RoundRecord, spent: Timing, started: float) -> None:
        """Evaluate the result of a round, if the whole replica is still there, and report the times."""
        synchronised, round_ = time.monotonic(), record.round
        times = MemberRound(
            round=round_,
            compute_seconds=spent.compute,
            wait_seconds=spent.waited_previous + spent.waited_next,
            wait_previous_seconds=spent.waited_previous,
            wait_next_seconds=spent.waited_next,
            device_bytes=peak_bytes(self.outer.ranks.device),
            outer_seconds=synchronised - started,
        )
        self.faults.reached(FaultPhase.EVALUATING, round_)
        try:
            self._evaluate(round_)
        except LinkError as error:
            self._return(error)
        times.blocked_seconds, times.evaluation_seconds = self.session.blocked, time.monotonic() - synchronised
        self.member.timing()
        self._report_links(round_)  # first, so that the link use is known once the round is reported
        self.reporter.tell(member_round=times)

    def _evaluate(self, round_: int) -> None:
        self.reporter.does(Doing.EVALUATING)
        with self._allowed_to_stop(), computing("evaluation", self.outer.ranks.device):
            outcome = self.member.evaluate(round_)
        if outcome is not None:
            loss, tokens = outcome
            evaluation = Evaluation(replica=self.session.replica, round=round_, loss=loss, tokens=tokens)
            self.reporter.tell(evaluation=evaluation)

    def _report_links(self, round_: int) -> None:
        for link, direction, ledger in self.session.links.ledgers:
            count = ledger.of_round(round_)
            self.reporter.tell(link_use=LinkUse(link=link, direction=direction, round=round_, **asdict(count)))

    # ---- saving ----

    def _save_state(self, round_: int, steps: int | None = None) -> None:
        """Save the state after a round. If the disk fails, the member trains on and reports it at growing intervals.

        With `steps`, the contribution of so many steps is undecided, and the state is that after a round with it.
        """

        def write(folder: Path) -> None:
            self.faults.write()
            self.member.save(folder)
            self.faults.reached(FaultPhase.SAVING, round_)
            self.outer.save(folder)
            self.steps.save(folder, None if steps is None else (round_, steps))
            if self.outer.own.trained:
                self.overlapped.save(folder)

        awaits, began = None if steps is None else self.outer.feedback.undecided, time.monotonic()
        failure = self.states.save(round_, write, awaits)
        self._seconds_to_save = time.monotonic() - began
        has_failed, self._unsaved = self._unsaved, self._unsaved + 1 if failure else 0
        is_told = has_failed > 0
        if failure:  # the 1st, 2nd, 4th, 8th, ... consecutive failure
            is_told = self._unsaved & (self._unsaved - 1) == 0
            print(f"{self.reporter.member}: its state after round {round_} was not saved: {failure}", file=sys.stderr)
        if is_told and self.outer.ranks.is_first:
            self.reporter.tell(state_saving=StateSaving(round=round_, failure=failure))

    def _save_before_the_end(self) -> None:
        """Save the state after the last closed round, if it is not saved yet. The round in progress is dropped."""
        if self._position is _RoundPosition.CATCHING_UP:
            return
        # Others may have finished rounds that this member has not, as it was late. With overlap there are none: a round
        # that was trained ahead depends on the one before as this replica knew it.
        closed = int(max(self.outer.ranks.gather(float(self.stopping.closed or 0))))
        missed = range(0) if self.session.overlaps else range(self.holds + 1, closed + 1)
        if not missed and (self.holds == 0 or self.states.has(self.holds)):
            return
        if self._position is _RoundPosition.IN_ROUND and not self._undoes:
            print(
                f"{self.reporter.member}: states.undo is false, so no state can be saved within a round",
                file=sys.stderr,
            )
            return
        self._undo_round()
        self.outer.feedback.take_back()
        try:
            for round_ in missed:
                one = range(round_, round_ + 1)
                self.outer.catch_up(one, range(0) if self._load_settled(one) else one)
                self.holds = round_
                self.steps.catch_up(round_, self.session.record_of)
        except (Suspended, IncarnationOver, LinkError) as error:
            print(f"{self.reporter.member}: its state was not saved: {error}", file=sys.stderr, flush=True)
            return
        self.reporter.flush(lambda: True)
        if not self.states.has(self.holds):
            self._save_state(self.holds)

    def _allowed_to_stop(self, round_: int | None = None) -> AbstractContextManager[None]:
        """Allow Stopped at any instruction of a block; not on several ranks, which have to leave it together.

        With `round_` the block trains ahead of that round; see Stopping.allowed.
        """
        return nullcontext() if self.outer.ranks.in_group else self.stopping.allowed(round_)
