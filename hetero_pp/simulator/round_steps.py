"""How many inner steps a round has in each group: as many as the YAML says, or as fit into the time that it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_pp.errors import ConfigError
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet
from hetero_pp.simulator.neighbours import inner_loops
from hetero_pp.simulator.pipeline import Array, GroupClock

PROBED = 17
"""Steps of which the first is timed alone, as nothing of another precedes it, and of the rest the mean."""


@dataclass(frozen=True)
class RoundSteps:
    """Of the groups of a fleet in a round, [G] each."""

    counts: Array
    """Whole numbers, at least 1."""
    a_step: Array | None
    """Seconds of a step after the first; None where all groups have as many."""

    @property
    def of_first(self) -> int:
        """Of the group that a timeline shows, for which all are timed."""
        return int(self.counts[0])

    def finish(self, clock: GroupClock) -> None:
        """Bring groups that have another number of steps than the first to where theirs end."""
        if self.a_step is not None:
            clock.shift((self.counts - self.of_first) * self.a_step)


@dataclass(frozen=True)
class SoManySteps:
    """H in all groups."""

    steps: int
    groups: int

    def within(self, spent: Array) -> RoundSteps:
        """In a round of which so many seconds go to other things: that does not matter."""
        return RoundSteps(np.full(self.groups, self.steps), None)


@dataclass(frozen=True)
class SoMuchTime:
    """As many as fit, [G] each."""

    seconds: float
    first: Array
    a_step: Array

    def within(self, spent: Array) -> RoundSteps:
        """In a round of which so many seconds go to other things: what came before it, and contributing to it."""
        counts = 1 + np.floor((self.seconds - spent - self.first) / self.a_step + 1e-9)
        return RoundSteps(np.maximum(counts, 1).astype(np.int64), self.a_step)


def round_lengths(
    spec: RunSpec, fleets: Sequence[Fleet], clocks: Sequence[GroupClock]
) -> Sequence[SoManySteps | SoMuchTime]:
    """Of every fleet. Where a round is time, some steps are timed on the clocks, which must be new.

    Raises ConfigError for steps that take no time, of which any number fits.
    """
    inner = spec.config.inner
    if inner.steps is not None:
        return [SoManySteps(inner.steps, fleet.count) for fleet in fleets]
    assert inner.seconds is not None
    found = []
    for ends in inner_loops(spec, fleets, clocks, [PROBED] * len(fleets)):
        a_step = (ends[-1] - ends[0]) / (PROBED - 1)
        if not np.all(a_step > 0):
            raise ConfigError(
                ("inner", "seconds"),
                "found steps that take 0 s, expected a machine on which they take time: a round has a number of them",
            )
        found.append(SoMuchTime(inner.seconds, ends[0], a_step))
    return found
