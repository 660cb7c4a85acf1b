"""Ways to run a replica: micro-batches, how many are in flight, and a split that fits; and the time of a round.

Times are the simulator's, for one replica alone: the inner loop and the evaluation of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.config.links import LinkSpec, stage_link_name
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes, format_count, format_names, format_seconds
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.costs import SHOWN, assumption, hardware_of, unnamed
from hetero_pp.simulator.events import GroupClock, GroupOfEvents, LineWay, inner_loops
from hetero_pp.simulator.fleets import Fleet, fleets_of
from hetero_pp.simulator.planner.penalty import Rung
from hetero_pp.simulator.planner.split import Array, Load, Sizes, best_split, part_of_stage, stage_bytes, stage_seconds
from hetero_pp.simulator.rounds import round_lengths
from hetero_pp.simulator.traffic import stage_link_loads
from hetero_pp.simulator.waiting import alone

EXTRA_IN_FLIGHT = (0, 1, 2, 3, 4, 6, 8)
NUMBERS_OF_MICRO_BATCHES = 3
"""Number of micro-batch counts that are tried: the largest that divide the batch."""


@dataclass(frozen=True)
class Schedule:
    """One way to run a replica, with uncompressed boundaries."""

    replica: ReplicaSettings
    spec: RunSpec
    """Run of this replica alone."""
    fleet: Fleet
    steps: int
    """H. If a round lasts a given time: the largest number of steps that fit with free links, over all schedules."""

    @cached_property
    def free_seconds(self) -> float:
        """Seconds of a round whose links cost nothing."""
        return self._seconds(self.fleet.group.without_communication())

    def seconds(self, rung: Rung) -> float:
        """Return the seconds of a round with these boundaries."""
        group, (activation, gradient) = self.fleet.group, self._ratios(rung)
        return self._seconds(
            replace(
                group,
                activations=[replace(hop, bits=hop.bits * activation) for hop in group.activations],
                gradients=[replace(hop, bits=hop.bits * gradient) for hop in group.gradients],
                evaluations=[replace(hop, bits=hop.bits * activation) for hop in group.evaluations],
            )
        )

    def least_seconds(self, rung: Rung) -> float:
        """Return a cheap lower bound of `seconds`: the busiest direction of a link or line in the inner loop."""
        group, (activation, gradient) = self.fleet.group, self._ratios(rung)
        links = [hop.seconds * activation for hop in group.activations] + [
            hop.seconds * gradient for hop in group.gradients
        ]
        return self.steps * group.micro_batches * max([*links, *self._line_seconds(rung).values(), 0.0])

    def slowest(self, rung: Rung) -> LinkSpec | tuple[LineSpec, Way] | None:
        """Return the slowest link or line.

        It is the link whose messages take longest, with latency, or the direction of a line that takes longer. None if
        no message takes any time.
        """
        group, (activation, gradient) = self.fleet.group, self._ratios(rung)
        seconds = [
            max(forward.seconds * activation + forward.latency, backward.seconds * gradient + backward.latency)
            for forward, backward in zip(group.activations, group.gradients, strict=True)
        ]
        longest, lines = max(seconds, default=0.0), self._line_seconds(rung)
        if lines and max(lines.values()) > longest:
            name, way = max(lines, key=lambda one: lines[one])
            return self.spec.lines[name], way
        if longest == 0:
            return None
        return self.spec.links[stage_link_name(self.replica.name, seconds.index(longest))]

    def _line_seconds(self, rung: Rung) -> dict[LineWay, float]:
        """Return the seconds that all messages of a micro-batch occupy each direction of a line."""
        group, (activation, gradient) = self.fleet.group, self._ratios(rung)
        bits = dict.fromkeys(group.capacities, 0.0)
        for hops, ratio in ((group.activations, activation), (group.gradients, gradient)):
            for hop in hops:
                for line in hop.lines:
                    bits[line] += hop.bits * ratio
        return {line: total / group.capacities[line] for line, total in bits.items()}

    def with_boundary(self, rung: Rung | None) -> ReplicaSettings:
        return self.replica if rung is None else self.replica.model_copy(update={"boundary": rung.boundary})

    def _ratios(self, rung: Rung) -> tuple[float, float]:
        """Return the ratio of a message's bytes to those without compression, forward and backward.

        Headers do not shrink.
        """
        new, old = _tensor_bytes(self.spec, self.with_boundary(rung)), _tensor_bytes(self.spec, self.replica)
        wire = self.fleet.message_bytes["activation"], self.fleet.message_bytes["gradient"]
        return 1 - (old[0] - new[0]) / wire[0], 1 - (old[1] - new[1]) / wire[1]

    def _seconds(self, group: GroupOfEvents) -> float:
        clock = GroupClock(group, np.random.default_rng(self.spec.config.simulate.seed + 1))
        inner_loops([clock], [self.steps])
        clock.evaluate()
        return max(clock.free)


def _tensor_bytes(spec: RunSpec, replica: ReplicaSettings) -> tuple[float, float]:
    """Return the tensor bytes of one message, forward and backward."""
    assert isinstance(replica, ParticipantsReplica)
    loads = stage_link_loads(spec, replica)
    return loads["forward"].step / replica.micro_batches, loads["backward"].step / replica.micro_batches


def schedules_of(config: RunConfig, vocabulary: int | None, index: int) -> Sequence[Schedule]:
    """Return ways to run a replica: most micro-batches first, then fewest in flight.

    A datacenter replica stays as it is, and so does a group with measured costs, which hold only for its split and
    micro-batches. Raises ConfigError if no split fits the memory of the stages.
    """
    try:
        return _schedules_of(config, vocabulary, index)
    except ConfigError as error:  # in the key of a run that has only this replica
        if error.key[:2] != ("replicas", 0):
            raise
        raise ConfigError(("replicas", index, *error.key[2:]), error.message) from None


def _schedules_of(config: RunConfig, vocabulary: int | None, index: int) -> Sequence[Schedule]:
    replica = config.replicas[index]
    if isinstance(replica, DatacenterReplica) or is_measured(config, replica):
        return [_schedule(config, vocabulary, replica)]
    found, spec = [], RunSpec(config, vocabulary)
    for load in _loads(config, replica):
        counts, seconds = best_split(stage_costs(spec, index, load))
        if np.isfinite(seconds):
            found.append(_schedule(config, vocabulary, _with(replica, load, counts)))
    if not found:
        raise _no_split(spec, index, list(_loads(config, replica)))
    most = max(one.steps for one in found)
    return [replace(one, steps=most) for one in found]


def is_measured(config: RunConfig, replica: ReplicaSettings) -> bool:
    return any(member in config.simulate.measured for member in replica.members)


def stage_costs(spec: RunSpec, index: int, load: Load) -> list[Array]:
    """Return the seconds of a micro-batch on each stage's machine, [S][L + 1]."""
    replica, sizes = spec.config.replicas[index], Sizes.of(spec.parameter_shapes)
    return [
        stage_seconds(
            spec.shape, sizes, hardware_of(spec, spec.members[member]), replica.accelerators_of_member, stage, load
        )
        for stage, member in enumerate(replica.members)
    ]


