"""Cost of a part of the model on a machine: seconds of a micro-batch, of a step and of an outer round.

Shapes: B sequences in a micro-batch, L positions, D width, F feed-forward width, V vocabulary.

A matrix product of T tokens with a parameter matrix takes 2 T operations per parameter. Attention adds 2 L D operations
per token and layer to each of QK and AV, halved as it is causal. Backward takes twice as long as forward. If heads have
another width than D / N, D in attention is the width of all heads together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_pp.config.predictions import ASSUMED, Hardware, MeasuredCost, SimulateSettings, hardware_named
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import Checkpointing, DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.units import format_bytes, format_names
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import LAYERS, ModelShape, block_of

UPDATE_BYTES = 28
"""Bytes per parameter that AdamW moves. Reads: weight, gradient, two moments; writes: weight, two moments."""

OUTER_BYTES = 40
"""Bytes per parameter that the outer round moves: difference, error feedback, selection, and applying the mean."""


@dataclass(frozen=True)
class BoundaryNumbers:
    """Numbers (fp32) that a stage holds for its boundaries, beside its part of the model."""

    perpendicular: int = 0  # numbers in T_perp, [V, D]
    followed: int = 0  # numbers in the synchronized embedding [V, D] that another stage trains
    anchors: int = 0  # numbers in the anchors that the stage learns: estimates of what the boundary before it drops
    anchor_rank: int = 0
    """Rank of the product that expands a row of anchors to the width of the model; 0 without this product."""


NOTHING = BoundaryNumbers()


def boundary_numbers(shape: ModelShape, boundary: BoundarySettings, is_first: bool) -> BoundaryNumbers:
    """Return the numbers that a stage of several holds for its boundaries."""
    table = 0 if boundary.dimensions(shape.width) is None else shape.vocabulary * shape.width
    if is_first:
        return BoundaryNumbers(perpendicular=table)
    if boundary.anchors is None:
        return BoundaryNumbers(table, table)
    own = boundary.anchors
    return BoundaryNumbers(table, table, own.numbers(shape.vocabulary, shape.width), own.dimensions(shape.width) or 0)


@dataclass(frozen=True)
class StagePart:
    """Part of the model that one member owns."""

    layers: int
    predicts: bool
    parameters: int
    boundary_numbers: BoundaryNumbers = NOTHING


def forward_flops(shape: ModelShape, part: StagePart, sequences: int, length: int) -> float:
    """Return the operations of a forward pass of [B, L] tokens through a part."""
    per_layer = shape.attention_numbers + 3 * shape.width * shape.feed_forward
    head = shape.width * shape.vocabulary if part.predicts else 0
    products = 2.0 * (part.layers * per_layer + head + part.boundary_numbers.anchor_rank * shape.width)
    attention = part.layers * 2.0 * length * shape.heads * shape.head_size
    return (products + attention) * sequences * length


def checkpointing_of(replica: ReplicaSettings) -> Checkpointing:
    """Return what a replica's engine recomputes in the backward pass instead of keeping it."""
    if isinstance(replica, DatacenterReplica) and replica.engine == "torchtitan":
        return replica.torchtitan.activation_checkpointing
    return "full" if replica.recompute == "layers" else "none"


