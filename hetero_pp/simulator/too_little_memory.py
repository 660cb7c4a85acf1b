"""Messages where memory does not suffice: how much is missing, of what, and the key that helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.machines import assumption, unnamed
from hetero_pp.simulator.memory import Memory, Place, by_kind, memory_of_member

_LEAST_SAVING = 0.01
"""Smallest share of the memory that a key has to save to be suggested."""


def require_memory(spec: RunSpec, member: MemberSpec, memory: Memory, capacity: float) -> None:
    """Raise ConfigError if a member's part does not fit, with the memory by kind and the key that helps."""
    needed = memory.n_bytes(memory.computing_place)
    if needed <= capacity:
        return
    parts = listed_by_kind([memory.held(memory.computing_place)])
    found = (
        f"{member.name} needs {format_bytes(needed)} of memory, expected at most "
        f"{format_bytes(capacity)}: {format_bytes(needed - capacity)} too much ({parts})"
    )
    key = remedy(spec, [(member, memory)], needed, capacity, memory.computing_place)
    assumed = assumption(spec.config.simulate, unnamed([member]))
    raise ConfigError(("replicas", member.replica_index), "; ".join(filter(None, [found, key, assumed])))


def listed_by_kind(held: Sequence[Mapping[str, float]]) -> str:
    """List the bytes of several processes by kind, the largest first; each is given by purpose."""
    kinds = [by_kind(one) for one in held]
    total = {kind: sum(one[kind] for one in kinds) for kind in kinds[0]}
    largest = sorted(total.items(), key=lambda one: -one[1])
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest if size)


@dataclass(frozen=True)
class _Change:
    """A replica with another value for one key."""

    key: str
    value: int | str
    replica: ReplicaSettings


def remedy(
    spec: RunSpec, members: Sequence[tuple[MemberSpec, Memory]], needed: float, capacity: float, place: Place
) -> str:
    """Name the first key that makes members fit into a memory that they share, or else the one that saves most."""
    saved = [(change, _saved(spec, members, change, place)) for change in _changes(members)]
    useful = [(change, size) for change, size in saved if size >= _LEAST_SAVING * needed]
    if not useful:
        return "parameters and moments take the most; use machines with more memory, or more machines"
    enough = [(change, size) for change, size in useful if needed - size <= capacity]
    best, size = enough[0] if enough else max(useful, key=lambda one: one[1])
    return f"--set replicas.{best.replica.name}.{best.key}={best.value} saves {format_bytes(size)}" + (
        "" if enough else ", which is not enough"
    )


def _saved(spec: RunSpec, members: Sequence[tuple[MemberSpec, Memory]], change: _Change, place: Place) -> float:
    """Return the bytes that a change saves over all members."""
    total = 0.0
    for member, memory in members:
        if change.replica.name == member.replica.name:
            after = memory_of_member(spec, replace(member, replica=change.replica), memory.accelerated)
            total += memory.n_bytes(place) - after.n_bytes(place)
    return total


def _changes(members: Sequence[tuple[MemberSpec, Memory]]) -> Iterator[_Change]:
    """Yield changes that save memory, the cheapest in quality and time first; micro-batches shrink in steps."""
    replicas = {member.replica.name: member.replica for member, _ in members}.values()
    for replica in replicas:
        if isinstance(replica, ParticipantsReplica):
            for extra in range(replica.extra_in_flight - 1, -1, -1):
                yield _change(replica, "extra_in_flight", extra)
        shares = replica.data_parallel if isinstance(replica, DatacenterReplica) else 1
        for count in range(replica.micro_batches + 1, replica.batch_size + 1):
            if replica.batch_size % (count * shares) == 0:
                yield _change(replica, "micro_batches", count)
        if isinstance(replica, ParticipantsReplica) or replica.engine == "torch":
            if replica.recompute == "none":
                yield _change(replica, "recompute", "layers")
            if replica.precision != "bf16":
                yield _change(replica, "precision", "bf16")
        if isinstance(replica, DatacenterReplica) and replica.engine == "torchtitan":
            for chosen in ("selective", "full"):
                titan = replica.torchtitan.model_copy(update={"activation_checkpointing": chosen})
                changed = replica.model_copy(update={"torchtitan": titan})
                yield _Change("torchtitan.activation_checkpointing", chosen, changed)


def _change(replica: ReplicaSettings, key: str, value: int | str) -> _Change:
    return _Change(key, value, replica.model_copy(update={key: value}))
