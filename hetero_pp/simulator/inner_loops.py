"""Inner loops of a round: the number of steps in each group, and their times.

Groups that share a line, such as two groups with a stage each in one house, are timed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from hetero_pp.core.errors import ConfigError
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet, limited_lines
from hetero_pp.simulator.pipeline import DRAWN_WITH_LINES, Array, GroupClock, Timed, step_programs, time_events

PROBED = 17
"""Steps that are timed for rounds of a given time.

The first counts separately, because no other precedes it; the others count by their mean.
"""

MOST_TIMED = 1000
"""Most steps of a round of a given time that clocks run; the others take the mean."""


@dataclass(frozen=True)
class RoundSteps:
    """Steps of the groups of a fleet in a round, [G] each."""

    counts: Array
    """Whole numbers, at least 1."""
    a_step: Array | None
    """Seconds of a step after the first; None if all groups have the same number of steps."""

    @property
    def timed(self) -> int:
        """Steps that clocks run: those of the first group, which a timeline shows.

        They are at most MOST_TIMED in rounds of a given time, because millions of steps may fit with free links.
        """
        first = int(self.counts[0])
        return first if self.a_step is None else min(first, MOST_TIMED)

    def finish(self, clock: GroupClock) -> None:
        """Shift the groups with another number of steps than was timed to where their own steps end."""
        if self.a_step is not None:
            clock.shift((self.counts - self.timed) * self.a_step)


StepsWithin = Callable[[Array], RoundSteps]
"""Returns a fleet's steps in a round, from the seconds [G] for the work before the inner loop and for contributing."""


def round_lengths(spec: RunSpec, fleets: Sequence[Fleet], clocks: Sequence[GroupClock]) -> Sequence[StepsWithin]:
    """Return the length of every fleet's rounds: the number in the YAML, or as many steps as fit into its time.

    For rounds of a given time, some steps are timed on new `clocks`. Raises ConfigError if steps take no time, because
    then any number fits.
    """
    inner, found = spec.config.inner, list[StepsWithin]()
    if inner.steps is not None:
        return [partial(_given, np.full(fleet.count, inner.steps)) for fleet in fleets]
    assert inner.seconds is not None
    for ends in inner_loops(spec, fleets, clocks, [PROBED] * len(fleets)):
        a_step = (ends[-1] - ends[0]) / (PROBED - 1)
        if not np.all(a_step > 0):
            raise ConfigError(
                ("inner", "seconds"),
                "found steps that take 0 s, expected a machine with a finite speed: `inner.seconds` has "
                "to give a number of steps",
            )
        found.append(partial(_fitting, inner.seconds, ends[0], a_step))
    return found


def _given(counts: Array, spent: Array) -> RoundSteps:
    return RoundSteps(counts, None)


def _fitting(seconds: float, first: Array, a_step: Array, spent: Array) -> RoundSteps:
    """Return the steps that fit into a round of `seconds`, if `spent` seconds [G] go to other things."""
    counts = 1 + np.floor((seconds - spent - first) / a_step + 1e-9)
    return RoundSteps(np.maximum(counts, 1).astype(np.int64), a_step)


def inner_loops(
    spec: RunSpec, fleets: Sequence[Fleet], clocks: Sequence[GroupClock], steps: Sequence[int]
) -> list[list[Array]]:
    """Advance all clocks by the inner steps of each fleet, and the flush.

    Returns the times when each group's first stage completed each optimizer step. For groups that share a line, at most
    DRAWN_WITH_LINES steps are timed. The others take their mean, as if all groups went on for as long as the slowest.
    """
    found: dict[int, list[Array]] = {}
    for cluster in _clusters(spec, fleets, clocks):
        if len(cluster) == 1:
            found[cluster[0]] = clocks[cluster[0]].inner_loop(steps[cluster[0]])
        else:
            names = [fleets[one].replica.name for one in cluster]
            ends = _together(spec, names, [clocks[one] for one in cluster], [steps[one] for one in cluster])
            found |= zip(cluster, ends, strict=True)
    return [found[index] for index in range(len(clocks))]


def _clusters(spec: RunSpec, fleets: Sequence[Fleet], clocks: Sequence[GroupClock]) -> list[list[int]]:
    """Return groups that share a line, directly or through others; every other group stands alone."""
    found: list[tuple[set[str], list[int]]] = []
    for index, (fleet, clock) in enumerate(zip(fleets, clocks, strict=True)):
        places = limited_lines(spec, fleet.replica)
        hops = clock.groups.activations.lines + clock.groups.gradients.lines
        lines = {places[place][0].name for passed in hops for place in passed}
        touched = [one for one in found if one[0] & lines]
        found = [one for one in found if not one[0] & lines]
        found.append(
            (lines.union(*(one[0] for one in touched)), sorted(sum((one[1] for one in touched), start=[index])))
        )
    return [members for _, members in found]


def _together(
    spec: RunSpec, names: Sequence[str], clocks: Sequence[GroupClock], steps: Sequence[int]
) -> list[list[Array]]:
    """Time the inner loops of several groups, one from each fleet. Returns the ends of optimizer steps by group."""
    replicas = {replica.name: replica for replica in spec.config.replicas}
    lines = [limited_lines(spec, replicas[name]) for name in names]
    every = {(line.name, way): line.bandwidth(way) or np.inf for own in lines for line, way in own}
    place_of = {name: place for place, name in enumerate(every)}
    offsets = [0, *accumulate(clock.groups.stages for clock in clocks)]
    groups = [
        Timed(
            clock,
            0,
            clock.groups.forward,
            {"activation": clock.groups.activations, "gradient": clock.groups.gradients},
            offset,
            [place_of[line.name, way] for line, way in own],
        )
        for clock, own, offset in zip(clocks, lines, offsets, strict=False)
    ]
    shapes = [(one.groups.stages, one.groups.micro_batches, one.groups.extra_in_flight) for one in clocks]
    programs = [program for shape in shapes for program in step_programs(*shape)]
    timed = min(*steps, DRAWN_WITH_LINES)
    run = time_events(groups, list(every.values()), programs, steps=timed, first=offsets[:-1])
    found = []
    for group, own_steps in zip(groups, steps, strict=True):
        ends = run.step_ends[group.offset]
        mean = (ends[-1] - ends[0]) / (timed - 1) if timed > 1 else 0.0
        ends += [ends[-1] + mean * (step + 1) for step in range(own_steps - timed)]
        group.clock.free[0] = ends[-1]
        group.clock.flush()
        found.append([np.array([end]) for end in ends])
    return found
