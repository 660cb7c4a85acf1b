"""`hetero-pp check`: what a YAML describes, and what it will send, without training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hetero_pp.coefficients import format_of
from hetero_pp.link.ledger import raw_frames, wire_bytes
from hetero_pp.link.token_ids import packed_tokens_bytes
from hetero_pp.model import EMBEDDING, block_of, shapes_by_block
from hetero_pp.program.config import MemberPlan, RunPlan
from hetero_pp.program.display import format_bandwidths, plain_table, wide
from hetero_pp.program.inputs import Prepared, prepare
from hetero_pp.program.yaml_file import ConfigFile
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_bytes
from hetero_pp.topology import (
    DatacenterReplica,
    Direction,
    LinkShape,
    ParticipantsReplica,
    exchange_link_name,
    stage_link_name,
)
from hetero_pp.units import format_bytes, format_seconds

WIDTH_OF_FILES = 120
"""Columns of the tables where they go to a file."""


@dataclass(frozen=True)
class LinkLoad:
    """Tensor bytes that one direction of a link carries in an inner step, in an evaluation, and in an outer round."""

    step: int = 0
    evaluation: int = 0
    outer_round: int = 0


def stage_link_loads(plan: RunPlan, replica: ParticipantsReplica) -> dict[Direction, LinkLoad]:
    """What each link between neighbouring stages of a group carries, to the byte."""
    data = plan.config.data
    rank = replica.boundary.dimensions(plan.shape.width) or plan.shape.width
    format_ = format_of(replica.boundary)
    rows = replica.batch_size // replica.micro_batches

    def activations(batch: int) -> int:
        ids = packed_tokens_bytes(batch, data.sequence_length, plan.shape.vocabulary)
        return ids + format_.wire_bytes((batch, data.sequence_length, rank))

    whole, rest = divmod(data.validation_sequences, rows)
    evaluation = whole * activations(rows) + (activations(rest) if rest else 0)
    return {
        "forward": LinkLoad(replica.micro_batches * activations(rows), evaluation),
        "backward": LinkLoad(replica.micro_batches * format_.wire_bytes((rows, data.sequence_length, rank))),
    }


Messages = dict[Direction, list[tuple[int, int]]]
"""direction -> (bytes, how many of them)"""


def exchange_messages(plan: RunPlan, member: MemberPlan, counts: Mapping[str, int] | None = None) -> Messages:
    """The blobs that a member sends to the exchange in a round, and fetches: its own up, those of others down.

    `counts` says how many replicas stand behind a name, if not one.
    """
    sizes = _blob_sizes(plan)
    own, blocks = member.replica.name, {block_of(name) for name in member.owned}
    wanted = blocks | ({block_of(EMBEDDING)} if member.follows_embedding else set())
    if plan.config.outer.source == "gradient":  # the norm of the whole averaged gradient is needed
        wanted = {block_of(name) for name in plan.parameter_shapes}
    down = []
    for name, blobs in sizes.items():
        count = 1 if counts is None else counts.get(name, 1)
        down += [(blobs[block], count - (name == own and block in blocks)) for block in wanted]
    return {"forward": [(sizes[own][block], 1) for block in blocks], "backward": [one for one in down if one[1]]}


def exchange_link_loads(plan: RunPlan, member: MemberPlan) -> dict[Direction, LinkLoad]:
    """What the link of a member to the exchange carries."""
    messages = exchange_messages(plan, member)
    return {way: LinkLoad(outer_round=sum(size * times for size, times in messages[way])) for way in messages}


def snapshot_bytes(plan: RunPlan, member: MemberPlan) -> int:
    """Bytes of the first snapshot's tensors that a member fetches once, at its start."""
    names = [*member.owned, EMBEDDING] if member.follows_embedding else [*member.owned]
    numbers = sum(math.prod(plan.parameter_shapes[name]) for name in names)
    return 4 * (numbers + plan.shape.width * (plan.largest_rank or 0))


@lru_cache(maxsize=2)  # asked for by every member, in both directions
def _blob_sizes(plan: RunPlan) -> dict[str, dict[str, int]]:
    """Bytes of each replica's blobs by block."""
    blocks = shapes_by_block(plan.parameter_shapes)
    compression = plan.config.outer.compression
    return {
        replica.name: {
            block: blob_bytes(BlobAddress(plan.run, 1, replica.name, block), shapes, compression)
            for block, shapes in blocks.items()
        }
        for replica in plan.config.replicas
    }


def contribution_bytes(plan: RunPlan) -> int:
    """Bytes of all replicas' contributions to one round."""
    return sum(sum(blobs.values()) for blobs in _blob_sizes(plan).values())


