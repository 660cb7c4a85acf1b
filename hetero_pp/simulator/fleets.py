"""Fleets: equal replicas of a run, each fleet simulated once, with its seconds, messages, crossings and memory.

Replicas that differ only in their name form one fleet, and so do those that `simulate.fleets` puts behind a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_pp.config.alike import equal_replicas
from hetero_pp.config.lines import WAYS, Direction, stage_link_name
from hetero_pp.config.predictions import FleetSettings
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.simulator.costs import cost_of, hardware_of
from hetero_pp.simulator.events import GroupOfEvents, Hop, LineWay
from hetero_pp.simulator.memory import Memory, memory_of_member, require_memory
from hetero_pp.simulator.traffic import (
    BoundaryCrossing,
    check_exchange,
    crossing,
    is_at_site_of_exchange,
    message_bytes,
    site_of,
)


@dataclass(frozen=True)
class Fleet:
    """Equal replicas. Sequences have one entry for each member of a replica, stage by stage."""

    replicas: Sequence[ReplicaSettings]  # replicas of the run with equal settings and names of equal length
    count: int  # number of replicas, with those that a name stands for
    members: Sequence[MemberSpec]  # members of the first replica
    group: GroupOfEvents
    message_bytes: dict[str, float]
    """Bytes on the wire of one message between stages, by kind: `activation`, `gradient` and `evaluation`."""
    up: Sequence[BoundaryCrossing]  # contributions that members send in an outer round
    down: Sequence[BoundaryCrossing]
    sites: Sequence[str | None]  # name of the site whose uplink each member shares
    at_site_of_exchange: Sequence[bool]
    """Whether each member reaches the exchange without a line, because both are at one site."""
    contribute: Sequence[float]  # seconds of compute
    apply: Sequence[float]
    stays: float  # share of the replicas whose members all stay until the end of the round
    memory: Sequence[Memory]
    memory_capacity: Sequence[float]

    @property
    def replica(self) -> ReplicaSettings:
        """First replica; all have its settings."""
        return self.replicas[0]

    def without_stage_links(self) -> Fleet:
        """Return the same fleet with messages between stages that cost nothing."""
        return replace(self, group=self.group.without_communication())


def fleets_of(spec: RunSpec) -> Iterator[Fleet]:
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
        fleet = _fleet_of(spec, replicas)
        for member, held, capacity in zip(fleet.members, fleet.memory, fleet.memory_capacity, strict=True):
            require_memory(spec, member, held, capacity)
        yield fleet


def _fleet_of(spec: RunSpec, replicas: Sequence[ReplicaSettings]) -> Fleet:
    replica = replicas[0]
    settings = spec.config.simulate.fleets.get(replica.name, FleetSettings(count=len(replicas)))
    members = [spec.members[name] for name in replica.members]
    costs, hardware = [cost_of(spec, member) for member in members], [hardware_of(spec, member) for member in members]
    sizes, capacities = message_bytes(spec, replica), line_capacities(spec, replica)

    def hops(direction: Direction, kind: str) -> list[Hop]:
        found = []
        for hop in range(len(members) - 1):
            link = spec.links[stage_link_name(replica.name, hop)]
            shape = link.shape(direction)
            passed = zip(link.lines(direction), WAYS, strict=True)
            lines = [(line.name, way) for line, way in passed if line is not None and (line.name, way) in capacities]
            bandwidth = float("inf") if shape.bandwidth is None else shape.bandwidth
            found.append(Hop(8.0 * sizes[kind], bandwidth, shape.latency, shape.jitter, tuple(lines)))
        return found

    return Fleet(
        replicas=replicas,
        count=settings.count,
        members=members,
        group=GroupOfEvents(
            micro_batches=replica.micro_batches,
            extra_in_flight=replica.extra_in_flight if isinstance(replica, ParticipantsReplica) else 0,
            forward=[cost.forward for cost in costs],
            backward=[cost.backward for cost in costs],
            update=[cost.update for cost in costs],
            activations=hops("forward", "activation"),
            gradients=hops("backward", "gradient"),
            evaluate=[cost.evaluate for cost in costs],
            evaluations=hops("forward", "evaluation"),
            evaluation_batches=-(
                -spec.config.data.validation_sequences // (replica.batch_size // replica.micro_batches)
            ),
            capacities=capacities,
        ),
        message_bytes=sizes,
        up=[crossing(spec, member, "forward") for member in members],
        down=[crossing(spec, member, "backward") for member in members],
        sites=[site_of(spec, member) for member in members],
        at_site_of_exchange=[is_at_site_of_exchange(spec, member) for member in members],
        contribute=[cost.contribute for cost in costs],
        apply=[cost.apply for cost in costs],
        stays=(1 - settings.churn) ** len(members),
        memory=[memory_of_member(spec, one, own.is_accelerator) for one, own in zip(members, hardware, strict=True)],
        memory_capacity=[own.memory * replica.accelerators_of_member for own in hardware],
    )


def line_capacities(spec: RunSpec, replica: ReplicaSettings) -> dict[LineWay, float]:
    """Return the bits per second of the limited directions of the lines of a replica's members."""
    own = [line for line in spec.lines.values() if set(line.members) & set(replica.members)]
    return {(line.name, way): rate for line in own for way in WAYS if (rate := line.bandwidth(way)) is not None}
