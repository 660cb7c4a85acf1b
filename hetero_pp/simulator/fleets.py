"""Arrays of times for every replica of a run, or for the many replicas that a fleet stands for.

Replicas that differ only in their name form one fleet, with a column for each, so that their schedule is timed once.

Shapes: S stages (1 for a datacenter replica), G replicas of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_pp.config.lines import WAYS, LineSpec, Way
from hetero_pp.config.links import Direction, stage_link_name
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.link.protocol import Message, sealed, wire_frames
from hetero_pp.link.token_ids import packed_tokens_bytes
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, GRADIENT, LinkHeader
from hetero_pp.pipeline.coefficients import format_of, noise_key
from hetero_pp.run.alike import equal_replicas
from hetero_pp.run.simulate_section import FleetSettings
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.costs import cost_of
from hetero_pp.simulator.fluid import INFINITY
from hetero_pp.simulator.machines import hardware_of
from hetero_pp.simulator.memory import Memory, memory_of_member
from hetero_pp.simulator.pipeline import Array, Groups, Hops
from hetero_pp.simulator.too_little_memory import require_memory
from hetero_pp.simulator.volumes import Crossing, check_exchange, crossing, is_beside_exchange, site_of


@dataclass(frozen=True)
class Fleet:
    """Replicas of one kind, with their times, bytes and memory."""

    replicas: Sequence[ReplicaSettings]
    """Replicas with equal settings and names of equal length, one for each column of `groups`.

    Or the single replica that stands for a whole fleet of `simulate.fleets`.
    """
    members: Sequence[MemberSpec]
    """Members of the first replica, stage by stage."""
    accelerators: Sequence[int]
    groups: Groups
    message_bytes: dict[str, float]
    """Bytes on the wire of one message between stages, by kind: `activation`, `gradient` and `evaluation`."""
    evaluation_batches: int
    evaluation_forward: Array
    evaluation_hops: Hops
    up: Crossing
    """Contributions that members send in an outer round."""
    down: Crossing
    sites: Sequence[str | None]
    """Name of the site whose uplink each member shares, [S]."""
    beside_exchange: Array
    """Whether each member reaches the exchange without a line, because both are at one site, [S] bool."""
    contribute: Array
    """Seconds of compute, [S, G]."""
    apply: Array
    stays: Array
    """Whether all members stay until the end of the round, [G]."""
    memory: Sequence[Memory]
    memory_capacity: Sequence[float]

    @property
    def replica(self) -> ReplicaSettings:
        """First replica; all have its settings."""
        return self.replicas[0]

    @property
    def count(self) -> int:
        return self.groups.count

    def at_site(self, name: str) -> Array:
        """Return which members share the uplink of this site, [S] bool."""
        return np.array([site == name for site in self.sites])

    def without_communication(self) -> Groups:
        """Return the same groups with infinite bandwidth and no latency."""
        nothing = np.zeros_like(self.groups.activations.seconds)
        none = Hops(nothing, nothing, nothing)
        groups = self.groups
        return replace(groups, activations=none, gradients=none, capacities=())

    def without_stage_links(self) -> Fleet:
        """Return the same fleet with messages between stages that cost nothing."""
        groups = self.without_communication()
        return replace(self, groups=groups, evaluation_hops=groups.activations)


def fleets_of(spec: RunSpec, random: np.random.Generator) -> Iterator[Fleet]:
    """Yield a fleet for every set of equal replicas of the run.

    Raises ConfigError for unknown hardware, costs or fleets of unknown names, and impossible sites or rings. Also
    raises it for too little memory, and says how much is missing.
    """
    names = [replica.name for replica in spec.config.replicas]
    for name in spec.config.simulate.fleets:
        if name not in names:
            raise ConfigError(
                ("simulate", "fleets", name),
                f"found `{name}`, which is not a replica of this run, expected one of {', '.join(names)}",
            )
    for name in spec.config.simulate.measured:
        if name not in spec.members:
            raise ConfigError(
                ("simulate", "measured", name),
                f"found costs of `{name}`, which is not a member of this run; measure this topology with "
                "`hetero-pp calibrate`",
            )
    check_exchange(spec)
    for replicas in equal_replicas(spec):
        fleet = _fleet_of(spec, replicas, random)
        for member, held, capacity in zip(fleet.members, fleet.memory, fleet.memory_capacity, strict=True):
            require_memory(spec, member, held, capacity)
        yield fleet


def _fleet_of(spec: RunSpec, replicas: Sequence[ReplicaSettings], random: np.random.Generator) -> Fleet:
    replica = replicas[0]
    settings = spec.config.simulate.fleets.get(replica.name, FleetSettings(count=len(replicas)))
    members = [member for member in spec.members.values() if member.replica is replica]
    costs = [cost_of(spec, member) for member in members]
    shape = (len(members), settings.count)
    slow = np.where(random.random(shape) < settings.stragglers, settings.slowdown, 1.0)

    def seconds(values: Sequence[float]) -> Array:
        return np.array(values)[:, None] * slow

    rows = replica.batch_size // replica.micro_batches
    batches = -(-spec.config.data.validation_sequences // rows)
    bandwidth = _drawn(settings.bandwidth, (shape[0] - 1, shape[1]), random)
    sizes = message_bytes(spec, replica)
    uplink = _drawn(settings.uplink, shape, random)
    return Fleet(
        replicas=replicas,
        members=members,
        accelerators=[replica.accelerators_of_member] * len(members),
        groups=Groups(
            replica.micro_batches,
            replica.extra_in_flight if isinstance(replica, ParticipantsReplica) else 0,
            seconds([cost.forward for cost in costs]),
            seconds([cost.backward for cost in costs]),
            seconds([cost.update for cost in costs]),
            _hops(spec, replica, "forward", sizes["activation"], bandwidth, settings.count),
            _hops(spec, replica, "backward", sizes["gradient"], bandwidth, settings.count),
            tuple(line.bandwidth(way) or INFINITY for line, way in limited_lines(spec, replica)),
        ),
        message_bytes=sizes,
        evaluation_batches=batches,
        evaluation_forward=seconds([cost.evaluate for cost in costs]),
        evaluation_hops=_hops(spec, replica, "forward", sizes["evaluation"], bandwidth, settings.count),
        up=crossing(spec, members, "forward", uplink, settings.count),
        down=crossing(spec, members, "backward", uplink, settings.count),
        sites=[site_of(spec, member) for member in members],
        beside_exchange=np.array([is_beside_exchange(spec, member) for member in members]),
        contribute=seconds([cost.contribute for cost in costs]),
        apply=seconds([cost.apply for cost in costs]),
        stays=np.all(random.random(shape) >= settings.churn, axis=0),
        memory=[memory_of_member(spec, member, hardware_of(spec, member).is_accelerator) for member in members],
        memory_capacity=[hardware_of(spec, member).memory * replica.accelerators_of_member for member in members],
    )


_SOME_STEPS = 100
"""Assumed steps of a round of given time. They decide the size of a header, which grows by a byte from step 129 on."""


def message_bytes(spec: RunSpec, replica: ReplicaSettings) -> dict[str, float]:
    """Return the bytes of one message between stages on the wire, by kind, for empty tensors of the run's shapes."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return {"activation": 0.0, "gradient": 0.0, "evaluation": 0.0}
    config, format_ = spec.config, format_of(replica.boundary)
    rows, length = replica.batch_size // replica.micro_batches, config.data.sequence_length
    rank = replica.boundary.dimensions(spec.shape.width) or spec.shape.width
    # An elementwise format needs no values to have a size; another packs zeros.
    empty = torch.zeros(rows, length, rank, device="meta" if format_.is_elementwise else "cpu")
    ids = torch.empty(packed_tokens_bytes(rows, length, spec.shape.vocabulary), dtype=torch.uint8, device="meta")
    header = LinkHeader(rows=rows)
    header.round, header.step = config.outer.rounds // 2, (config.inner.steps or _SOME_STEPS) // 2
    header.micro_batch = replica.micro_batches // 2
    activation = (ids, *format_.to_wire(format_.activation(empty)))
    gradient = format_.to_wire(format_.gradient(empty, noise_key(0, replica.name, 0, 0, 0)))
    sizes = {"activation": (ACTIVATION, activation), "gradient": (GRADIENT, gradient)}
    sizes["evaluation"] = (EVALUATION, activation)
    found = {}
    for kind, (purpose, tensors) in sizes.items():
        header.purpose = purpose
        found[kind] = float(sum(wire_frames(sealed(Message(header, tuple(tensors))))))
    return found


