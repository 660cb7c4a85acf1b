"""Inner loops of groups that share a line, such as two groups with a stage each in one house: timed together."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet, limited_lines
from hetero_pp.simulator.fluid import Network, Path, Run, Stream, Wires, Work
from hetero_pp.simulator.pipeline import DRAWN_WITH_LINES, Array, GroupClock, Hops, step_programs


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
            together = _Together(spec, [fleets[one].replica.name for one in cluster], [clocks[one] for one in cluster])
            found |= zip(cluster, together.inner_loops([steps[one] for one in cluster]), strict=True)
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


@dataclass(frozen=True)
class _Group:
    """One of several groups that are timed together, with its stages numbered after those of the groups before."""

    clock: GroupClock
    lines: Sequence[tuple[LineSpec, Way]]
    """Lines in the order of the group's capacities."""
    offset: int

    def streams(self) -> Iterator[tuple[Stream, str, int, Hops]]:
        """Yield each stream numbered among all groups, then its kind, hop and `Hops` within the group."""
        groups = self.clock.groups
        for kind, hops in (("activation", groups.activations), ("gradient", groups.gradients)):
            for hop in range(groups.stages - 1):
                yield (kind, self.offset + hop), kind, hop, hops


class _Together:
    """Several groups, one from each fleet, timed as one."""

    def __init__(self, spec: RunSpec, names: Sequence[str], clocks: Sequence[GroupClock]) -> None:
        offsets = [0, *accumulate(clock.groups.stages for clock in clocks)]
        replicas = {replica.name: replica for replica in spec.config.replicas}
        self._groups = [
            _Group(clock, limited_lines(spec, replicas[name]), offset)
            for name, clock, offset in zip(names, clocks, offsets, strict=False)
        ]
        self._offsets = offsets[:-1]
        every = {(line.name, way): line.bandwidth(way) or np.inf for one in self._groups for line, way in one.lines}
        self._places = {name: place for place, name in enumerate(every)}
        self._capacities = list(every.values())

    def inner_loops(self, steps: Sequence[int]) -> list[list[Array]]:
        """Time the inner loops of these groups. Returns the ends of optimizer steps by group."""
        timed = min(*steps, DRAWN_WITH_LINES)
        run = self._run(timed)
        run.to_the_end()
        found = []
        for group, own_steps in zip(self._groups, steps, strict=True):
            clock, own = group.clock, slice(group.offset, group.offset + group.clock.groups.stages)
            clock.free[:, 0] = run.free[own]
            for stream, kind, hop, _ in group.streams():
                clock.link_free[kind][hop, 0] = run.left[stream]
            ends = run.step_ends[group.offset]
            mean = (ends[-1] - ends[0]) / (timed - 1) if timed > 1 else 0.0
            ends += [ends[-1] + mean * (step + 1) for step in range(own_steps - timed)]
            clock.free[0] = ends[-1]
            clock.flush()
            found.append([np.array([end]) for end in ends])
        return found

    def _run(self, steps: int) -> Run:
        clocks = [group.clock for group in self._groups]
        streams = {
            stream: (group, kind, hop, hops) for group in self._groups for stream, kind, hop, hops in group.streams()
        }
        paths = {stream: self._path(group, hops, hop) for stream, (group, _, hop, hops) in streams.items()}
        shapes = [(one.groups.stages, one.groups.micro_batches, one.groups.extra_in_flight) for one in clocks]
        work = Work(
            [program for shape in shapes for program in step_programs(*shape)],
            [float(seconds) for one in clocks for seconds in one.groups.forward[:, 0]],
            [float(seconds) for one in clocks for seconds in one.groups.backward[:, 0]],
            [float(seconds) for one in clocks for seconds in one.groups.update[:, 0]],
            frozenset(),
            steps,
            frozenset(self._offsets),
        )
        return Run(
            work,
            Wires(
                Network(self._capacities, paths),
                {stream: hops.bits for stream, (_, _, _, hops) in streams.items()},
                clocks[0].random,
                self._on_flow(),
            ),
            [float(free) for one in clocks for free in one.free[:, 0]],
            {stream: float(group.clock.link_free[kind][hop, 0]) for stream, (group, kind, hop, _) in streams.items()},
            self._on_compute(),
        )

    def _path(self, group: _Group, hops: Hops, hop: int) -> Path:
        """Return the path of a hop, with line indices among the lines of all groups."""
        path = hops.path(hop, 0)
        names = [(group.lines[place][0].name, group.lines[place][1]) for place in path.lines]
        return replace(path, lines=tuple(self._places[name] for name in names))

    def _on_flow(self) -> Callable[[Stream, int, float, float], None] | None:
        if all(group.clock.on_span is None for group in self._groups):
            return None

        def on_flow(stream: Stream, micro_batch: int, starts: float, ends: float) -> None:
            group = self._group_of(stream[1])
            group.clock.tell_flow((stream[0], stream[1] - group.offset), micro_batch, starts, ends)

        return on_flow

    def _on_compute(self) -> Callable[[int, str, int, float, float], None] | None:
        if all(group.clock.on_span is None for group in self._groups):
            return None

        def on_compute(stage: int, what: str, micro_batch: int, starts: float, ends: float) -> None:
            group = self._group_of(stage)
            group.clock.tell_computation(stage - group.offset, what, micro_batch, starts, ends)

        return on_compute

    def _group_of(self, stage: int) -> _Group:
        return self._groups[bisect(self._offsets, stage) - 1]
