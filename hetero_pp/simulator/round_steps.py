"""Number of inner steps of a round in each group: the number in the YAML, or as many as fit into its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero_pp.core.errors import ConfigError
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet
from hetero_pp.simulator.neighbours import inner_loops
from hetero_pp.simulator.pipeline import Array, GroupClock

PROBED = 17
"""Steps that are timed. The first counts separately, because no other precedes it; the others count by their mean."""


@dataclass(frozen=True)
class RoundSteps:
    """Steps of the groups of a fleet in a round, [G] each."""

    counts: Array
    """Whole numbers, at least 1."""
    a_step: Array | None
    """Seconds of a step after the first; None if all groups have the same number of steps."""

    @property
    def of_first(self) -> int:
        """Steps of the first group. A timeline shows this group, and the clocks run its number of steps."""
        return int(self.counts[0])

    def finish(self, clock: GroupClock) -> None:
        """Shift the groups with another number of steps than the first to where their own steps end."""
        if self.a_step is not None:
            clock.shift((self.counts - self.of_first) * self.a_step)


@dataclass(frozen=True)
class SoManySteps:
    """Rounds of H steps in all groups."""

    steps: int
    groups: int

    def within(self, spent: Array) -> RoundSteps:
        """Return the steps of a round. The seconds `spent` on other things do not matter."""
        return RoundSteps(np.full(self.groups, self.steps), None)


@dataclass(frozen=True)
class SoMuchTime:
    """Rounds of a given time, with as many steps as fit, [G] each."""

    seconds: float
    first: Array
    a_step: Array

    def within(self, spent: Array) -> RoundSteps:
        """Return the steps that fit into a round if `spent` seconds go to the work before it and to contributing."""
        counts = 1 + np.floor((self.seconds - spent - self.first) / self.a_step + 1e-9)
        return RoundSteps(np.maximum(counts, 1).astype(np.int64), self.a_step)


def round_lengths(
    spec: RunSpec, fleets: Sequence[Fleet], clocks: Sequence[GroupClock]
) -> Sequence[SoManySteps | SoMuchTime]:
    """Return the round length of every fleet. For rounds of a given time, some steps are timed on new `clocks`.

    Raises ConfigError if steps take no time, because then any number fits.
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
                "found steps that take 0 s, expected a machine with a finite speed: `inner.seconds` has "
                "to give a number of steps",
            )
        found.append(SoMuchTime(inner.seconds, ends[0], a_step))
    return found
