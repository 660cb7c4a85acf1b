"""Inner loops of groups that share a line, such as two groups with a stage each in one house: timed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet, limited_lines
from hetero_pp.simulator.pipeline import DRAWN_WITH_LINES, Array, GroupClock, Timed, step_programs, time_events


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