def cost_on(
    shape: ModelShape,
    part: StagePart,
    hardware: Hardware,
    accelerators: int,
    sequences: int,
    length: int,
    checkpointing: Checkpointing = "none",
) -> MeasuredCost:
    """Return the cost of a part on several accelerators that share it evenly, as if it was measured."""
    width, feed_forward = shape.width, shape.feed_forward
    # Operations of a layer and a token that the backward pass repeats. `selective` keeps the attention and every second
    # matrix product (torchtitan's SelectiveAC): among q, k, v, o, gate, up and down it repeats k, o and up.
    products, attention = shape.attention_numbers + 3 * width * feed_forward, length * shape.heads * shape.head_size
    one_of_two = shape.attention_numbers // 2 + width * feed_forward
    repeated = {"none": 0, "full": 2 * (products + attention), "selective": 2 * one_of_two}[checkpointing]
    share = part.layers * repeated * length / forward_flops(shape, part, 1, length)
    forward = forward_flops(shape, part, sequences, length) / (hardware.achieved_flops * accelerators)
    backward = forward * (2 + share)
    per_byte = 8 / (hardware.memory_bandwidth * accelerators)
    outer = OUTER_BYTES / 2 * part.parameters * per_byte
    update = UPDATE_BYTES * (part.parameters + part.boundary_numbers.anchors) * per_byte
    return MeasuredCost.model_construct(
        forward=forward, backward=backward, update=update, contribute=outer, apply=outer, evaluate=forward
    )


def part_of(spec: RunSpec, member: MemberSpec) -> StagePart:
    """Return the part of the model that a member owns."""
    parameters = sum(math.prod(spec.parameter_shapes[name]) for name in member.owned)
    layers = len({block_of(name) for name in member.owned if name.startswith(LAYERS)})
    predicts = any(name.startswith("lm_head") for name in member.owned)
    own = NOTHING
    if member.stage is not None and member.stage.count > 1 and isinstance(member.replica, ParticipantsReplica):
        own = boundary_numbers(spec.shape, member.replica.boundary, member.stage.is_first)
    return StagePart(layers, predicts, parameters, own)


def step_flops(spec: RunSpec, member: MemberSpec) -> float:
    """Return the operations of a member's inner step, forward and backward, without recomputation."""
    length = spec.config.data.sequence_length
    return 3 * forward_flops(spec.shape, part_of(spec, member), member.replica.batch_size, length)


def cost_of(spec: RunSpec, member: MemberSpec) -> MeasuredCost:
    """Return the measured cost, or the cost that follows from the member's part and hardware.

    Raises ConfigError for unknown hardware.
    """
    if member.name in spec.config.simulate.measured:
        return spec.config.simulate.measured[member.name]
    replica = member.replica
    hardware = hardware_of(spec, member)
    rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
    part, checkpointing = part_of(spec, member), checkpointing_of(replica)
    return cost_on(spec.shape, part, hardware, replica.accelerators_of_member, rows, length, checkpointing)


# ---- the machine of a member: the hardware that the YAML names, or the assumed one ----

SHOWN = 5  # largest number of names in a message

HOW_TO_NAME = "set `hardware: h100` of the replica, or of all members with `--set simulate.machine=h100`"


def hardware_of(spec: RunSpec, member: MemberSpec) -> Hardware:
    """Return the machine of a member. Raises ConfigError for unknown hardware."""
    name, key = member.setting("hardware")
    if name is None:
        name, key = spec.config.simulate.machine, ("simulate", "machine")
    return hardware_named(name, spec.config.simulate.hardware, key)


def unnamed(members: Iterable[MemberSpec]) -> list[str]:
    """Return the names of members whose hardware the YAML does not name."""
    return [member.name for member in members if member.setting("hardware")[0] is None]


def assumption(settings: SimulateSettings, unnamed: Sequence[str]) -> str:
    """Return a sentence on the assumed hardware and how to name it; empty if `simulate.machine` names another."""
    if not unnamed or settings.machine != ASSUMED:
        return ""
    core = hardware_named(ASSUMED, settings.hardware, ("simulate", "machine"))
    speed = f"{core.achieved_flops / 1e9:.3g} GFLOP/s in training, {format_bytes(core.memory)}"
    names = format_names(unnamed, SHOWN)
    return f"no hardware is set for {names}, so one CPU core each is assumed ({speed}): {HOW_TO_NAME}"


def assumed_in(spec: RunSpec) -> str:
    """Return this sentence for all members without measured costs."""
    measured = spec.config.simulate.measured
    return assumption(spec.config.simulate, unnamed(one for one in spec.members.values() if one.name not in measured))
