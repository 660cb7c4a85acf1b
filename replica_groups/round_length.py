"""How long a round's inner loop is: so many steps, as many as fit into so much time, or as many as a record says.

Who decides says so before a step begins, as the stages after it hear it with the step's first activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hetero_pp.run.spec import MemberSpec, RunSpec
from replica_groups.ranks import Ranks

StepsOf = Callable[[str, int], int]
"""(replica, round) -> how many inner steps it took in it."""


class Clock(Protocol):
    """What time it is."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""


class RoundLength(Protocol):
    """Asked before and after every inner step of a member."""

    def begin(self, elapsed: float) -> None:
        """A round begins here, so many seconds after it was opened."""

    def contributed(self, seconds: float) -> None:
        """What a round came to was handed in, which took so long after its last step."""

    def is_last(self, round_: int, step: int) -> bool | None:
        """Whether the step that begins now, counted from 0 within its round, is the last; None if that is not told."""

    def is_over(self, step: int, told: bool) -> bool:
        """Whether the round's inner loop ends with a step; `told`: whether the step was told to be the last."""


class SoManySteps:
    """H steps, which everybody knows."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def begin(self, elapsed: float) -> None:
        """See RoundLength: that does not matter."""

    def contributed(self, seconds: float) -> None:
        """See RoundLength: nor does that."""

    def is_last(self, round_: int, step: int) -> bool | None:
        """See RoundLength: nobody has to be told."""
        return None

    def is_over(self, step: int, told: bool) -> bool:
        """See RoundLength."""
        return step + 1 == self.steps


class AsTold:
    """Of a stage that hears it from the one before."""

    def begin(self, elapsed: float) -> None:
        """See RoundLength: that does not matter."""

    def contributed(self, seconds: float) -> None:
        """See RoundLength: nor does that."""

    def is_last(self, round_: int, step: int) -> bool | None:
        """See RoundLength: the step itself tells it."""
        return None

    def is_over(self, step: int, told: bool) -> bool:
        """See RoundLength."""
        return told


class SoMuchTime(AsTold):
    """As many steps as fit into so many seconds since the round opened, with what it takes to contribute; at least one.

    So all replicas have contributed at about the same time, however slow their lines are, and nobody waits for others.

    A step is the last if another one after it would not fit, if both take as long as those of this round did on
    average, or at its start those of the round before. In its first round a replica takes at least two steps, as
    it does not know before the second how long one takes.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds = seconds
        self._clock = clock
        self._opened = clock.now()
        self._began = clock.now()
        self._a_step: float | None = None
        self._to_contribute = 0.0

    def begin(self, elapsed: float) -> None:
        """See RoundLength."""
        self._opened = self._clock.now() - elapsed

    def contributed(self, seconds: float) -> None:
        """See RoundLength."""
        self._to_contribute = seconds

    def is_last(self, round_: int, step: int) -> bool | None:
        """See RoundLength."""
        now = self._clock.now()
        if step == 0:
            self._began = now
        else:
            self._a_step = (now - self._began) / step
        left = self.seconds - (now - self._opened) - self._to_contribute
        return self._a_step is not None and 2 * self._a_step > left


class AsRecorded(AsTold):
    """As many steps as the replica took before, in each round: with them a run comes to the same bits again."""

    def __init__(self, replica: str, steps_of: StepsOf) -> None:
        self._replica = replica
        self._steps_of = steps_of

    def is_last(self, round_: int, step: int) -> bool | None:
        """See RoundLength."""
        return step + 1 >= self._steps_of(self._replica, round_)


class OfFirstRank(AsTold):
    """What the first of several ranks decides, on all of them."""

    def __init__(self, length: RoundLength, ranks: Ranks) -> None:
        self._length = length
        self._ranks = ranks

    def begin(self, elapsed: float) -> None:
        """See RoundLength."""
        self._length.begin(elapsed)

    def contributed(self, seconds: float) -> None:
        """See RoundLength."""
        self._length.contributed(seconds)

    def is_last(self, round_: int, step: int) -> bool | None:
        """See RoundLength."""
        decided = bytes([bool(self._length.is_last(round_, step))]) if self._ranks.is_first else None
        return self._ranks.broadcast_bytes(decided) != b"\0"


def round_length(
    spec: RunSpec, member: MemberSpec, clock: Clock, ranks: Ranks, steps_of: StepsOf | None = None
) -> RoundLength:
    """Of one member's rounds. With `steps_of` a replica takes as many steps as that says, whatever the clock does."""
    inner = spec.config.inner
    if inner.steps is not None:
        return SoManySteps(inner.steps)
    if member.stage is not None and not member.stage.is_first:
        return AsTold()
    assert inner.seconds is not None
    own: RoundLength = SoMuchTime(inner.seconds, clock)
    if steps_of is not None:
        own = AsRecorded(member.replica.name, steps_of)
    return own if ranks.world == 1 else OfFirstRank(own, ranks)