def print_check(path: Path, overrides: Sequence[str], runs: Path) -> None:
    """Validate and print to the terminal."""
    file = ConfigFile(path, overrides)
    prepared = prepare(file, runs.absolute())
    console = wide(Console(), WIDTH_OF_FILES)
    _print_run(console, path, prepared)
    console.print(_members_table(prepared.plan))
    console.print(_links_table(prepared.plan))
    notes = (
        "→ is from the first named to the second. Sizes are of tensors and contributions; headers and framing come on "
        "top. `takes` is the least time that a round's bytes occupy the link."
    )
    console.print(notes, style="dim")


def _print_run(console: Console, path: Path, prepared: Prepared) -> None:
    plan = prepared.plan
    config, shape = plan.config, plan.shape
    rounds, steps = config.outer.rounds, config.inner.steps
    per_step = sum(replica.batch_size for replica in config.replicas) * config.data.sequence_length
    tokens = plan.total_steps * per_step
    compression = config.outer.compression
    console.print(f"[bold]{path}[/bold]: the run `{config.name}` is valid.")
    console.print(
        f"Model: {_count(plan.parameter_shapes):,} parameters, width {shape.width}, {shape.layers} layers, "
        f"{shape.heads} heads, vocabulary {shape.vocabulary}."
    )
    console.print(
        f"Schedule: {rounds} outer rounds of {steps} inner steps, {per_step:,} tokens a step over all replicas, "
        f"{tokens:,} in all."
    )
    if prepared.source is not None:
        console.print(f"Data: {config.data.corpus}, {prepared.source.describe(tokens)}.")
    console.print(
        f"Contributions: density {compression.density:.3g}, {_values_of(compression)}, about "
        f"{format_bytes(max(sum(blobs.values()) for blobs in _blob_sizes(plan).values()))} a replica and round."
    )


def _values_of(compression: CompressionSettings) -> str:
    signs = "signs and a magnitude a chunk"
    return signs if compression.quantiser == "signs" else f"{compression.value_bits} bits a value"


def _members_table(plan: RunPlan) -> Table:
    table = plain_table(["member", "kind", "owns"], ["parameters", "micro-batches"])
    for member in plan.members.values():
        replica, stage = member.replica, member.stage
        if stage is None or isinstance(replica, DatacenterReplica):
            kind, owns = f"datacenter ({replica.engine})", "whole model"  # type: ignore[union-attr]
        else:
            rank = replica.boundary.dimensions(plan.shape.width)
            crosses = "full" if rank is None else f"{rank} of {plan.shape.width}"
            crosses += f", {replica.boundary.bits} bits" if replica.boundary.bits else f" {replica.boundary.dtype}"
            kind = f"stage {stage.index + 1}/{stage.count}, rank {crosses}"
            owns = f"layers {stage.layers.start}-{stage.layers.stop - 1}"
            owns = ("embedding, " if stage.is_first else "") + owns + (", head" if stage.is_last else "")
        shapes = {name: plan.parameter_shapes[name] for name in member.owned}
        batches = f"{replica.micro_batches} x {replica.batch_size // replica.micro_batches}"
        table.add_row(member.name, kind, owns, f"{_count(shapes):,}", batches)
    return table


def _links_table(plan: RunPlan) -> Table:
    columns = ["bandwidth", "latency", "a step →", "a step ←", "a round →", "a round ←", "takes →", "takes ←"]
    table = plain_table(["link"], columns, widest=max(map(len, plan.links)))
    steps = plan.config.inner.steps
    for name, loads in _loads(plan):
        link = plan.links[name]
        shapes: list[LinkShape] = [link.forward, link.backward]
        both = [loads["forward"], loads["backward"]]
        rounds = [steps * load.step + load.evaluation + load.outer_round for load in both]
        table.add_row(
            name,
            format_bandwidths({"forward": link.forward.bandwidth, "backward": link.backward.bandwidth}),
            _pair([format_seconds(shape.latency) for shape in shapes]),
            *(format_bytes(load.step) if load.step else "" for load in both),
            *(format_bytes(size) for size in rounds),
            *(_least_time(shape, size) for shape, size in zip(shapes, rounds, strict=True)),
        )
    return table


def _loads(plan: RunPlan) -> list[tuple[str, dict[Direction, LinkLoad]]]:
    """Loads of every link, in the order of the plan."""
    loads: dict[str, dict[Direction, LinkLoad]] = {}
    for replica in plan.config.replicas:
        if isinstance(replica, ParticipantsReplica):
            for hop in range(replica.stage_count - 1):
                loads[stage_link_name(replica.name, hop)] = stage_link_loads(plan, replica)
    for member in plan.members.values():
        loads[exchange_link_name(member.name)] = exchange_link_loads(plan, member)
    return [(name, loads[name]) for name in plan.links]


def _least_time(shape: LinkShape, size: int) -> str:
    if shape.bandwidth is None:
        return "-"
    return format_seconds(wire_bytes(raw_frames(size)) * 8 / shape.bandwidth)


def _pair(both: list[str]) -> str:
    return both[0] if both[0] == both[1] else " / ".join(both)


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
