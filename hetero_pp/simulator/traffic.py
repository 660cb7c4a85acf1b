"""Exact bytes that every link of a run carries, from the settings alone: nothing is encoded or sent.

With R replicas and a contribution of m bytes (N bytes if it is dense), each replica

    gather              sends m, receives (R - 1) m       through the exchange, or an object store
    parameter_server    sends m, receives one aggregate
    ring_all_gather     sends and receives (R - 1) m      own and others' are passed on
    ring_all_reduce     sends and receives 2 (R - 1) N / R
    sparse_ring         sends and receives (s_1 + ... + s_R-1 + (R - 1) s_R) / R, where h contributions sum to s_h

`launch` uses `gather`. With an object store as the exchange it is the deployment of SparseLoCo's Appendix C. The others
are the topologies of SparseLoCo's Figure 2, and one that sums sparse contributions along the ring. The bytes that
replicas really sent are measured by `hetero_pp/pseudo_gradient/volume.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch

from hetero_pp.config.lines import EXCHANGE, Direction, Line, Rule, Way, exchange_link_name
from hetero_pp.config.predictions import SimulateSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.link.protocol import Message, packed_tokens_bytes, raw_frames, sealed, wire_bytes, wire_frames
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, GRADIENT, LinkHeader
from hetero_pp.model.transformer import EMBEDDING, block_of, shapes_by_block
from hetero_pp.pipeline.coefficients import format_of, noise_key
from hetero_pp.pseudo_gradient.contribution import FOLLOWING_BYTES_MAX, FOLLOWING_MAX, BlobAddress, batches, blob_bytes
from hetero_pp.pseudo_gradient.volume import Volume

# ---- links between stages ----


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
    header.round, header.step = config.rounds // 2, (config.inner.steps or _SOME_STEPS) // 2
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


# ---- contributions ----

Messages = dict[Direction, list[tuple[int, int]]]  # direction -> (bytes, number of such messages)


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


def wanted_blocks(spec: RunSpec, member: MemberSpec) -> set[str]:
    """Return the blocks that a member fetches from all replicas, to average them."""
    if spec.config.outer.source == "gradient":  # the norm of the whole averaged gradient is needed
        return {block_of(name) for name in spec.parameter_shapes}
    return {block_of(name) for name in (*member.owned, *([EMBEDDING] if member.follows_embedding else ()))}


def exchange_messages(spec: RunSpec, member: MemberSpec, round_: int = 1, with_fleets: bool = True) -> Messages:
    """Return the blobs that a member submits to the exchange in a round (forward), and fetches of others (backward).

    `round_` decides the fragment. `with_fleets`: whether a name stands for all replicas that `simulate.fleets` puts
    behind it.
    """
    blocks, sizes = _contributed(spec, member, round_), blob_sizes(spec)[member.replica.name]
    fetched = _fetched(spec, member, round_, with_fleets).values()
    received = [(size, count) for found in fetched for size, count in found.items() if count]
    return {"forward": [(sizes[block], 1) for block in blocks], "backward": received}


def _contributed(spec: RunSpec, member: MemberSpec, round_: int) -> frozenset[str]:
    return spec.fragments.among({block_of(name) for name in member.owned}, round_)


def exchange_calls(spec: RunSpec, member: MemberSpec, round_: int = 1) -> int:
    """Return the calls in which a member submits and fetches these blobs. Small blobs cross in one call.

    Blobs of one block that are fetched have almost equal sizes, so that their mean is used. Where few of them fit in a
    call, a member may make one call more or less for a block.
    """
    sizes, blocks = blob_sizes(spec)[member.replica.name], _contributed(spec, member, round_)
    own = ((block, range(sizes[block])) for block in shapes_by_block(spec.parameter_shapes) if block in blocks)
    calls = sum(1 for _ in batches(own))
    for found in _fetched(spec, member, round_, with_fleets=True).values():
        count, total = sum(found.values()), sum(size * times for size, times in found.items())
        if total:
            calls += math.ceil(count / (1 + min(FOLLOWING_BYTES_MAX * count // total, FOLLOWING_MAX)))
    return calls


def _fetched(spec: RunSpec, member: MemberSpec, round_: int, with_fleets: bool) -> dict[str, Counter[int]]:
    """Return block -> size -> number of such blobs of other replicas that a member fetches in a round."""
    own, wanted = member.replica.name, spec.fragments.among(wanted_blocks(spec, member), round_)
    down = {block: Counter[int]() for block in wanted}
    for blobs, count in _distinct_blobs(spec, with_fleets):
        for block in wanted:
            down[block][blobs[block]] += count
    for block in _contributed(spec, member, round_) & wanted:
        down[block][blob_sizes(spec)[own][block]] -= 1
    return down


@lru_cache(maxsize=4)  # every member asks for it, in both directions
def _distinct_blobs(spec: RunSpec, with_fleets: bool) -> Sequence[tuple[Mapping[str, int], int]]:
    """Return blob sizes by block, and the number of replicas with these sizes."""
    found = Counter[tuple[tuple[str, int], ...]]()
    for name, blobs in blob_sizes(spec).items():
        found[tuple(blobs.items())] += count_behind(spec.config, name) if with_fleets else 1
    return [(dict(blobs), count) for blobs, count in found.items()]


def count_behind(config: RunConfig, name: str) -> int:
    """Return the number of replicas that a name stands for."""
    fleet = config.simulate.fleets.get(name)
    return 1 if fleet is None else fleet.count


def replica_count(spec: RunSpec) -> int:
    """Return R: all replicas, including those that a fleet's name stands for."""
    return sum(count_behind(spec.config, replica.name) for replica in spec.config.replicas)


