"""Length of a round's inner loop: a number of steps, the steps that fit into a time, or the steps of a record.

The first stage decides before a step begins, because the later stages learn it from the step's first activation.
"""

from __future__ import annotations

from collections.abc import Callable

from hetero_pp.run.spec import MemberSpec, RunSpec
from replica_groups.engines.ranks import Ranks

StepsOf = Callable[[str, int], int]
"""Function (replica, round) -> number of inner steps that the replica took in the round."""


class RoundLength:
    """Decides the end of an inner loop. A member asks before and after every inner step.

    This one is for later stages: it ends the inner loop when the previous stage announces the last step.
    """

    def begin(self, elapsed: float) -> None:
        """Note that the member starts a round, `elapsed` seconds after it was opened."""

    def contributed(self, seconds: float) -> None:
        """Note that a contribution was handed in, `seconds` after the last step of its round."""

    def is_last(self, round_: int, step: int) -> bool | None:
        """Return whether the step that begins now, counted from 0 in its round, is the last; None if unannounced."""
        return None

    def is_over(self, step: int, told: bool) -> bool:
        """Return whether the inner loop ends with a step. `told`: whether the step was announced as the last."""
        return told


class SoManySteps(RoundLength):
    """H steps in every round, known to all members."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_over(self, step: int, told: bool) -> bool:
        return step + 1 == self.steps


class SoMuchTime(RoundLength):
    """As many steps as fit into `seconds` since the round opened, including the time to contribute; at least one.

    All replicas thus contribute at about the same time, however slow their lines are, and none waits for the others.

    A step is the last if it and one more would not fit. Both are assumed to take the average step time of this round,
    or at the first step that of the previous round. In its first round a replica takes at least two steps, because it
    cannot estimate the step time before the second.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._opened = clock()
        self._began = clock()
        self._a_step: float | None = None
        self._to_contribute = 0.0

    def begin(self, elapsed: float) -> None:
        self._opened = self._clock() - elapsed

    def contributed(self, seconds: float) -> None:
        self._to_contribute = seconds

    def is_last(self, round_: int, step: int) -> bool | None:
        now = self._clock()
        if step == 0:
            self._began = now
        else:
            self._a_step = (now - self._began) / step
        left = self.seconds - (now - self._opened) - self._to_contribute
        return self._a_step is not None and 2 * self._a_step > left


class AsRecorded(RoundLength):
    """As many steps in each round as the replica took before, so that a repeated run reproduces the same bits."""

    def __init__(self, replica: str, steps_of: StepsOf) -> None:
        self._replica = replica
        self._steps_of = steps_of

    def is_last(self, round_: int, step: int) -> bool | None:
        return step + 1 >= self._steps_of(self._replica, round_)


class OfFirstRank(RoundLength):
    """Broadcasts the decision of the first rank to all ranks."""

    def __init__(self, length: RoundLength, ranks: Ranks) -> None:
        self._length = length
        self._ranks = ranks

    def begin(self, elapsed: float) -> None:
        self._length.begin(elapsed)

    def contributed(self, seconds: float) -> None:
        self._length.contributed(seconds)

    def is_last(self, round_: int, step: int) -> bool | None:
        decided = bytes([bool(self._length.is_last(round_, step))]) if self._ranks.is_first else None
        return self._ranks.broadcast_bytes(decided) != b"\0"


def round_length(
    spec: RunSpec, member: MemberSpec, clock: Callable[[], float], ranks: Ranks, steps_of: StepsOf | None = None
) -> RoundLength:
    """Return the round length of one member. `steps_of`, if set, gives the number of steps and overrides the clock."""
    inner = spec.config.inner
    if inner.steps is not None:
        return SoManySteps(inner.steps)
    if member.stage is not None and not member.stage.is_first:
        return RoundLength()
    assert inner.seconds is not None
    own: RoundLength = SoMuchTime(inner.seconds, clock)
    if steps_of is not None:
        own = AsRecorded(member.replica.name, steps_of)
    return own if ranks.world == 1 else OfFirstRank(own, ranks)
