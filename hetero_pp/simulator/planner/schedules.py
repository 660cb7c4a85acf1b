"""Ways to run a replica: micro-batches, how many are in flight, and a split that fits; and those of the outer round.

Times of a replica are the simulator's, for one replica alone: the inner loop and the evaluation of a round.

The slowest uplink decides H and density, which hold for the whole run. Candidates are the values of the YAML, and those
beyond them that the papers tested. Among the candidates whose outer round is fast enough, the nearest to the YAML is
taken. The distance is the factor by which H grows times the factor by which the density falls. If a round lasts a given
time, that time takes the place of H and may be multiplied. No table here has the loss that either value costs: the
papers tune the density for each H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, log, log2
from typing import Any

import numpy as np

from hetero_pp.config.lines import Line, LinkSpec, Way, stage_link_name
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes, format_count, format_names, format_seconds
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.simulator.costs import SHOWN, assumption, hardware_of, unnamed
from hetero_pp.simulator.events import GroupClock, GroupOfEvents, LineWay, inner_loops
from hetero_pp.simulator.planner.grouping import Array, Load, best_split, stage_bytes, stage_seconds
from hetero_pp.simulator.prediction import alone, predict
from hetero_pp.simulator.rounds import Fleet, fleets_of, round_lengths
from hetero_pp.simulator.traffic import stage_link_loads

# ---- the expected cost in loss of a compressed boundary ----
# Two tables have the rise of the loss with bf16 coefficients at k/d: Het-PP Table 2 (512M parameters, 10B tokens), and
# our measurements at the `micro` scale (0.34M parameters, 819k tokens, three seeds: benchmarks/results/micro/,
# het-pp/table2.json and beyond/rank_for_bits.json). Only we measured low-bit coefficients. There, 4 bits at some rank
# lose as much as bf16 at a smaller rank. Both tables are read at that *equivalent* k/d, so one number orders all
# boundaries. Between entries the rise is linear in log(k/d). Without compression nothing is lost.

PAPER = {
    1.0: {1 / 8: 2.84, 1 / 24: 2.89, 1 / 96: 2.96, 1 / 192: 3.03, 1 / 384: 3.04, 1 / 768: 3.07},
    0.5: {1 / 8: 2.82, 1 / 24: 2.88, 1 / 96: 2.94, 1 / 192: 2.97, 1 / 384: 2.99, 1 / 768: 3.00},
}
"""Het-PP Table 2: share of replicas that compress -> k/d -> loss."""
PAPER_UNCOMPRESSED = 2.73

MEASURED = {
    1.0: {1 / 4: 4.1731, 1 / 8: 4.3681, 1 / 16: 4.5821, 3 / 64: 4.6750, 1 / 32: 4.8754, 1 / 64: 5.4566},
    0.5: {1 / 8: 4.2590, 1 / 16: 4.4124, 3 / 64: 4.4655, 1 / 32: 4.5659, 1 / 64: 4.5716},
}
"""The same table, as `reproduce` measured it."""
MEASURED_UNCOMPRESSED = 3.9083

FOUR_BITS = {62 / 64: 3.9475, 30 / 64: 4.0907, 14 / 64: 4.2657, 6 / 64: 4.5124}
"""k/d -> measured loss with 4 bits per coefficient, all replicas compressed."""

_RANKS = [Fraction(3, 4), Fraction(3, 32), *(Fraction(1, n) for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192))]
_RANKS += [Fraction(1, 384), Fraction(1, 768)]


@dataclass(frozen=True)
class Rung:
    """Boundary, and the k/d of the bf16 boundary that loses as much."""

    boundary: BoundarySettings
    equivalent: float

    def __str__(self) -> str:
        rank = self.boundary.rank
        shown = Fraction(rank).limit_denominator(1024) if isinstance(rank, float) else rank
        return f"rank {shown} x {f'{self.boundary.bits} bits' if self.boundary.bits else self.boundary.dtype}"


@dataclass(frozen=True)
class Penalty:
    """Expected relative rise of the loss; `measured` is None outside the measured range."""

    paper: float
    measured: float | None


def ladder(own: BoundarySettings, width: int, few_bits: bool = True) -> Sequence[Rung]:
    """Return the boundaries within the measured range, least lossy first. Other settings are those of `own`.

    A boundary is left out if another loses less at no more bits.
    """
    found = [Rung(own.model_copy(update={"rank": "full", "bits": None, "dtype": "bf16"}), 1.0)]
    tables: dict[int | None, Mapping[float, float]] = {None: PAPER[1.0]} | ({4: FOUR_BITS} if few_bits else {})
    exact = {round(rank * width) / width: float(rank) for rank in reversed(_RANKS)}
    for bits, table in tables.items():
        for share, rank in exact.items():
            if min(table) * (1 - 1e-9) <= share < 1:
                boundary = own.model_copy(update={"rank": rank, "bits": bits, "dtype": "bf16"})
                found.append(Rung(boundary, equivalent_rank(share, bits)))
    sizes = [(rung.equivalent, bits_per_token(rung, width)) for rung in found]
    kept = [
        rung
        for rung, (equivalent, bits_) in zip(found, sizes, strict=True)
        if not any(other > equivalent and other_bits <= bits_ for other, other_bits in sizes)
    ]
    return sorted(kept, key=lambda rung: -rung.equivalent)


def rung_of(boundary: BoundarySettings, width: int) -> Rung:
    """Return the rung of any boundary. If its rank or bits were not measured, the nearest measured ones count."""
    rank, bits = (boundary.dimensions(width) or width) / width, None if boundary.bits is None else 4
    low, high = (min(PAPER[1.0]), 1.0) if bits is None else (min(FOUR_BITS), max(FOUR_BITS))
    return Rung(boundary, equivalent_rank(min(max(rank, low), high), bits))


def bits_per_token(rung: Rung, width: int) -> int:
    """Return the bits of a token on the wire. Low-bit coefficients come with a scale of one byte."""
    numbers = rung.boundary.dimensions(width) or width
    return 16 * numbers if rung.boundary.bits is None else rung.boundary.bits * numbers + 8


def equivalent_rank(rank: float, bits: int | None) -> float:
    """Return the k/d at which bf16 coefficients lose as much as these, with all replicas compressed (measured)."""
    if bits is None:
        return rank
    loss = _interpolated(FOUR_BITS, rank)
    assert loss is not None, f"4 bits at k/d {rank} were not measured"
    curve = sorted({1.0: MEASURED_UNCOMPRESSED, **MEASURED[1.0]}.items(), reverse=True)
    return float(np.exp(np.interp(loss, [y for _, y in curve], [log(x) for x, _ in curve])))


def penalty_of(equivalent: float, share: float) -> Penalty:
    """Return the expected rise of the loss if `share` of the replicas compresses; linear between the tables' shares."""

    def rise(table: Mapping[float, Mapping[float, float]], uncompressed: float) -> float | None:
        rises = {0.0: 0.0}
        for known, losses in table.items():
            loss = _interpolated({1.0: uncompressed, **losses}, equivalent)
            if loss is None:
                return None
            rises[known] = loss / uncompressed - 1
        return float(np.interp(share, sorted(rises), [rises[one] for one in sorted(rises)]))

    paper = rise(PAPER, PAPER_UNCOMPRESSED)
    assert paper is not None  # the ladder ends where the paper's table does
    return Penalty(paper, rise(MEASURED, MEASURED_UNCOMPRESSED))