def _drawn(between: tuple[float, float] | None, shape: tuple[int, int], random: np.random.Generator) -> Array | None:
    """Draw values uniformly on a logarithmic scale; None without a range."""
    if between is None:
        return None
    low, high = (math.log(one) for one in between)
    return np.exp(random.uniform(low, high, shape))


def _hops(
    spec: RunSpec, replica: ReplicaSettings, direction: Direction, n_bytes: float, bandwidth: Array | None, count: int
) -> Hops:
    """Return one direction of the links of `count` equal groups, for messages of `n_bytes` on the wire."""
    links = [spec.links[stage_link_name(replica.name, hop)] for hop in range(len(replica.members) - 1)]
    shapes = [link.shape(direction) for link in links]
    bits = 8.0 * n_bytes

    def rows(values: Sequence[float]) -> Array:
        return np.repeat(np.array(values, dtype=float).reshape(-1, 1), count, axis=1)

    own = rows([0.0 if shape.bandwidth is None else bits / shape.bandwidth for shape in shapes])
    seconds = own if bandwidth is None else bits / bandwidth
    latency, jitter = rows([shape.latency for shape in shapes]), rows([shape.jitter for shape in shapes])
    places = {(line.name, way): place for place, (line, way) in enumerate(limited_lines(spec, replica))}
    passed = [
        tuple(
            places[line.name, way]
            for line, way in zip(link.lines(direction), WAYS, strict=True)
            if line is not None and (line.name, way) in places
        )
        for link in links
    ]
    return Hops(seconds, latency, jitter, bits, tuple(passed))


def limited_lines(spec: RunSpec, replica: ReplicaSettings) -> list[tuple[LineSpec, Way]]:
    """Return the limited directions of the lines of a replica's members, in the order of `Groups.capacities`."""
    own = [line for line in spec.lines.values() if set(line.members) & set(replica.members)]
    return [(line, way) for line in own for way in WAYS if line.bandwidth(way) is not None]
