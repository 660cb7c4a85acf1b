"""Joint training of a replica's slots: all of them train in one round and generation, or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

REMEMBERED = 8


class Training:
    """One inner loop of a whole replica."""

    def __init__(self, number: int, steps: int, parts: list[tuple[Member, int]]) -> None:
        self.number, self.steps, self.parts = number, steps, parts
        self.is_over = False
        """Whether a member has left, so that the others wait in vain."""

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
        training = Training(self._world.next_number(), dice.randint(10, 60), [])
        for member, _ in ready:
            member.begin(training)
            training.parts.append((member, member.attempt))
        seconds = self._seconds[replica] * dice.uniform(0.8, 1.3)
        if self._straggles and dice.random() < self._straggles:
            seconds *= 4
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
