"""Memory of members: by purpose, with the assumptions, and the key that helps if it does not suffice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.costs import AHEAD_BYTES, LOCAL_BYTES, checkpointing_of, memory_of
from hetero_pp.simulator.machines import assumption, unnamed
from hetero_pp.simulator.parts import part_of

MEMORY_KINDS: Mapping[str, Sequence[str]] = {
    "weights and gradients": ("weights", "gradients"),
    "moments": ("optimizer",),
    "outer state and tables": (
        *("error feedback", "round start", "rounds ahead", "own parameters"),
        *("T_perp", "followed embedding", "anchors"),
    ),
    "activations": ("activations",),
}
"""Columns of the memory table, and the names of `memory_of_member` that each sums up."""


def by_kind(held: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by MEMORY_KINDS, from the result of `memory_of_member`."""
    return {kind: sum(held.get(name, 0.0) for name in names) for kind, names in MEMORY_KINDS.items()}


def memory_of_member(spec: RunSpec, member: MemberSpec, bytes_per_value: int = 2) -> dict[str, float]:
    """Return the bytes that a member holds, by purpose; activations take `bytes_per_value` each."""
    replica = member.replica
    rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
    part, in_flight = part_of(spec, member), _micro_batches_in_flight(member)
    checkpointing = checkpointing_of(replica)
    held = memory_of(spec.shape, part, rows, length, in_flight, bytes_per_value, checkpointing)
    if spec.config.outer.overlap:
        held["rounds ahead"] = float(AHEAD_BYTES * part.parameters)
    if spec.config.outer.keep_local:
        held["own parameters"] = float(LOCAL_BYTES * part.parameters)
    return held


def _micro_batches_in_flight(member: MemberSpec) -> int:
    """Return the largest number of micro-batches whose activations a member keeps at once."""
    replica, stage = member.replica, member.stage
    if stage is None or not isinstance(replica, ParticipantsReplica):
        return 1
    ahead = (stage.count - 1 - stage.index) * (1 + replica.extra_in_flight)
    return min(replica.micro_batches, ahead + 1)


def memory_assumptions(config: RunConfig) -> list[str]:
    """State the assumptions of the predicted memory, a sentence for each kind."""
    groups = any(isinstance(one, ParticipantsReplica) and one.stage_count > 1 for one in config.replicas)
    extra = "; a stage keeps 1, and 1 + extra_in_flight more for each later stage" if groups else ""
    found = [
        "weights and gradients: fp32, 4 bytes per parameter each; moments: AdamW's two, 8 bytes per parameter",
        "outer state: error feedback and the start of the round, 8 bytes per parameter; tables: tables "
        "of the boundaries",
        "activations: bf16; a layer keeps 10 x width + 4 x feed-forward values per token for each "
        f"micro-batch in flight{extra}; fp32, as in stages and the engine torch, takes twice as much",
        "a backward pass also needs the larger of two amounts: 4 x vocabulary fp32 values per token "
        "(logits, log-softmax and the gradients of both), or 2 x width + 2 x feed-forward values "
        "(gradients of a layer) and recomputed activations",
    ]
    if any(checkpointing_of(one) != "none" for one in config.replicas):
        found.append(
            "activation_checkpointing: full keeps 1 x width values per layer and token, selective 5 x "
            "width + 1 x feed-forward (4 x width on a CPU); both recompute one layer at a time"
        )
    return [*found, "not included: CUDA and the framework, fragmentation, buffers of collectives"]


def require_memory(spec: RunSpec, member: MemberSpec, held: Mapping[str, float], capacity: float) -> None:
    """Raise ConfigError if a member's part does not fit, with the memory by kind and the key that saves most."""
    needed = sum(held.values())
    if needed <= capacity:
        return
    largest = sorted(by_kind(held).items(), key=lambda one: -one[1])
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest if size)
    found = (
        f"{member.name} needs {format_bytes(needed)} of memory, expected at most "
        f"{format_bytes(capacity)}: {format_bytes(needed - capacity)} too much ({parts})"
    )
    remedy = _remedy(spec, member, needed, capacity)
    assumed = assumption(spec.config.simulate, unnamed([member]))
    raise ConfigError(("replicas", member.replica_index), "; ".join(filter(None, [found, remedy, assumed])))


_LEAST_SAVING = 0.01
"""Smallest share of a member's memory that a key has to save to be suggested."""


@dataclass(frozen=True)
class _Change:
    """Replica with another value for one key."""

    key: str
    value: int | str
    replica: ReplicaSettings


def _remedy(spec: RunSpec, member: MemberSpec, needed: float, capacity: float) -> str:
    """Name the first key that makes the member fit, or else the one that saves most."""
    saved = [
        (change, needed - sum(memory_of_member(spec, replace(member, replica=change.replica)).values()))
        for change in _changes(member.replica)
    ]
    useful = [(change, size) for change, size in saved if size >= _LEAST_SAVING * needed]
    if not useful:
        return "parameters and moments take the most; use machines with more memory, or more machines"
    enough = [(change, size) for change, size in useful if needed - size <= capacity]
    best, size = enough[0] if enough else max(useful, key=lambda one: one[1])
    key = f"--set replicas.{member.replica.name}.{best.key}={best.value}"
    return f"{key} saves {format_bytes(size)}" + ("" if enough else ", which is not enough")


def _changes(replica: ReplicaSettings) -> Iterator[_Change]:
    """Yield changes that save memory, the cheapest in quality and time first; micro-batches shrink in steps."""
    if isinstance(replica, ParticipantsReplica):
        for extra in range(replica.extra_in_flight - 1, -1, -1):
            yield _change(replica, "extra_in_flight", extra)
    shares = replica.data_parallel if isinstance(replica, DatacenterReplica) else 1
    for count in range(replica.micro_batches + 1, replica.batch_size + 1):
        if replica.batch_size % (count * shares) == 0:
            yield _change(replica, "micro_batches", count)
    if isinstance(replica, DatacenterReplica) and replica.engine == "torchtitan":
        for chosen in ("selective", "full"):
            titan = replica.torchtitan.model_copy(update={"activation_checkpointing": chosen})
            changed = replica.model_copy(update={"torchtitan": titan})
            yield _Change("torchtitan.activation_checkpointing", chosen, changed)


def _change(replica: ReplicaSettings, key: str, value: int) -> _Change:
    return _Change(key, value, replica.model_copy(update={key: value}))


def predicted_bytes(spec: RunSpec, name: str) -> float:
    """Return the predicted peak of a process."""
    from hetero_pp.simulator.exchange_load import exchange_load

    if name not in spec.members:
        return sum(exchange_load(spec).memory_bytes.values())
    return sum(memory_of_member(spec, spec.members[name], 4).values())