def _interpolated(points: Mapping[float, float], rank: float) -> float | None:
    """Return the loss at a k/d, linear in log(k/d); None outside the table."""
    ranks = sorted(points)
    if not ranks[0] * (1 - 1e-9) <= rank <= ranks[-1]:
        return None
    return float(np.interp(log(rank), [log(one) for one in ranks], [points[one] for one in ranks]))


# ---- ways to run a replica ----

EXTRA_IN_FLIGHT = (0, 1, 2, 3, 4, 6, 8)
NUMBERS_OF_MICRO_BATCHES = 3  # number of micro-batch counts that are tried: the largest that divide the batch


@dataclass(frozen=True)
class Schedule:
    """One way to run a replica, with uncompressed boundaries."""

    replica: ReplicaSettings
    spec: RunSpec  # run of this replica alone
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

    def slowest(self, rung: Rung) -> LinkSpec | tuple[Line, Way] | None:
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
    replica, spec, found = config.replicas[index], RunSpec(config, vocabulary), list[Schedule]()
    try:
        if isinstance(replica, DatacenterReplica) or is_measured(config, replica):
            return [_schedule(config, vocabulary, replica)]
        numbers = [count for count in range(replica.batch_size, 0, -1) if replica.batch_size % count == 0]
        loads = [
            _load(config, replica, micro_batches, extra)
            for micro_batches in numbers[:NUMBERS_OF_MICRO_BATCHES]
            for place, extra in enumerate(EXTRA_IN_FLIGHT)  # up to the first with which all are in flight
            if place == 0 or (replica.stage_count - 1) * (1 + EXTRA_IN_FLIGHT[place - 1]) < micro_batches
        ]
        for load in loads:
            counts, seconds = best_split(stage_costs(spec, replica, load))
            if np.isfinite(seconds):
                found.append(_schedule(config, vocabulary, _with(replica, load, counts)))
    except ConfigError as error:  # in the key of a run that has only this replica
        if error.key[:2] != ("replicas", 0):
            raise
        raise ConfigError(("replicas", index, *error.key[2:]), error.message) from None
    if not found:
        raise ConfigError(("replicas", index, "stages"), _no_split(spec, replica, loads))
    most = max(one.steps for one in found)
    return [replace(one, steps=most) for one in found]


