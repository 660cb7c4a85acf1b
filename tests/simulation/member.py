"""A process that holds a slot, as a model of replica_groups/member/take_part.py.

Training is modelled by names: each training adds a unit to every position of the parameters.

The model therefore knows exactly what was included, what is in error feedback and what was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulation.stores import THETA, Blob, Kept, Path, State, StoreFailed, Units, digests, included, replayed
from simulation.violation import Violation

from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, KeptSteps, Restart, Resumption
from replica_groups.rounds import events as e

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.training import Training
    from simulation.world import World

POSITIONS = 3
"""Positions per block."""
HEARTBEAT_SECONDS = 4.0
AGAIN_SECONDS = 7.0
"""Seconds after which an unanswered message is sent again."""
PATIENCE_SECONDS = 40.0
"""Seconds to wait for a missing neighbour."""
NOTHING: Units = frozenset()

APPLYING, ASKING, CATCHING_UP, FORMING, TRAINING, DEPOSITING, WAITING, SETTLED, LEAVING = (
    *("applying", "asking", "catching up", "forming", "training"),
    *("depositing", "waiting", "settled", "leaving"),
)
IN_ROUND = frozenset((CATCHING_UP, FORMING, TRAINING, DEPOSITING, WAITING))


@dataclass(frozen=True)
class Contributed:
    """A contribution that is sent or about to be sent, and not yet known to be included."""

    round: int
    generation: int
    steps: int
    blobs: dict[str, Blob]

    @property
    def sent(self) -> dict[int, Units]:
        """The sent units by position."""
        return {position: units for blob in self.blobs.values() for position, units in blob.sent.items()}


class Member:
    """One process of a slot."""

    def __init__(self, world: World, slot: str, number: int, has_state: bool) -> None:
        self.world, self.slot, self.process = world, slot, f"{slot}#{number}"
        self.replica = world.rules.slots[slot]
        self.blocks = sorted(world.rules.blocks[slot])
        self.host: Host | None = None
        self.dead, self.hangs, self.frozen_until, self.cut_until = False, False, 0.0, 0.0
        self.idles_until = 0.0
        """Time until which the member takes every round and contributes nothing."""
        self.stays = world.faults.idles is not None and number % 5 == 0
        """Whether the member stays after the end of the run, until its incarnation ends."""
        self.incarnation, self.round, self.generation, self.attempt = 0, 0, 0, 0
        self.phase, self._since, self._said_at, self._unanswered, self._refusals = APPLYING, 0.0, 0.0, 0, 0
        self.training: Training | None = None
        self.resumption: Resumption | None = None
        """Where the replica resumed within the round; None: it began the round."""
        self.kept: KeptSteps | None = None
        """Steps of the round that the member keeps from earlier generations."""
        self.units: Units = NOTHING
        """The trainings of the round that have changed its parameters."""
        self.base = 0
        """Step of the round at which it began."""
        self.contributed: Contributed | None = None
        self._uploaded: set[str] = set()
        self._gave_up = (0, 0)
        self._saving: State | None = None
        self._progress, self._farewells = 0, 0
        self.is_corrupt, self.wrong_rounds = False, 0
        self.differs = False
        """Whether a coordinator has said that its bits differ, until it recovers."""
        state = world.disks.newest(slot) if has_state else None
        self.holds = 0 if state is None else state.round
        self.error: list[Units] = [NOTHING] * (POSITIONS * len(self.blocks)) if state is None else list(state.error)
        self._start: list[Units] = list(self.error)
        self.owed: list[Units] = list(self.error)
        """Units of error feedback that must be included or still be there when the next record is applied."""
        self.theta = THETA if state is None else world.invariants.theta(state.round)
        self._connect()
        self._enter(APPLYING)
        self._say()
        self.later(world.dice.random() * HEARTBEAT_SECONDS, self._heartbeat)

    # ---- a process ----

    def later(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Do something after so many seconds, if the process still exists."""
        self.world.timeline.after(seconds, self.fire, what, arguments)

    def fire(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Do it now, or once the process is no longer frozen."""
        if self.dead:
            return
        left = self.frozen_until - self.world.timeline.now
        if left > 0:
            self.world.timeline.after(left + 1e-3, self.fire, what, arguments)
        else:
            what(*arguments)

    def die(self) -> None:
        """End the process. This may happen at any instruction."""
        self.dead = True
        if self.training is not None:
            self.training.leave(self)
        if self._saving is not None and self.world.dice.random() < self.world.faults.torn:
            self.world.disks.write(self.slot, None)

    def blocks_in(self, round_: int) -> list[str]:
        """Return the blocks that the slot contributes to a round."""
        return sorted(self.world.rules.fragments.among(self.blocks, round_))

    @property
    def is_well(self) -> bool:
        """Whether the member is free of faults and can do its part."""
        now = self.world.timeline.now
        does_its_part = not self.dead and not self.hangs and now >= self.idles_until
        return does_its_part and now >= self.frozen_until and now >= self.cut_until

    @property
    def restarts(self) -> list[Restart]:
        """Return the restarts of the round, as far as the member was told."""
        return [] if self.resumption is None else list(self.resumption.restarts)

    def _enter(self, phase: str) -> None:
        self.phase, self._since = phase, self.world.timeline.now
        self.attempt += 1
        if self.world.tells is not None:
            self.world.tell(
                f"{self.process}: {phase}, incarnation {self.incarnation}, round {self.round}, "
                f"generation {self.generation}"
            )

    # ---- messages that it sends ----

    def _connect(self) -> None:
        there = [host for host in self.world.hosts if not host.dead]
        self.host = self.world.dice.choice(there) if there else None
        self._unanswered = 0

    def wander(self) -> None:
        """Connect to a random coordinator, and send the current message to it."""
        self._connect()
        self._say()

    def _tell(self, event: e.Event) -> None:
        if self.host is not None and self.world.timeline.now >= self.cut_until:
            self.world.network.send(self.host.receive, self, event)

    def _heartbeat(self) -> None:
        self.later(HEARTBEAT_SECONDS * self.world.dice.uniform(0.8, 1.2), self._heartbeat)
        if self.host is None or self.host.is_away or self.world.timeline.now < self.cut_until:
            self._unanswered += 1
            if self._unanswered > 2 or self.host is None:
                self.wander()
            return
        self._unanswered = 0
        if not self.hangs and not (self.training is not None and self.training.is_stuck):
            self._progress += 1
        if self.incarnation and self.phase != LEAVING:
            is_busy = self.phase in IN_ROUND
            computes = self.phase == TRAINING and (self.hangs or not (self.training and self.training.is_stuck))
            round_, generation = (self.round, self.generation) if is_busy else (None, 0)
            resumption = self.resumption if is_busy else None
            self._tell(e.Heard(self.slot, self.incarnation, round_, generation, self._progress, computes, resumption))
        self._look_around()
        if self.world.timeline.now - self._said_at >= AGAIN_SECONDS:
            self._say()

    def _look_around(self) -> None:
        """Report a broken link if neighbours have been missing for too long."""
        waits = self.phase == FORMING or (
            self.phase == TRAINING and self.training is not None and self.training.is_over
        )
        if waits and not self.hangs and self.world.timeline.now - self._since > PATIENCE_SECONDS:
            self._tell(e.Broken(self.slot, self.incarnation, self.generation, "its neighbour does not answer"))

    def _say(self) -> None:
        """Send the message whose answer the member waits for."""
        self._said_at = self.world.timeline.now
        if self.phase == APPLYING:
            self._tell(e.Applied(self.slot, self.process))
        elif self.phase == ASKING:
            kept = None
            if self.kept is not None:
                kept = KeptSteps()
                kept.CopyFrom(self.kept)  # it may change while the message is under way
            self._tell(e.Asked(self.slot, self.incarnation, self.holds, 0, kept, self.differs))
        elif self.phase in (DEPOSITING, WAITING):
            for block in sorted(self._uploaded):
                self._deposit(block)
            if self.contributed is not None and not self.contributed.blobs and self.host is not None:
                self.world.network.send(self.host.asked_for_record, self)  # it contributes nothing to the round
        elif self.phase == LEAVING:
            self._tell(e.Left(self.slot, self.incarnation))
            self._farewells += 1
            if self._farewells > 2:
                self.world.gone(self)

    def _ask(self) -> None:
        self._enter(ASKING)
        self._say()

    # ---- messages that it receives ----

    def told(self, host: Host, effect: e.Effect) -> None:
        """Handle an answer of the coordinator."""
        if host is not self.host or self.world.timeline.now < self.cut_until or self.phase == LEAVING:
            return
        if self.hangs and not isinstance(effect, e.Fenced):
            return
        match effect:
            case e.Welcome(_, incarnation) if incarnation > self.incarnation:
                self._leave()
                self.incarnation, self._refusals = incarnation, 0
                self._ask()
            case e.Fenced(_, incarnation) if incarnation == self.incarnation:
                self._fenced()
            case e.Suspend(_, incarnation, generation) if (
                incarnation == self.incarnation and self.phase in IN_ROUND and generation >= self.generation
            ):
                self._suspended()
            case e.Assign(_, incarnation) if incarnation == self.incarnation:
                self._assigned(effect)
            case e.Reject(_, _, process, incarnation):
                self._refused(process, incarnation)

    def _fenced(self) -> None:
        if self.hangs:
            self.world.end_hung(self)
            return
        self._leave()
        self.incarnation, self.stays = 0, False
        self._enter(APPLYING)
        self._say()

    def _suspended(self) -> None:
        if self.host is not None and self.phase == WAITING and self.round <= self.world.store.last:
            self.told_of_record(self.host, self.round)  # the round was decided earlier
        else:
            self._leave()
            self._ask()

    def _refused(self, process: str | None, incarnation: int | None) -> None:
        if process == self.process and self.phase == APPLYING:
            self._refusals += 1
            if self._refusals > 3 and any(o is not self and o.slot == self.slot for o in self.world.members):
                self.world.gone(self)  # another process has taken its slot
        elif incarnation == self.incarnation and self.phase in (DEPOSITING, WAITING):
            self._undo()
            self._ask()

    def _assigned(self, effect: e.Assign) -> None:
        if effect.round == 0:
            if self.contributed is None:
                self._undo()
            self.round, self.training, self.resumption = self.world.rounds + 1, None, None
            self._enter(CATCHING_UP)
            self._catch_up(self.attempt, False)
            return
        is_known = self.phase in IN_ROUND and (effect.round, effect.generation) <= (self.round, self.generation)
        if effect.round <= self.holds or is_known:
            return
        if (effect.round, effect.generation) == self._gave_up:
            # Its neighbours may still train what it has abandoned: only a new generation separates the two.
            self._tell(e.Broken(self.slot, self.incarnation, effect.generation, "it has given this round up before"))
            return
        if not self._keeps(effect):
            self.differs |= effect.heal
            if self.contributed is None or self.contributed.round == effect.round:
                self._undo()
            self.kept, self.units, self.base = None, NOTHING, 0
            if effect.resumption is not None:
                self.base = effect.resumption.step
                if not effect.resumption.restarts or (self.slot, self.base) not in [
                    (one.slot, one.step) for one in effect.resumption.restarts
                ]:
                    self._tell(e.Broken(self.slot, self.incarnation, effect.generation, "it has lost its steps"))
                    return
        elif self.kept is not None and effect.resumption is not None:
            self.kept.generation = effect.generation
            del self.kept.restarts[:]
            self.kept.restarts.extend(effect.resumption.restarts)
        self.round, self.generation, self.training = effect.round, effect.generation, None
        self.resumption = effect.resumption
        self._enter(CATCHING_UP)
        self.later(self.world.dice.uniform(0.05, 0.5), self._catch_up, self.attempt, effect.heal)

    def told_that_it_differs(self) -> None:
        """Note that its bits differ, which it tells the coordinator that it asks for work."""
        self.differs = True

    def told_of_record(self, host: Host, round_: int) -> None:
        """Handle the news that a round is decided."""
        if host is self.host and self.phase == WAITING and round_ == self.round and self._settle_until(round_):
            self.training = self.kept = None
            self._enter(SETTLED)
            self.later(self.world.dice.uniform(0.1, 1.0), self._prove, self.attempt)

    # ---- a round ----

    def _keeps(self, work: e.Assign) -> bool:
        """Return whether the member resumes with the steps that it keeps."""
        if self.kept is None or work.resumption is None or self.kept.round != work.round:
            return False
        if not 0 <= work.resumption.step - self.kept.applied <= self.kept.has_next:
            return False
        known, told = (
            [one.slot for one in of].count(self.slot) for of in (self.kept.restarts, work.resumption.restarts)
        )
        return self.kept.generation == work.resumption.generation and known == told

    def _leave(self) -> None:
        """Leave the training or the contribution, which is taken back, and keep the steps of the training."""
        if self.phase == TRAINING and self.training is not None:
            self.kept = self.training.leave(self)
        if self.kept is None:
            self._undo()
        elif self.phase in IN_ROUND and self.phase != CATCHING_UP:
            self._gave_up = (self.round, self.generation)
            if self.phase in (DEPOSITING, WAITING):
                self.error, self.contributed = list(self._start), None
        self.training = None

    def _undo(self) -> None:
        """Return to the start of the round."""
        if self.training is not None:
            self.training.leave(self)
        if self.phase in IN_ROUND and self.phase != CATCHING_UP:
            self.error = list(self._start)
            self._gave_up = (self.round, self.generation)
            self.contributed = None
        self.training, self.kept, self.units = None, None, NOTHING

    def _catch_up(self, attempt: int, heal: bool) -> None:
        if attempt != self.attempt:
            return
        if not self._settle_until(self.round - 1):
            self.later(1.0, self._catch_up, attempt, heal)
            return
        if heal:
            self.theta, self.is_corrupt, self.wrong_rounds = self.world.invariants.theta(self.holds), False, 0
            self.differs = False
        if self.round > self.world.rounds and self.stays:
            self._enter(SETTLED)
            return
        if self.round > self.world.rounds:
            self._enter(LEAVING)
            self._say()
            return
        self._start = list(self.error)
        self._enter(FORMING)
        self.world.trainings.join(self)

    def _settle_until(self, round_: int) -> bool:
        """Apply records up to that of a round. Return whether the store could be read."""
        while self.holds < round_:
            try:
                kept = self.world.store.read(self.holds + 1)
            except StoreFailed:
                return False
            if kept is None:
                raise Violation(1, f"{self.process} needs the record of round {self.holds + 1}, which is not decided")
            self._settle(kept)
        return True

    def _settle(self, kept: Kept) -> None:
        """Apply a round's record.

        Included units of this slot leave error feedback, and excluded units are restored to it.
        """
        own, self.contributed = self.contributed, None
        sent = {} if own is None or own.round != kept.record.round else own.sent
        before = [units | sent.get(position, NOTHING) for position, units in enumerate(self.error)]
        counted = included(kept.record, self.replica)
        if counted is None:
            self._give_back(sent)
        elif own is None or not sent or any(digests(counted)[block] != own.blobs[block].digest for block in own.blobs):
            self._give_back(sent)
            self._drop(kept.record.round, counted)
        self.theta, self.holds = replayed(self.theta, kept), kept.record.round
        self.world.invariants.settled(self, kept.record, before, own)

    def _give_back(self, sent: dict[int, Units]) -> None:
        for position, units in sent.items():
            self.error[position] |= units

    def _drop(self, round_: int, counted: ContributionEntry) -> None:
        """Remove from error feedback what was included from another process of this slot, or from an earlier attempt.

        Otherwise it would be sent again.
        """
        for block in self.blocks_in(round_):
            for position in self.world.store.blobs[
                Path(round_, self.replica, counted.generation, block, digests(counted)[block])
            ].sent:
                self.error[position] = NOTHING

    def begin(self, training: Training) -> None:
        """Begin to train, once all neighbours are ready."""
        self.training, self.units = training, self.units | {training.number}
        self._enter(TRAINING)

    def trained(self, training: Training) -> None:
        """Compress the training and contribute it. Until a record is applied, its steps are kept."""
        self.kept = KeptSteps(round=self.round, generation=self.generation, applied=training.steps)
        self.kept.restarts.extend(self.restarts)
        if self.world.timeline.now < self.idles_until:
            self.contributed, self._uploaded = None, set()
            self._enter(WAITING)
            return
        self._enter(DEPOSITING)
        blobs = {}
        contributes = self.blocks_in(self.round)
        for number, block in enumerate(self.blocks):
            first = POSITIONS * number
            whole = {p: self.error[p] | self.units for p in range(first, first + POSITIONS)}
            if block not in contributes:  # what it has trained of another fragment waits for its round
                self.error[first : first + POSITIONS] = whole.values()
                continue
            chosen = self.world.dice.sample(range(first, first + POSITIONS), self.world.dice.choice((1, 2)))
            steps, sent = max(1, training.steps - self.base), {p: whole[p] for p in chosen}
            blobs[block] = Blob(self.world.next_number(), training.number, self.slot, steps, sent)
            for position, units in whole.items():
                self.error[position] = NOTHING if position in chosen else units
        self.contributed = Contributed(self.round, self.generation, training.steps, blobs)
        self.training, self._uploaded = None, set()
        for block in contributes:
            self.later(self.world.dice.uniform(0.1, 2.0), self._upload, self.attempt, block)
        if not contributes:
            self._enter(WAITING)

    def _upload(self, attempt: int, block: str) -> None:
        if attempt != self.attempt or self.contributed is None:
            return
        try:
            blob = self.contributed.blobs[block]
            self.world.store.put(Path(self.round, self.replica, self.generation, block, blob.digest), blob)
        except StoreFailed:
            self.later(1.0, self._upload, attempt, block)
            return
        self._uploaded.add(block)
        self._deposit(block)
        if len(self._uploaded) == len(self.contributed.blobs):
            self._enter(WAITING)

    def _deposit(self, block: str) -> None:
        own = self.contributed
        assert own is not None
        entry = BlobEntry(block=block, size=own.blobs[block].digest)
        deposited = own.round, own.generation, block, entry, own.steps, self.resumption
        self._tell(e.Deposited(self.slot, self.incarnation, *deposited))

    def _prove(self, attempt: int) -> None:
        """Confirm the parameters, save the state and ask for the next round."""
        if attempt != self.attempt:
            return
        self.world.invariants.confirms(self)
        self._tell(e.Confirmed(self.slot, self.incarnation, self.holds, {"theta": self.theta}))
        if self.holds % self.world.states_every == 0:
            self._saving = State(self.holds, list(self.error))
            self.later(self.world.dice.uniform(0.1, 5.0), self._saved, self._saving)
        self._ask()

    def _saved(self, state: State) -> None:
        self.world.disks.write(self.slot, state)
        if self._saving is state:
            self._saving = None