def load_of(config: RunConfig, replica: ParticipantsReplica) -> Load:
    """Return the load that the replica's settings give."""
    return _load(config, replica, replica.micro_batches, replica.extra_in_flight)


def _load(config: RunConfig, replica: ParticipantsReplica, micro_batches: int, extra: int) -> Load:
    sequences, length = replica.batch_size // micro_batches, config.data.sequence_length
    return Load(replica.stage_count, micro_batches, sequences, length, extra, replica.boundary)


def _loads(config: RunConfig, replica: ParticipantsReplica) -> Iterator[Load]:
    smallest, batch = config.plan.smallest_micro_batch, replica.batch_size
    numbers = [n for n in range(batch, 0, -1) if batch % n == 0 and batch // n >= min(smallest, batch)]
    for micro_batches in numbers[:NUMBERS_OF_MICRO_BATCHES]:
        for extra in EXTRA_IN_FLIGHT:
            yield _load(config, replica, micro_batches, extra)
            if (replica.stage_count - 1) * (1 + extra) >= micro_batches:
                break  # more cannot be in flight


def _with(replica: ParticipantsReplica, load: Load, counts: Sequence[int]) -> ParticipantsReplica:
    stages: Any = [
        {"layers": count, "line": replica.line_of(stage)}
        | ({} if (old := replica.stage_settings(stage)) is None else old.model_dump(exclude={"layers", "line"}))
        for stage, count in enumerate(counts)
    ]
    if not isinstance(replica.stages, list) and list(counts) == list(map(len, replica.layer_ranges(sum(counts)))):
        stages = replica.stages
    changes = {"stages": stages, "micro_batches": load.micro_batches, "extra_in_flight": load.extra_in_flight}
    return ParticipantsReplica.model_validate(replica.model_dump() | changes)


def _schedule(config: RunConfig, vocabulary: int | None, replica: ReplicaSettings) -> Schedule:
    if isinstance(replica, ParticipantsReplica):
        full = replica.boundary.model_copy(update={"rank": "full", "bits": None, "dtype": "bf16"})
        replica = replica.model_copy(update={"boundary": full})
    spec = RunSpec(alone(config, replica), vocabulary)
    [fleet] = fleets_of(spec)
    [length] = round_lengths(spec, [fleet], communicates=False)
    return Schedule(replica, spec, fleet, length(0.0))


def describe(replica: ParticipantsReplica, config: RunConfig, vocabulary: int | None, index: int) -> str:
    """Compare a split with the even one, in words."""
    load = load_of(config, replica)
    costs = stage_costs(RunSpec(config, vocabulary), index, load)
    layers = len(costs[0]) - 1
    counts = [len(own) for own in replica.layer_ranges(layers)]
    even = [len(own) for own in replica.model_copy(update={"stages": replica.stage_count}).layer_ranges(layers)]
    own_seconds, even_seconds = (
        max(float(cost[count]) for cost, count in zip(costs, split, strict=True)) for split in (counts, even)
    )
    said = f"the slowest stage takes {format_seconds(own_seconds)} per micro-batch"
    if counts == even:
        return said
    shown = "+".join(map(str, even))
    return f"{said}; {shown} " + (
        f"would take {format_seconds(even_seconds)}" if np.isfinite(even_seconds) else "would not fit into memory"
    )


# ---- the error for a group that cannot hold the model ----


@dataclass(frozen=True)
class _Room:
    """Number of layers that fit the memory of a stage's machine."""

    member: str
    capacity: float
    """Memory of the machine, in bytes."""
    layers: int
    next_bytes: float
    """Bytes that one more layer would need."""


def _no_split(spec: RunSpec, index: int, loads: Sequence[Load]) -> ConfigError:
    """Return the error for a group whose machines have too little memory for every split, with each of `loads`.

    It describes the load with which the stages hold the most layers.
    """
    replica = spec.config.replicas[index]
    assert isinstance(replica, ParticipantsReplica)
    rooms = [_rooms(spec, replica, load) for load in loads]
    best = max(range(len(loads)), key=lambda one: sum(room.layers for room in rooms[one]))
    load, found = loads[best], rooms[best]
    machines = format_names([_described(room) for room in found], SHOWN, "; ")
    members = [one for one in spec.members.values() if one.replica is replica]
    told = (
        f"found {format_count(len(found), 'stage')} of {replica.name} with memory for "
        f"{sum(room.layers for room in found)} layers, expected {spec.shape.layers} with at least 1 "
        f"each: {machines} (with {format_count(load.sequences, 'sequence')} per micro-batch)"
    )
    sentences = [told, _remedy(spec, replica, load), assumption(spec.config.simulate, unnamed(members))]
    return ConfigError(("replicas", index, "stages"), "; ".join(filter(None, sentences)))


def _rooms(spec: RunSpec, replica: ParticipantsReplica, load: Load) -> list[_Room]:
    """Return the room of every stage. Stages beyond those of the group are assumed to have its last machine."""
    shape, sizes, found = spec.shape, Sizes.of(spec.parameter_shapes), list[_Room]()
    for stage in range(load.stages):
        member = spec.members[replica.members[min(stage, replica.stage_count - 1)]]
        hardware = hardware_of(spec, member)
        capacity = hardware.memory * replica.accelerators_of_member
        needed = [
            stage_bytes(shape, part_of_stage(shape, sizes, stage, load, layers), load, stage, hardware)
            for layers in range(1, shape.layers + 1)
        ]
        layers = sum(size <= capacity for size in needed)
        found.append(_Room(member.name, capacity, layers, needed[min(layers, shape.layers - 1)]))
    return found


def _described(room: _Room) -> str:
    number = "no layer" if room.layers == 0 else format_count(room.layers, "layer")
    more = f"needs {format_bytes(room.next_bytes)} for {room.layers + 1}"
    return f"{room.member} has {format_bytes(room.capacity)} for {number} and {more}"


def _remedy(spec: RunSpec, replica: ParticipantsReplica, load: Load) -> str:
    """Return the smallest number of stages that would hold the model on such machines, or what else would help."""
    larger = f"use machines with more memory (`hardware` of {replica.name})"
    if isinstance(replica.stages, list):
        return f"add entries under `stages`, or {larger}"
    for count in range(replica.stage_count + 1, spec.shape.layers + 1):
        rooms = _rooms(spec, replica, replace(load, stages=count))
        if all(room.layers for room in rooms) and sum(room.layers for room in rooms) >= spec.shape.layers:
            return f"use --set replicas.{replica.name}.stages={count}, or {larger}"
    return f"no number of stages on these machines is sufficient: {larger}"
