"""Exact bytes that every link of a run carries, computed from the settings without encoding or sending anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetero_pp.config.links import Direction
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.link.token_ids import packed_tokens_bytes
from hetero_pp.model.transformer import EMBEDDING, block_of, shapes_by_block
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_bytes
from hetero_pp.pseudo_gradient.together import FOLLOWING_BYTES_MAX, FOLLOWING_MAX, batches
from hetero_pp.run.spec import MemberSpec, RunSpec


@dataclass(frozen=True)
class LinkLoad:
    """Tensor bytes that one direction of a link carries in an inner step, in an evaluation, and in an outer round."""

    step: int = 0
    evaluation: int = 0
    outer_round: int = 0


def stage_link_loads(spec: RunSpec, replica: ParticipantsReplica) -> dict[Direction, LinkLoad]:
    """Return the exact bytes on each link between neighbouring stages of a group."""
    data = spec.config.data
    rank = replica.boundary.dimensions(spec.shape.width) or spec.shape.width
    format_ = format_of(replica.boundary)
    rows = replica.batch_size // replica.micro_batches

    def activations(batch: int) -> int:
        ids = packed_tokens_bytes(batch, data.sequence_length, spec.shape.vocabulary)
        return ids + format_.wire_bytes((batch, data.sequence_length, rank))

    whole, rest = divmod(data.validation_sequences, rows)
    evaluation = whole * activations(rows) + (activations(rest) if rest else 0)
    return {
        "forward": LinkLoad(replica.micro_batches * activations(rows), evaluation),
        "backward": LinkLoad(replica.micro_batches * format_.wire_bytes((rows, data.sequence_length, rank))),
    }


Messages = dict[Direction, list[tuple[int, int]]]
"""direction -> (bytes, number of such messages)"""


def exchange_messages(spec: RunSpec, member: MemberSpec, counts: Mapping[str, int] | None = None) -> Messages:
    """Return the blobs that a member submits to the exchange in a round (forward), and fetches of others (backward).

    `counts` is the number of replicas that a name stands for, if not one.
    """
    blocks, sizes = {block_of(name) for name in member.owned}, blob_sizes(spec)[member.replica.name]
    fetched = _fetched(spec, member, counts).values()
    received = [(size, count) for found in fetched for size, count in found.items() if count]
    return {"forward": [(sizes[block], 1) for block in blocks], "backward": received}


def exchange_calls(spec: RunSpec, member: MemberSpec, counts: Mapping[str, int] | None = None) -> int:
    """Return the calls in which a member submits and fetches these blobs. Small blobs cross in one call.

    Blobs of one block that are fetched have almost equal sizes, so that their mean is used. Where few of them fit in a
    call, a member may make one call more or less for a block.
    """
    sizes, blocks = blob_sizes(spec)[member.replica.name], {block_of(name) for name in member.owned}
    own = ((block, range(sizes[block])) for block in shapes_by_block(spec.parameter_shapes) if block in blocks)
    calls = sum(1 for _ in batches(own))
    for found in _fetched(spec, member, counts).values():
        count, total = sum(found.values()), sum(size * times for size, times in found.items())
        if total:
            calls += math.ceil(count / (1 + min(FOLLOWING_BYTES_MAX * count // total, FOLLOWING_MAX)))
    return calls


def _fetched(spec: RunSpec, member: MemberSpec, counts: Mapping[str, int] | None) -> dict[str, Counter[int]]:
    """Return block -> size -> number of such blobs of other replicas that a member fetches in a round."""
    sizes, own, blocks = blob_sizes(spec), member.replica.name, {block_of(name) for name in member.owned}
    wanted = wanted_blocks(spec, member)
    down = {block: Counter[int]() for block in wanted}
    for blobs, count in _distinct_blobs(spec, tuple((counts or {}).items())):
        for block in wanted:
            down[block][blobs[block]] += count
    for block in blocks & wanted:
        down[block][sizes[own][block]] -= 1
    return down


def wanted_blocks(spec: RunSpec, member: MemberSpec) -> set[str]:
    """Return the blocks that a member fetches from all replicas, to average them."""
    if spec.config.outer.source == "gradient":  # the norm of the whole averaged gradient is needed
        return {block_of(name) for name in spec.parameter_shapes}
    return {block_of(name) for name in (*member.owned, *([EMBEDDING] if member.follows_embedding else ()))}


@lru_cache(maxsize=4)  # every member asks for it, in both directions
def _distinct_blobs(spec: RunSpec, counts: Sequence[tuple[str, int]]) -> Sequence[tuple[Mapping[str, int], int]]:
    """Return blob sizes by block, and the number of replicas with these sizes; `counts` as in `exchange_messages`."""
    behind = dict(counts)
    found = Counter[tuple[tuple[str, int], ...]]()
    for name, blobs in blob_sizes(spec).items():
        found[tuple(blobs.items())] += behind.get(name, 1)
    return [(dict(blobs), count) for blobs, count in found.items()]


def exchange_link_loads(spec: RunSpec, member: MemberSpec) -> dict[Direction, LinkLoad]:
    """Return the bytes on the link from a member to the exchange."""
    messages = exchange_messages(spec, member)
    return {way: LinkLoad(outer_round=sum(size * times for size, times in messages[way])) for way in messages}


def snapshot_bytes(spec: RunSpec, member: MemberSpec) -> int:
    """Return the bytes of the first snapshot's tensors that a member fetches once, at its start."""
    names = [*member.owned, EMBEDDING] if member.follows_embedding else [*member.owned]
    numbers = sum(math.prod(spec.parameter_shapes[name]) for name in names)
    return 4 * (numbers + spec.shape.width * (spec.largest_rank or 0))


@lru_cache(maxsize=2)  # every member asks for it, in both directions
def blob_sizes(spec: RunSpec) -> dict[str, dict[str, int]]:
    """Return the bytes of each replica's blobs, by block."""
    blocks = shapes_by_block(spec.parameter_shapes)
    compression = spec.config.outer.compression
    by_length: dict[int, dict[str, int]] = {}
    """Sizes by length of the replica's name, the only thing of a replica that changes the size of a blob."""
    for name in (replica.name for replica in spec.config.replicas):
        if len(name.encode()) not in by_length:
            by_length[len(name.encode())] = {
                block: blob_bytes(BlobAddress(spec.run, 1, name, block), shapes, compression)
                for block, shapes in blocks.items()
            }
    return {replica.name: by_length[len(replica.name.encode())] for replica in spec.config.replicas}