def is_measured(config: RunConfig, replica: ReplicaSettings) -> bool:
    return any(member in config.simulate.measured for member in replica.members)


def stage_costs(spec: RunSpec, replica: ReplicaSettings, load: Load) -> list[Array]:
    """Return the seconds of a micro-batch on each stage's machine, [S][L + 1]."""
    machines = [hardware_of(spec, spec.members[member]) for member in replica.members]
    return [stage_seconds(spec, own, replica.accelerators_of_member, stage, load) for stage, own in enumerate(machines)]


def _load(config: RunConfig, replica: ParticipantsReplica, micro_batches: int, extra: int) -> Load:
    sequences, length = replica.batch_size // micro_batches, config.data.sequence_length
    return Load(replica.stage_count, micro_batches, sequences, length, extra, replica.boundary)


def _with(replica: ParticipantsReplica, load: Load, counts: Sequence[int]) -> ParticipantsReplica:
    stages: Any = [
        (replica.stages[stage].model_dump() if isinstance(replica.stages, list) else {})
        | {"layers": count, "line": replica.setting(stage, "line")[0]}
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


def describe(replica: ParticipantsReplica, spec: RunSpec) -> str:
    """Compare a split with the even one, in words."""
    costs = stage_costs(spec, replica, _load(spec.config, replica, replica.micro_batches, replica.extra_in_flight))
    layers = len(costs[0]) - 1
    counts = [len(own) for own in replica.layer_ranges(layers)]
    even = [len(own) for own in replica.model_copy(update={"stages": replica.stage_count}).layer_ranges(layers)]
    own_seconds, even_seconds = (
        max(float(cost[count]) for cost, count in zip(costs, split, strict=True)) for split in (counts, even)
    )
    said = f"the slowest stage takes {format_seconds(own_seconds)} per micro-batch"
    if counts == even:
        return said
    would = f"take {format_seconds(even_seconds)}" if np.isfinite(even_seconds) else "not fit into memory"
    return f"{said}; {'+'.join(map(str, even))} would {would}"


def _no_split(spec: RunSpec, replica: ParticipantsReplica, loads: Sequence[Load]) -> str:
    """Say what the memory of the stages holds, with the load with which they hold the most layers, and what helps."""
    fitting = [_layers_that_fit(spec, replica, load) for load in loads]
    best = max(range(len(loads)), key=lambda one: sum(fitting[one]))
    load, layers = loads[best], fitting[best]
    members, described = [spec.members[name] for name in replica.members], list[str]()
    for stage, (member, count) in enumerate(zip(members, layers, strict=True)):
        machine = hardware_of(spec, member)
        more = stage_bytes(spec, stage, load, min(count + 1, spec.shape.layers), machine)
        number = "no layer" if count == 0 else format_count(count, "layer")
        has = format_bytes(machine.memory * replica.devices_of(stage))
        described.append(f"{member.name} has {has} for {number} and needs {format_bytes(more)} for {count + 1}")
    told = (
        f"found {format_count(len(layers), 'stage')} of {replica.name} with memory for {sum(layers)} layers, expected "
        f"{spec.shape.layers} with at least 1 each: {format_names(described, SHOWN, '; ')} "
        f"(with {format_count(load.sequences, 'sequence')} per micro-batch)"
    )
    larger = f"use machines with more memory (`hardware` of {replica.name})"
    remedy = f"no number of stages on these machines is sufficient: {larger}"
    if isinstance(replica.stages, list):
        remedy = f"add entries under `stages`, or {larger}"
    else:
        for count in range(replica.stage_count + 1, spec.shape.layers + 1):
            more_stages = _layers_that_fit(spec, replica, replace(load, stages=count))
            if all(more_stages) and sum(more_stages) >= spec.shape.layers:
                remedy = f"use --set replicas.{replica.name}.stages={count}, or {larger}"
                break
    return "; ".join(filter(None, [told, remedy, assumption(spec.config.simulate, unnamed(members))]))


def _layers_that_fit(spec: RunSpec, replica: ParticipantsReplica, load: Load) -> list[int]:
    """Return the layers that fit each stage. Stages beyond those of the group are assumed to have its last machine."""
    found = []
    for stage in range(load.stages):
        own = min(stage, replica.stage_count - 1)
        machine = hardware_of(spec, spec.members[replica.members[own]])
        sizes = (stage_bytes(spec, stage, load, layers, machine) for layers in range(1, spec.shape.layers + 1))
        found.append(sum(size <= machine.memory * replica.devices_of(own) for size in sizes))
    return found


# ---- H and the density of contributions, so that the outer round takes at most a given share of the time ----

TESTED_STEPS = (15, 30, 50, 100, 250)  # values of H in SparseLoCo figure 1 and table 8
TIMES_AS_LONG = (2, 4, 8)  # Factors for rounds of a given time. No paper reports on such rounds.
TESTED_DENSITIES = (1 / 16, 1 / 32, 1 / 64, 1 / 128)  # densities in SparseLoCo tables 1 and 5, and Het-PP section 3


@dataclass(frozen=True)
class OuterChoice:
    """H and density, and the time that the outer round then adds to a round with free links between stages."""

    length: float  # H, or seconds of a round
    density: float
    free_seconds: float  # seconds of a round whose links cost nothing
    exchange_seconds: float  # seconds that the links to the exchange add
    slowest: str  # member that spends the longest time on its link to the exchange

    @property
    def share(self) -> float:
        """Return the share of a round that communication with the exchange takes."""
        return self.exchange_seconds / (self.free_seconds + self.exchange_seconds)

    def departure(self, config: RunConfig) -> float:
        """Return the distance from the YAML's values, in factors of two."""
        return log2(self.length / length_of(config)) + log2(config.outer.compression.density / self.density)


def choose_outer(config: RunConfig, vocabulary: int | None, allowed: float) -> tuple[OuterChoice, OuterChoice]:
    """Return the chosen values and the YAML's own.

    The choice is the nearest whose share is at most `allowed`, or the one with the smallest share if there is none.
    """
    found = list(_choices(config, vocabulary))
    own = found[0]
    good = [one for one in found if one.share <= allowed]
    if good:
        return min(good, key=lambda one: one.departure(config)), own
    return min(found, key=lambda one: one.share), own


def with_outer(config: RunConfig, length: float, density: float) -> RunConfig:
    """Return the configuration with another round length and density.

    `rounds` changes so that the run stays about as long.
    """
    own = length_of(config)
    total = config.rounds * own
    compression = config.outer.compression.model_copy(update={"density": density})
    rounds = config.outer.rounds if length == own or config.outer.rounds is None else ceil(total / length)
    changed = {"steps": int(length)} if config.inner.steps is not None else {"seconds": length}
    return config.model_copy(
        update={
            "inner": config.inner.model_copy(update=changed),
            "outer": config.outer.model_copy(update={"rounds": rounds, "compression": compression}),
        }
    )


def length_of(config: RunConfig) -> float:
    """Return H, or the seconds of a round."""
    return config.inner.steps if config.inner.steps is not None else config.inner.seconds or 0.0


def _choices(config: RunConfig, vocabulary: int | None) -> Iterator[OuterChoice]:
    """Yield the candidates, the YAML's own first.

    Each density is predicted once: more steps lengthen the round only by their own time.
    """
    own, compression = length_of(config), config.outer.compression
    candidates = TESTED_STEPS if config.inner.steps is not None else [times * own for times in TIMES_AS_LONG]
    densities = [one for one in TESTED_DENSITIES if one < compression.density] if config.outer.is_sparse else []
    longer = [one for one in candidates if one > own] if config.outer.source == "difference" else []
    most = max(own, config.rounds * own / config.outer.fragments)  # a round for each fragment
    for density in (compression.density, *densities):
        found = predict(RunSpec(with_outer(config, own, density), vocabulary), stage_links=False)
        free = found.utilization["relative"] * found.round_seconds
        stages = [stage for replica in found.replicas for stage in replica.stages]
        slowest = max(stages, key=lambda stage: stage.sent_seconds + stage.received_seconds)
        unit = found.step_seconds if config.inner.steps is not None else 1.0
        for length in (own, *(one for one in longer if one <= most)):
            seconds = free + (length - own) * unit
            yield OuterChoice(length, density, seconds, max(0.0, found.round_seconds - free), slowest.member)
