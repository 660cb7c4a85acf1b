"""The learning rate of every inner step: by the steps of the run, or by the share of its rounds that is over.

It rises linearly and then falls as a cosine (Het-PP Table 9). Where a round is so many steps, it follows them. Where it
is so much time, replicas take unequal numbers of steps, none of which is known beforehand, so it follows the rounds:
after s of the S steps that a replica expects to take in round t of T, it is that of t - 1 + s / S rounds. With S steps
in every round of every replica both are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

STEPS_TO_THE_MIDDLE = 10
"""Where it is not known how many steps fit into a round, it counts as half over after so many."""


class LearningRates(Protocol):
    """The rate of any step of a round."""

    def at(self, step: int) -> float:
        """Of step `step`, which counts the replica's steps over the run, from 0."""


@dataclass(frozen=True)
class BySteps:
    """Of a run whose rounds are all of so many steps."""

    peak: float
    final_share: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """See LearningRates."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return _fallen(self.peak, self.final_share, share)


@dataclass(frozen=True)
class ByRounds:
    """Of one round of a run whose rounds are so much time."""

    peak: float
    final_share: float
    warmup_rounds: float
    total_rounds: int
    """T."""
    round: int
    """t, from 1."""
    first: int
    """The number of the round's first step, over the run."""
    expected: int | None
    """S: steps that the replica took in the last round that counted it; None if none did."""

    def at(self, step: int) -> float:
        """See LearningRates. While it rises it is that of the step's end: the first step has one, too."""
        taken = step - self.first
        over = self._over(taken)
        if over < self.warmup_rounds:
            return self.peak * min(1.0, self._over(taken + 1) / self.warmup_rounds)
        left = self.total_rounds - self.warmup_rounds
        return _fallen(self.peak, self.final_share, (over - self.warmup_rounds) / left if left > 0 else 1.0)

    def _over(self, taken: int) -> float:
        """Rounds that are over after so many steps of this one, which is not over before it ends."""
        share = taken / (self.expected if self.expected is not None else taken + STEPS_TO_THE_MIDDLE)
        return min(self.round - 1 + share, math.nextafter(self.round, 0.0))


def _fallen(peak: float, final_share: float, share: float) -> float:
    """A cosine from the peak down to the final share of it."""
    return peak * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