def exchange_link_loads(spec: RunSpec, member: MemberSpec, round_: int = 1) -> dict[Direction, LinkLoad]:
    """Return the bytes on the link from a member to the exchange in a round of the run itself."""
    messages = exchange_messages(spec, member, round_, with_fleets=False)
    return {way: LinkLoad(outer_round=sum(size * times for size, times in messages[way])) for way in messages}


def checkpoint_bytes(spec: RunSpec, member: MemberSpec) -> int:
    """Return the bytes of the first run checkpoint's tensors that a member fetches once, at its start."""
    names = [*member.owned, EMBEDDING] if member.follows_embedding else [*member.owned]
    numbers = sum(math.prod(spec.parameter_shapes[name]) for name in names)
    return 4 * (numbers + spec.shape.width * (spec.largest_rank or 0))


# ---- ways to exchange them ----

RINGS = ("ring_all_gather", "ring_all_reduce", "sparse_ring")
"""Values of `simulate.exchange` with which replicas pass contributions on to each other, without an exchange."""


def is_ring(simulate: SimulateSettings) -> bool:
    """Return whether contributions go round a ring of replicas."""
    return simulate.exchange in RINGS


def outer_messages(spec: RunSpec, member: MemberSpec, round_: int = 1) -> Messages:
    """Return the messages that a member sends and receives in a round, as (bytes, number of them)."""
    gathered, replicas = exchange_messages(spec, member, round_), replica_count(spec)
    own = sum(size for size, _ in gathered["forward"])
    match spec.config.simulate.exchange:
        case "gather":
            return gathered
        case "parameter_server":
            # The server sends every value that any replica sent. No two are assumed to have kept the same position.
            sizes = sum_bytes(spec, replicas)
            wanted = spec.fragments.among(wanted_blocks(spec, member), round_)
            received = [(sizes[block], 1) for block in sorted(wanted)]
            return {"forward": gathered["forward"], "backward": received}
        case "ring_all_gather":
            passed_on = [(own, replicas - 1)]
        case "ring_all_reduce":
            passed_on = [(-(-own // replicas), 2 * (replicas - 1))]
        case "sparse_ring":
            parts = [-(-_sum_of_round(spec, count, round_) // replicas) for count in range(1, replicas + 1)]
            passed_on = [*((part, 1) for part in parts[:-1]), (parts[-1], replicas - 1)]
    passed_on = [message for message in passed_on if message[1]]
    return {"forward": passed_on, "backward": passed_on}


@lru_cache(maxsize=64)  # every member asks for it, in both directions
def sum_bytes(spec: RunSpec, count: int) -> dict[str, int]:
    """Return the bytes by block of a sum of `count` contributions, in fp32, as the codec would write it.

    This is the largest possible size: no two replicas kept the same position.
    """
    compression = spec.config.outer.compression
    density = min(1.0, count * compression.density)
    written = compression.model_copy(update={"density": density, "value_bits": 32, "quantiser": "levels"})
    blocks = shapes_by_block(spec.parameter_shapes)
    return {
        block: blob_bytes(BlobAddress(spec.run, 1, EXCHANGE, block), shapes, written)
        for block, shapes in blocks.items()
    }


def _sum_of_round(spec: RunSpec, count: int, round_: int) -> int:
    sizes = sum_bytes(spec, count)
    return sum(sizes[block] for block in spec.fragments.among(sizes, round_))


def expected_volume(spec: RunSpec, replicas: int, round_: int = 1) -> Volume:
    """Return the bytes on the wire of that number of contributions to a round, by the formulas above."""
    sizes = blob_sizes(spec).values()
    mean = fmean(sum(own[block] for block in spec.fragments.among(own, round_)) for own in sizes)
    sums = [_sum_of_round(spec, count, round_) for count in range(1, replicas + 1)]
    is_dense = spec.config.outer.compression.density == 1
    return Volume(
        gather=mean,
        ring_all_gather=(replicas - 1) * mean,
        ring_all_reduce=2 * (replicas - 1) * mean / replicas if is_dense else None,
        sparse_ring=(sum(sums[:-1]) + (replicas - 1) * sums[-1]) / replicas,
    )


def wire_bytes_of(messages: Iterable[tuple[int, int]]) -> float:
    """Return the bytes on the wire of messages given as (payload bytes, number of such messages)."""
    return float(sum(times * wire_bytes(raw_frames(size)) for size, times in messages))


# ---- the way to the exchange ----


@dataclass(frozen=True)
class BoundaryCrossing:
    """One direction of a member's link to the exchange, in a round."""

    n_bytes: float  # bytes on the wire
    seconds: float  # seconds that they occupy the link; a site's shared link, as if no other member used it
    delay: float  # seconds of latencies and mean jitter: every message waits for them

    @property
    def alone(self) -> float:
        """Seconds from begin to end if the link is not shared."""
        return self.seconds + self.delay


def crossing(spec: RunSpec, member: MemberSpec, direction: Direction, round_: int = 1) -> BoundaryCrossing:
    """Return what a member sends (`forward`) or receives in a round. Every message follows the one before."""
    link = spec.links[exchange_link_name(member.name)]
    shape, messages = link.shape(direction), outer_messages(spec, member, round_)[direction]
    wire = wire_bytes_of(messages)
    delay = sum(times for _, times in messages) * (shape.latency + shape.jitter / 2)
    return BoundaryCrossing(wire, wire * 8 / (link.bottleneck(direction) or math.inf), delay)


def site_of(spec: RunSpec, member: MemberSpec) -> str | None:
    """Return the name of the site whose line the member shares."""
    passed = spec.links[exchange_link_name(member.name)].source_line
    return passed.name if passed in _shared_lines(spec) else None


def site_bandwidths(spec: RunSpec, direction: Direction) -> dict[str, float]:
    """Return the bandwidths of sites whose line is limited in this direction, seen from members."""
    way: Way = "up" if direction == "forward" else "down"
    found = {line.name: line.bandwidth_of(way) for line in _shared_lines(spec)}
    return {name: bandwidth for name, bandwidth in found.items() if bandwidth is not None}


def exchange_bandwidth(spec: RunSpec, direction: Direction) -> float | None:
    """Return the bits per second of all members together to the exchange (`forward`) or from it; None is unlimited."""
    line = line_of_exchange(spec)
    return None if line is None else line.bandwidth_of("down" if direction == "forward" else "up")


def is_at_site_of_exchange(spec: RunSpec, member: MemberSpec) -> bool:
    """Return whether a member is at the exchange's own site, so that it needs no line to reach the exchange."""
    line = line_of_exchange(spec)
    return line is not None and member.name in line.members


def line_of_exchange(spec: RunSpec) -> Line | None:
    """Return the line that the YAML gives the exchange."""
    return next((line for line in spec.lines.values() if EXCHANGE in line.members), None)


def _shared_lines(spec: RunSpec) -> list[Line]:
    """Return lines that several members share, at sites other than the exchange's."""
    return [line for line in spec.lines.values() if len(line.members) > 1 and EXCHANGE not in line.members]


def rules_of_predictions(spec: RunSpec) -> Iterator[Rule]:
    """Yield the rules of names in `simulate`, of shared lines and of rings."""
    simulate, names = spec.config.simulate, [replica.name for replica in spec.config.replicas]
    for name in simulate.fleets:
        found = f"`{name}`, which is not a replica of this run"
        yield name not in names, ("simulate", "fleets", name), found, f"one of {', '.join(names)}"
    for name in simulate.measured:
        found = f"costs of `{name}`, which is not a member of this run"
        expected = "those of its members: measure this topology with `hetero-pp calibrate`"
        yield name not in spec.members, ("simulate", "measured", name), found, expected
    for line in spec.lines.values():
        for member in (spec.members[name] for name in line.members if name in spec.members):
            count, key = count_behind(spec.config, member.replica.name), ("sites", line.name, "members")
            found = f"{member.name}, one of {count} replicas in simulate.fleets"
            yield len(line.members) > 1 and count > 1, key, found, "a single replica"
    if not is_ring(simulate):
        return
    ring, density = ("simulate", "exchange"), spec.config.outer.compression.density
    is_group = any(len(replica.members) > 1 for replica in spec.config.replicas)
    yield is_group, ring, f"`{simulate.exchange}` with participant groups", "datacenter replicas only"
    expected = (
        "1: sums of sparse contributions grow on their way, as in `sparse_ring`; `ring_all_gather` forwards them "
        "unchanged"
    )
    is_sparse = simulate.exchange == "ring_all_reduce" and density < 1
    yield is_sparse, ring, f"`ring_all_reduce` at density {density:.3g}", expected
    shared = [line for line in spec.lines.values() if len(line.members) > 1 or EXCHANGE in line.members]
    yield shared, ring, f"`{simulate.exchange}`", "no sites and no exchange.line beside it"
