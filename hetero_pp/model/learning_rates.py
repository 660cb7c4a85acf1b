"""Learning rate of every inner step, as a function of the steps of the run, or of the share of its rounds that is over.

It rises linearly and then falls as a cosine (Het-PP Table 9). If a round has a number of steps, the rate follows the
steps. A replica that takes fewer of them has the rate of the same share of the round. If a round lasts a given time,
replicas take different numbers of steps, which are not known beforehand. Then the rate follows the rounds. Let a
replica expect S steps in round t of T. After s of these steps, the rate is that of t - 1 + s / S rounds. With S steps
in every round of every replica both are the same.

If the run ends after a number of tokens, T follows from the record before the round. With a share p of these tokens
after t - 1 rounds, T = (t - 1) / p. The share of the rounds that is over, (t - 1) / T, is then p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

STEPS_TO_THE_MIDDLE = 10  # steps after which a round counts as half over, if the number of steps that fit is not known


class LearningRates(Protocol):
    """Learning rate of any step of a round."""

    def at(self, step: int) -> float:
        """Return the rate of a step; `step` counts the replica's steps over the run, from 0."""


@dataclass(frozen=True)
class BySteps:
    """Learning rates of a run whose rounds have a fixed number of steps."""

    peak: float
    final_share: float
    warmup_steps: float  # a whole number, unless the replica takes fewer steps in a round than others
    total_steps: float

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return min(self.peak, self.peak * (step + 1) / self.warmup_steps)
        share = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return _fallen(self.peak, self.final_share, share)


@dataclass(frozen=True)
class ByRounds:
    """Learning rates of one round that lasts a given time."""

    peak: float
    final_share: float
    warmup_rounds: float
    total_rounds: float  # T; estimated from the tokens so far if the run ends after a number of tokens
    round: int  # t, from 1
    first: int  # number of the round's first step, counted over the run
    expected: int | None  # S: steps that the replica took in the last round that included it; None if there is none

    def at(self, step: int) -> float:
        """Return the rate of a step.

        During warm-up it is the rate at the step's end, so that the first step is not 0.
        """
        taken = step - self.first
        over = self._over(taken)
        if over < self.warmup_rounds:
            return self.peak * min(1.0, self._over(taken + 1) / self.warmup_rounds)
        left = self.total_rounds - self.warmup_rounds
        return _fallen(self.peak, self.final_share, (over - self.warmup_rounds) / left if left > 0 else 1.0)

    def _over(self, taken: int) -> float:
        """Return the rounds that are over after `taken` steps of this one; always less than `round`."""
        share = taken / (self.expected if self.expected is not None else taken + STEPS_TO_THE_MIDDLE)
        return min(self.round - 1 + share, math.nextafter(self.round, 0.0))


def _fallen(peak: float, final_share: float, share: float) -> float:
    """Return the value of a cosine from the peak down to its final share."""
    return peak * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
