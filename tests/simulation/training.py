"""Joint training of a replica's slots: all of them train in one round and generation, or none does.

The first stage applies a step first. When a training ends early, later stages may lack one step, for which they have
the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.violation import Violation

from hetero_pp.messages.messages_pb2 import KeptSteps

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

REMEMBERED = 8


class Training:
    """One inner loop of a whole replica, or the rest of one within which it resumed."""

    def __init__(self, world: World, number: int, first: int, seconds: float) -> None:
        dice = world.dice
        self.world, self.number, self.first, self.seconds = world, number, first, seconds
        ends_at_once = first > 0 and dice.random() < 0.3
        self.began, self.steps = world.timeline.now, first + (0 if ends_at_once else dice.randint(10, 60))
        self.parts: list[tuple[Member, int]] = []
        self.is_over = False
        """Whether a member has left, so that the others wait in vain."""
        self._applied: int | None = None
        """Steps of the round that the first stage has applied, once a member has left."""
        self._lacks_from = self._has_next_from = 0
        """Stage from which on stages lack the last of them, and from which on stages have gradients of one more."""

    def leave(self, member: Member) -> KeptSteps | None:
        """Let a member leave; return the steps that it keeps, or None if it has none."""
        stages, dice = self.world.slots_of[member.replica], self.world.dice
        if self._applied is None:
            share = (self.world.timeline.now - self.began) / self.seconds
            self._applied = self.first + int(min(1.0, share) * (self.steps - self.first))
            self._lacks_from, self._has_next_from = dice.randint(1, len(stages)), dice.randint(1, len(stages))
        stage, applied = stages.index(member.slot), self._applied
        kept = KeptSteps(round=member.round, generation=member.generation, applied=applied)
        kept.restarts.extend(member.restarts)
        if applied == self.first:
            if member.kept is not None and self._has_next_from == len(stages):
                return member.kept
            # Gradients of one more step have passed all stages, so that those which resumed have applied the last one.
            kept.has_next = stage >= self._has_next_from
            return kept if kept.has_next or member.kept is not None else None
        if stage >= self._lacks_from:
            kept.applied, kept.has_next = applied - 1, True
        else:
            kept.has_next = stage >= self._has_next_from
        return kept

    @property
    def is_stuck(self) -> bool:
        """Whether the training makes no progress."""
        return self.is_over or any(member.hangs for member, _ in self.parts)


class Trainings:
    """Members that are ready to train, by replica, round and generation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._gathering: dict[tuple[str, int, int], dict[str, tuple[Member, int]]] = {}
        dice = world.dice
        self._seconds = {replica: dice.uniform(5.0, 20.0) for replica in world.rules.replicas}
        self._straggles = 0.03 if dice.random() < 0.5 else 0.0

    def join(self, member: Member) -> None:
        """Note that a member is ready, and begin once all members of its replica are."""
        key = member.replica, member.round, member.generation
        parts = self._gathering.setdefault(key, {})
        parts[member.slot] = member, member.attempt
        ready = [(one, attempt) for one, attempt in parts.values() if one.attempt == attempt and not one.dead]
        if len(ready) == len(self._world.slots_of[member.replica]):
            del self._gathering[key]
            self._begin(member.replica, ready)
        elif len(self._gathering) > REMEMBERED * len(self._seconds):
            del self._gathering[next(iter(self._gathering))]

    def _begin(self, replica: str, ready: list[tuple[Member, int]]) -> None:
        dice = self._world.dice
        seconds = self._seconds[replica] * dice.uniform(0.8, 1.3)
        if self._straggles and dice.random() < self._straggles:
            seconds *= 4
        firsts = {0 if member.resumption is None else member.resumption.step for member, _ in ready}
        if len(firsts) > 1:
            raise Violation(9, f"{replica} begins round {ready[0][0].round} at steps {sorted(firsts)}")
        training = Training(self._world, self._world.next_number(), firsts.pop(), seconds)
        ready.sort(key=lambda one: self._world.slots_of[replica].index(one[0].slot))
        _require_norm(training, [member.kept for member, _ in ready])
        for member, _ in ready:
            member.begin(training)
            training.parts.append((member, member.attempt))
        self._world.timeline.after(seconds, self._end, training)

    def _end(self, training: Training) -> None:
        if any(member.hangs and not member.dead for member, _ in training.parts):
            self._world.timeline.after(10.0, self._end, training)
            return
        if any(member.dead or member.attempt != attempt for member, attempt in training.parts):
            training.is_over = True
            return
        now = self._world.timeline.now
        frozen = max(member.frozen_until for member, _ in training.parts)
        if frozen > now:
            self._world.timeline.after(frozen - now + 1e-2, self._end, training)
            return
        for member, _ in training.parts:
            member.trained(training)


def _require_norm(training: Training, kept: list[KeptSteps | None]) -> None:
    """Require that stages which keep steps have those before the training, or their gradients and get the norm."""
    own = [one for one in kept if one is not None]
    for one in own:
        if one.applied != training.first and (one.applied != training.first - 1 or not one.has_next):
            raise Violation(9, f"a stage that has applied {one.applied} steps resumes at step {training.first}")
    if own and own[0].applied != training.first:
        raise Violation(9, f"no stage knows the norm of the step before step {training.first}")
