"""Memory of every process of a run: what it holds in each phase, tensor by tensor, and the largest sum.

`simulate`, `check` and `launch` use this one formula. Each term is one line that names its tensors and the code that
holds them. `tests/simulator/test_predicted_memory.py` compares the terms with the tensors of small real members, and
`benchmarks/real_size.py` compares the sums with processes of 178M and 512M parameters.

Numbers are fp32 (4 bytes) unless a term says otherwise. P is the number of parameters that a member trains, T that of
the largest tensor. Shapes: B sequences in a micro-batch, L positions, D width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Literal, NamedTuple

from hetero_pp.config.alike import equal_replicas
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import Checkpointing, DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes
from hetero_pp.model.arithmetic import piece_rows
from hetero_pp.model.transformer import EMBEDDING, LAYERS, ModelShape, shapes_by_block
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import batches, kept_values
from hetero_pp.pseudo_gradient.selection import BAND_ELEMENTS
from hetero_pp.simulator.costs import StagePart, assumption, checkpointing_of, part_of, unnamed
from hetero_pp.simulator.traffic import RINGS, blob_sizes, replica_count

Place = Literal["host", "device"]  # the machine's memory, or the memory of the accelerator on which a member computes


class Phase(StrEnum):
    """Work of a process. Its memory is the largest over these phases."""

    # A member reads the run checkpoint and builds its part; the exchange draws or reads the first run checkpoint.
    START = "start"
    STEP = "step"  # forward and backward passes
    UPDATE = "update"  # the inner optimizer's step
    CONTRIBUTE = "contribute"
    APPLY = "apply"  # also the auditor's replay of a round
    # The auditor writes a run checkpoint; a member has compressed its contribution. A saved state needs no copies.
    SAVE = "save"


ALWAYS = frozenset(Phase)
START, STEP, UPDATE, CONTRIBUTE, APPLY, SAVE = (frozenset({phase}) for phase in Phase)
TRAINED = ALWAYS - START
ROUND = CONTRIBUTE | APPLY | SAVE

MEMORY_KINDS: Mapping[str, Sequence[str]] = {
    "weights and gradients": ("weights", "gradients"),
    "moments": ("optimizer",),
    "outer state and tables": (
        *("error feedback", "round start", "rounds ahead", "own parameters", "outer momentum"),
        *("T_perp", "followed embedding", "anchors", "anchors at the start"),
    ),
    "activations": ("activations",),
}
"""Columns of the memory table, and the names of terms that each sums up; the others are `OTHER`."""
OTHER = "other"


def by_kind(held: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by MEMORY_KINDS and OTHER, from bytes by purpose."""
    found = {kind: sum(held.get(name, 0.0) for name in names) for kind, names in MEMORY_KINDS.items()}
    return {**found, OTHER: sum(held.values()) - sum(found.values())}


@dataclass(frozen=True)
class Term:
    """Tensors that a process holds in some phases."""

    name: str
    n_bytes: float
    phases: frozenset[Phase] = ALWAYS
    on_host: bool = False  # whether they lie in the machine's memory even if the member computes on an accelerator


PROCESS_BYTES = 50e6
"""Python, torch and gRPC in a forked process: pages that only it holds (benchmarks/real_size.py, the smallest member).

Processes share the other 0.25 GB, which count once (`LAUNCHER_BYTES`).
"""
LAUNCHER_BYTES = 0.5e9  # the launcher, and the server from which processes are forked: the same benchmark
ALLOCATOR_SHARE = 0.07
"""Memory that the allocator keeps beside the live tensors of a member, as a share of them: the same benchmark, 178m."""


@dataclass(frozen=True)
class Memory:
    """Predicted memory of one process, or of all ranks of one member together."""

    terms: Sequence[Term]
    accelerated: bool = False  # whether the member computes on an accelerator
    allocator_share: float = ALLOCATOR_SHARE

    def in_phase(self, phase: Phase, place: Place = "host") -> dict[str, float]:
        """Return bytes by purpose in a phase, with those that the host's allocator keeps."""
        found = {
            term.name: term.n_bytes
            for term in self.terms
            if phase in term.phases and term.n_bytes and (place == "device") == (self.accelerated and not term.on_host)
        }
        if place == "host" and "process" in found:
            found["allocator"] = self.allocator_share * (sum(found.values()) - found["process"])
        return found

    def held(self, place: Place = "host") -> dict[str, float]:
        """Return bytes by purpose in the phase with the largest sum."""
        return max((self.in_phase(phase, place) for phase in Phase), key=lambda held: sum(held.values()))

    def n_bytes(self, place: Place = "host") -> float:
        """Return the peak."""
        return sum(self.held(place).values())

    @property
    def computing_place(self) -> Place:
        """Memory of the hardware that computes."""
        return "device" if self.accelerated else "host"


def memory_of_member(spec: RunSpec, member: MemberSpec, accelerated: bool) -> Memory:
    """Return the memory of a member, of all its ranks together."""
    replica, stage, outer, part = member.replica, member.stage, spec.config.outer, part_of(spec, member)
    precision, in_flight = replica.precision, 1
    if isinstance(replica, DatacenterReplica) and replica.engine == "torchtitan":
        precision = replica.torchtitan.precision
    elif isinstance(replica, DatacenterReplica) and replica.engine == "deepspeed":
        precision = "bf16" if replica.deepspeed.get("bf16", {}).get("enabled") else "fp32"
    elif isinstance(replica, ParticipantsReplica) and stage is not None:
        ahead = (stage.count - 1 - stage.index) * (1 + replica.extra_in_flight)
        in_flight = min(replica.micro_batches, ahead + 1)
    trains = Trains(
        sequences=replica.batch_size // replica.micro_batches,
        length=spec.config.data.sequence_length,
        micro_batches=replica.micro_batches,
        in_flight=in_flight,
        value_bytes=2 if precision == "bf16" or (precision == "auto" and accelerated) else 4,
        checkpointing=checkpointing_of(replica),
        in_pieces=not isinstance(replica, DatacenterReplica) or replica.engine == "torch",
        accelerated=accelerated,
        compiled=replica.compile,
    )
    ranks = replica.world if isinstance(replica, DatacenterReplica) else 1
    terms = _of_part(spec.shape, part, trains, moment_bytes(spec, member), ranks, not outer.keep_on_device)
    # What settings of the outer rounds add, and the run checkpoint that a member starts from.
    size, followed = 4.0 * part.parameters, 4.0 * part.boundary_numbers.followed
    outer_moments = outer_moment_bytes(spec.config)
    by_block = shapes_by_block({name: spec.parameter_shapes[name] for name in member.owned})
    parts = [0.0] * spec.fragments.count  # bytes of the parameters of each fragment
    for block, shapes in by_block.items():
        parts[spec.fragments.of(block)] += 4.0 * sum(map(math.prod, shapes.values()))
    largest = max(parts)
    blobs = sum(blob_sizes(spec)[replica.name].values()) * largest / (4.0 * parameters_of_model(spec))
    terms += [
        Term("checkpoint", size + followed, START, on_host=True),  # take_part: tensors as they were fetched
        Term("outer momentum", outer_moments / 4 * (size + followed), TRAINED, on_host=True),  # OuterOptimizer.momentum
        Term("own contribution", blobs, ROUND, on_host=True),  # Undecided.blobs
    ]
    if outer.source == "gradient":  # GradientOptimizer: gradients of parameters, contributed and averaged
        terms.append(Term("averaged gradients", size + followed, ROUND, on_host=True))
    if spec.config.states.undo:
        terms.append(
            Term("anchors at the start", 4.0 * part.boundary_numbers.anchors, TRAINED)
        )  # OwnParameters.remember
    if outer.overlap:  # PendingRounds.trained of a round, and of the next one (in fragments in .after) or .starts
        terms.append(Term("rounds ahead", largest if outer.is_streaming else 2 * largest, TRAINED, on_host=True))
    if outer.is_streaming:
        # PendingRounds.before and .starts, and .after once a contribution is compressed, or the next round is trained.
        # A round that stops while it is applied returns to both.
        starts = largest if outer.mixing or outer.overlap else 0.0
        terms += [
            Term("own parameters", n_bytes, phases, on_host=not outer.keep_on_device)
            for phases, n_bytes in (
                (STEP | UPDATE, size),
                (CONTRIBUTE, (1 + outer.overlap) * size + starts),
                (SAVE, 2 * size + starts),
                (APPLY, 2 * size),
            )
        ]
    if outer.keep_local:
        terms.append(Term("own parameters", size, TRAINED, on_host=True))  # PendingRounds.local
    # What the largest tensor needs while it is selected, and while its mean is applied.
    applied = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    own, shape = (max((spec.parameter_shapes[one] for one in of), key=math.prod) for of in (member.owned, applied))
    numbers = math.prod(own)
    selected = 4.0 * numbers + BAND_BYTES * min(numbers, BAND_ELEMENTS)
    selected += SELECTED_BYTES * kept_values(own, outer.compression)
    step = 4.0 * TENSORS_OF_A_STEP[outer_moments] * math.prod(shape)
    terms.append(Term("selection", selected, CONTRIBUTE))  # OuterRound._select: the difference, and what is kept
    if accelerated:
        terms.append(Term("error feedback of a tensor", 4.0 * numbers, CONTRIBUTE))  # OuterRound._select
    terms += [
        Term("outer step", step, APPLY, on_host=True),  # replay
        Term("decoding", _decoded_bytes(shape, outer.compression), APPLY, on_host=True),  # ReceivedBlob.tensor
        Term("one block of all contributions", _largest_block_bytes(spec), APPLY, on_host=True),  # replay: bytes
    ]
    return Memory(terms, accelerated)


@dataclass(frozen=True)
class Trains:
    """Micro-batches of a member, and how it computes them."""

    sequences: int  # sequences of one micro-batch
    length: int
    micro_batches: int  # micro-batches of a step
    in_flight: int  # largest number of micro-batches whose activations it keeps at once
    value_bytes: int  # bytes of a number in activations
    checkpointing: Checkpointing = "none"
    in_pieces: bool = True  # whether the loss is computed in pieces of tokens (`loss_of_hidden`)
    accelerated: bool = False  # whether an accelerator computes; its pieces are larger
    compiled: bool = False
    """Whether layers and loss are compiled; the loss is then computed as one piece even if all tokens fit into it."""


def memory_of_part(shape: ModelShape, part: StagePart, trains: Trains) -> Memory:
    """Return the memory of a stage with AdamW, for a part that no member has yet; without the work on one tensor."""
    return Memory(_of_part(shape, part, trains, 8.0 * part.parameters), trains.accelerated)


def _of_part(
    shape: ModelShape, part: StagePart, trains: Trains, moments: float, ranks: int = 1, keeps_on_host: bool = True
) -> list[Term]:
    """Return what every member holds. A term's comment names the code that holds it.

    `keeps_on_host`: whether the state of outer rounds lies in the host's memory beside an accelerator.
    """
    size, own = 4.0 * part.parameters, part.boundary_numbers
    return [
        Term("process", ranks * PROCESS_BYTES, on_host=True),
        Term("weights", size),  # Transformer
        # The only micro-batch of a step makes gradients while it frees its activations. InnerOptimizer.step drops them.
        Term("gradients", size, STEP | UPDATE if trains.micro_batches > 1 else UPDATE),
        Term("optimizer", moments, TRAINED),  # InnerOptimizer; copies for undo lie on disk (Scratch)
        Term("activations", activation_bytes(shape, part, trains), STEP),  # Stage._in_flight, WholeReplica.loss
        Term("round start", size, on_host=keeps_on_host),  # OuterRound.theta
        Term("error feedback", size, on_host=keeps_on_host),  # OuterRound.error
        Term("followed embedding", 4.0 * own.followed, on_host=keeps_on_host),  # OuterRound.theta
        Term("T_perp", 4.0 * own.perpendicular, TRAINED),  # Boundary.perpendicular
        Term("anchors", 16.0 * own.anchors, TRAINED),  # Anchors: weights, gradients, two moments
    ]


BAND_BYTES = 7  # bytes of a value of a band while the largest are found: magnitudes, and candidates (`find_largest`)
SELECTED_BYTES = 32  # bytes of a selected value: position, index, value, and its quantised value (`select`)

TENSORS_OF_A_STEP = {0: 1, 4: 2, 8: 6}
"""Tensors that the outer step of one parameter holds at once, by the bytes of its moments (`OuterOptimizer.take`).

They are the mean, and products of the moments.
"""

VALUE_BYTES, POSITION_BYTES = 22, 23
"""Bytes of a kept value while its tensor is decoded (index, code, value), and of its stored position."""


def _decoded_bytes(shape: tuple[int, ...], compression: CompressionSettings) -> float:
    """Return the bytes of one contribution's values of a tensor while they are decoded."""
    return kept_values(shape, compression) * (VALUE_BYTES + (POSITION_BYTES if compression.density < 1 else 0))


def _largest_block_bytes(spec: RunSpec) -> float:
    """Return the bytes of all replicas' contributions to one block, which are held together."""
    blocks = Counter[str]()
    for replica, count in representatives(spec):
        blocks.update({name: count * size for name, size in blob_sizes(spec)[replica.name].items()})
    return float(max(blocks.values()))


def representatives(spec: RunSpec) -> Iterator[tuple[ReplicaSettings, int]]:
    """Yield one replica of each set of equal replicas, and their number."""
    fleets = spec.config.simulate.fleets
    for replicas in equal_replicas(spec):
        first = replicas[0]
        yield first, fleets[first.name].count if first.name in fleets else len(replicas)


def outer_moment_bytes(config: RunConfig) -> int:
    """Return the bytes per parameter that the outer optimizer keeps; with averaged gradients that is AdamW."""
    outer = config.outer
    if outer.source == "gradient":
        return 8
    return 8 if outer.optimizer == "adam" else 4 if outer.momentum else 0


def parameters_of_model(spec: RunSpec) -> int:
    return sum(map(math.prod, spec.parameter_shapes.values()))


def moment_bytes(spec: RunSpec, member: MemberSpec) -> float:
    """Return the bytes of the inner optimizer's moments of a member's parameters."""
    inner, replica, total = spec.config.inner, member.replica, 0.0
    if spec.config.outer.source == "gradient":  # the outer optimizer takes the steps
        return total
    rank = None  # K if a stage trains its embedding by coefficients C [V, K]
    if (
        isinstance(replica, ParticipantsReplica)
        and replica.stage_count > 1
        and replica.boundary.embedding == "coefficients"
    ):
        rank = replica.boundary.dimensions(spec.shape.width)
    for name in member.owned:
        shape = spec.parameter_shapes[name]
        hidden = name.startswith(LAYERS) and len(shape) > 1
        each = {"adamw": 8, "sgd": 4 if inner.momentum else 0, "muon": 4 if hidden else 8}[inner.optimizer]
        if name == EMBEDDING and rank is not None:
            total += (each + 8) * rank * shape[0]  # C and its gradient, too
        else:
            total += each * math.prod(shape)
    return total


def activation_bytes(shape: ModelShape, part: StagePart, trains: Trains) -> float:
    """Return the bytes of the activations of all micro-batches in flight.

    A layer keeps for its backward pass:

    - of both norms the input, the normalized input and the output (6 D);
    - q, k, v and the attention's output (4 D, also if several queries share a head of k and v: each has its copy);
    - gate, its silu, up and their product (4 F).

    With checkpointing a layer keeps only its input (D). With `selective` it also keeps q, v, gate and down (3 D + F),
    and on an accelerator the attention's output (D). The kernel of a CPU is not in torchtitan's policy.

    One micro-batch at a time is in its backward pass. It first holds the head's logits, their log-softmax and the
    gradients of both in fp32 (4 V). If the loss is computed in pieces, it holds two of these for one piece, and the
    head's gradient twice. Then it holds, one layer at a time, recomputed values and gradients (2 D + 2 F).
    The larger of the two counts. `tests/engines/test_activation_memory.py` measures all of this.
    """
    width, feed_forward = shape.width, shape.feed_forward
    queries, values = shape.heads * shape.head_size, shape.groups * shape.head_size
    whole = 6 * width + 4 * queries + 4 * feed_forward
    selective = 2 * width + (1 + trains.accelerated) * queries + values + feed_forward
    kept = {"none": whole, "selective": selective, "full": width}[trains.checkpointing]
    per_token, tokens = part.layers * kept * trains.value_bytes, trains.sequences * trains.length
    head = layer = 0
    if part.predicts:  # logits and their gradients, in one piece or in pieces (`loss_of_hidden`)
        rows = piece_rows(shape.vocabulary, trains.accelerated)
        if not trains.in_pieces or (tokens <= rows and not trains.compiled):
            head = 16 * shape.vocabulary * tokens
        else:
            cast = 0 if trains.value_bytes == 4 else trains.value_bytes
            head = 8 * shape.vocabulary * min(rows, tokens) + (8 + cast) * shape.vocabulary * width
    if part.layers:
        layer = (whole - kept + 2 * width + 2 * feed_forward) * trains.value_bytes * tokens
    return float(per_token * tokens * trains.in_flight + max(head, layer))


def memory_assumptions(config: RunConfig) -> list[str]:
    """State the assumptions of the predicted memory, a sentence for each kind."""
    groups = any(isinstance(one, ParticipantsReplica) and one.stage_count > 1 for one in config.replicas)
    extra = "; a stage keeps 1, and 1 + extra_in_flight more for each later stage" if groups else ""
    own = "; own parameters of a replica, 4 to 8 more" if config.outer.is_streaming else ""
    found = [
        "memory: the largest sum over the phases of a round (a step, the contribution, its mean); on an accelerator, "
        "round start and error feedback lie in the host's memory and are not shown",
        "weights and gradients: fp32, 4 bytes per parameter each; moments: AdamW's two, 8 bytes per parameter",
        f"outer state: error feedback and the start of the round, 8 bytes per parameter{own}; tables: of boundaries",
        "activations: bf16 on an accelerator, fp32 on a CPU; a layer keeps 10 x width + 4 x feed-forward values per "
        f"token for each micro-batch in flight{extra}",
        "a backward pass also needs the larger of two amounts: 4 x vocabulary fp32 values per token "
        "(logits, log-softmax and the gradients of both, in pieces if they are many), or 2 x width + 2 x "
        "feed-forward values (gradients of a layer) and recomputed activations",
    ]
    if any(checkpointing_of(one) != "none" for one in config.replicas):
        found.append(
            "recompute: layers, and activation_checkpointing: full, keep 1 x width values per layer and token, "
            "selective 5 x width + 1 x feed-forward (4 x width on a CPU); all recompute one layer at a time"
        )
    return [*found, "not included: CUDA and the framework, buffers of collectives"]


# ---- the exchange, with its auditor ----

CONNECTION_BYTES = 2e6  # streams and threads of one member: benchmarks/exchange_load.py, runs of the smallest model
RELAY_BYTES = 2**18
"""Memory of the relay for each direction of a relayed link: half of 0.51 MB, the mean of 19 links in one process."""
MOST_DECODED = 16  # largest number of tensors that are decoded at the same time, with two cores
INDEX_BYTES = 8
KEPT_BYTES = 32 * 2**20  # smallest block of memory that the allocator does not keep (hetero_pp/rpc/channels.py)


def memory_of_exchange(spec: RunSpec, members: int, relayed_links: int, way: str) -> Memory:
    """Return the memory with so many members and relayed stage links. `way`: see `ExchangeLoad.way`."""
    moments, shapes = outer_moment_bytes(spec.config), spec.parameter_shapes
    model, tensor = 4.0 * parameters_of_model(spec), 4.0 * max(map(math.prod, shapes.values()))
    block = 4.0 * max(sum(map(math.prod, one.values())) for one in shapes_by_block(shapes).values())
    is_whole = spec.config.outer.source == "gradient"
    decodes = way not in RINGS
    largest = max(shapes.values(), key=math.prod)
    decoding = min(2 * replica_count(spec), MOST_DECODED) * _decoded_bytes(largest, spec.config.outer.compression)
    blob = max(size for blobs in blob_sizes(spec).values() for size in blobs.values())
    return Memory(
        [
            Term("process", PROCESS_BYTES),
            Term("members", CONNECTION_BYTES * members),
            Term("first run checkpoint", model, START),  # first_checkpoint, until it is written
            Term("momentum", moments / 4 * model, TRAINED),  # Auditor._optimizer
            Term("parameters", model if is_whole else block, APPLY),  # Auditor._replay; the rest is on disk (Scratch)
            Term("averaged gradients", model if is_whole else 0.0, APPLY),  # GradientOptimizer
            Term("outer step", TENSORS_OF_A_STEP[moments] * tensor, APPLY),  # replay
            Term("checkpoint", model, SAVE),  # Auditor._save
            Term("one block of all contributions", _largest_block_bytes(spec) if decodes else 0.0, APPLY),
            Term("decoding", decoding if decodes else 0.0, APPLY),  # as contributions arrive, and for the auditor
            Term("messages in flight", float(members * blob) if way == "gather" else 0.0, APPLY),
            Term("relay", float(2 * RELAY_BYTES * relayed_links)),
        ],
        allocator_share=0.0,  # it frees whole models and blocks, and trims its memory (`giving_freed_memory_back`)
    )


def is_freed_at_once(values: int) -> bool:
    """Return whether the allocator returns the memory of that number of decoded values to the system at once."""
    return values * INDEX_BYTES >= KEPT_BYTES


# ---- where memory does not suffice ----

_LEAST_SAVING = 0.01  # smallest share of the memory that a key has to save to be suggested


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


def remedy(
    spec: RunSpec, members: Sequence[tuple[MemberSpec, Memory]], needed: float, capacity: float, place: Place
) -> str:
    """Name the first key that makes members fit into a memory that they share, or else the one that saves most."""
    useful: list[tuple[str, float]] = []
    for replica in {member.replica.name: member.replica for member, _ in members}.values():
        for key, value, changed in _changes(replica):
            saved = sum(
                memory.n_bytes(place)
                - memory_of_member(spec, replace(member, replica=changed), memory.accelerated).n_bytes(place)
                for member, memory in members
                if member.replica.name == replica.name
            )
            if saved >= _LEAST_SAVING * needed:
                useful.append((f"--set replicas.{replica.name}.{key}={value} saves {format_bytes(saved)}", saved))
    if not useful:
        return "parameters and moments take the most; use machines with more memory, or more machines"
    for told, saved in useful:
        if needed - saved <= capacity:
            return told
    return f"{max(useful, key=lambda one: one[1])[0]}, which is not enough"


def _changes(replica: ReplicaSettings) -> Iterator[tuple[str, int | str, ReplicaSettings]]:
    """Yield a key, its value and the replica with it, the cheapest in quality and time first."""
    changes: list[tuple[str, int | str]] = []
    if isinstance(replica, ParticipantsReplica):
        changes += [("extra_in_flight", extra) for extra in range(replica.extra_in_flight - 1, -1, -1)]
    shares = replica.data_parallel if isinstance(replica, DatacenterReplica) else 1
    counts = range(replica.micro_batches + 1, replica.batch_size + 1)
    changes += [("micro_batches", count) for count in counts if replica.batch_size % (count * shares) == 0]
    if isinstance(replica, ParticipantsReplica) or replica.engine == "torch":
        changes += [("recompute", "layers")] if replica.recompute == "none" else []
        changes += [("precision", "bf16")] if replica.precision != "bf16" else []
    for key, value in changes:
        yield key, value, replica.model_copy(update={key: value})
    if isinstance(replica, DatacenterReplica) and replica.engine == "torchtitan":
        for chosen in ("selective", "full"):
            titan = replica.torchtitan.model_copy(update={"activation_checkpointing": chosen})
            yield "torchtitan.activation_checkpointing", chosen, replica.model_copy(update={"torchtitan": titan})


# ---- bytes and files that the processes of a run on one host keep on disk, by purpose ----

OF_THE_ROUND = "the start of the round"  # purpose of what is removed when the run ends

_MEMBER_CHECKPOINTS = 2  # newest saved states that are kept: replica_groups/member/saved_states.py
_STEP_BYTES, _ROUND_BYTES = 220, 1_000
"""Bytes in metrics.jsonl for an inner step of a member, and for a round of a member."""
_LINK_BYTES, _ACTIVITY_BYTES = 220, 110
"""Bytes in metrics.jsonl for the use of one direction of a link, and for an activity of a member."""
_ENTRY_BYTES, _RECORD_BYTES = 230, 850
"""Bytes of a round's record for one blob, and for all else with the auditor's record of the round."""
_DISK_BLOCK_BYTES = 4096  # unit in which usual file systems give space to a file
_OTHER_FILES = 9  # files of any run: its configuration, chart, summary and the like
_A_SECOND = 2
"""Most reports of each activity and each direction a second: replica_groups/member/reporter.py, take_part.py."""


class DiskUse(NamedTuple):
    """Bytes and number of the files of one purpose."""

    n_bytes: float
    files: int = 1

    @property
    def space(self) -> float:
        """Bytes in whole blocks of the file system, which small files fill badly."""
        return self.files * _DISK_BLOCK_BYTES * math.ceil(self.n_bytes / self.files / _DISK_BLOCK_BYTES)


def disk_use(spec: RunSpec, names: Sequence[str]) -> dict[str, DiskUse]:
    """Return what these members, and the exchange if it is among them, keep on disk at the end of the run, by purpose.

    Encoded text is not included. A saved state has the optimizer's moments and the error feedback of each
    parameter. That of a whole replica has the parameters, too, and so has any in fragments, or with `outer.overlap`.
    """
    config, rounds = spec.config, spec.latest.rounds
    here, saved, started = [spec.members[name] for name in names if name in spec.members], 0.0, 0.0
    for member in here:
        parameters = sum(math.prod(spec.parameter_shapes[name]) for name in member.owned)
        moments, outer = moment_bytes(spec, member), config.outer
        copies = 1 + (member.stage is None) + outer.is_streaming + outer.overlap / outer.fragments
        saved += _MEMBER_CHECKPOINTS * (moments + 4 * copies * parameters)
        started += 4 * parameters + (moments if config.states.undo else 0)
    saves = min(_MEMBER_CHECKPOINTS, -(-rounds // config.states_every))
    found = {
        "saved states": DiskUse(saved, max(1, saves * sum(3 + member.reads_data for member in here))),
        OF_THE_ROUND: DiskUse(started),
    }
    if EXCHANGE not in names:
        return found
    # In metrics.jsonl the use of a link is reported after an inner step, and at the end of the round. Where the round's
    # duration is unknown, a step takes a second.
    members, seconds = len(spec.members), config.inner.seconds or float(config.inner.steps or 0)
    steps = config.inner.steps or _A_SECOND * seconds
    uses = 2 * len(spec.links) * (1 + min(steps, _A_SECOND * seconds))
    of_members = members * (_ROUND_BYTES + _STEP_BYTES * steps + _A_SECOND * _ACTIVITY_BYTES * seconds)
    found["metrics"] = DiskUse(rounds * (of_members + _LINK_BYTES * uses))
    found["other"] = DiskUse(0.0, _OTHER_FILES - 1)
    if config.store.url is None:
        checkpoints = min(config.checkpoints.keep, -(-rounds // config.checkpoints.every))
        model, deposits, fragments = parameters_of_model(spec), 0, spec.fragments.count
        for member, round_ in product(spec.members.values(), range(1, fragments + 1)):
            blocks, sizes = spec.roster.contributes(member.name, round_), blob_sizes(spec)[member.replica.name]
            blobs = ((block, range(size)) for block, size in sizes.items() if block in blocks)
            deposits += sum(1 for _ in batches(blobs))  # a file for each deposit of a member in a round
        every = blob_sizes(spec).values()
        kept = (1 + checkpoints) * (4 + outer_moment_bytes(config)) * model
        found["run checkpoints"] = DiskUse(kept, 1 + checkpoints)
        recent = (config.checkpoints.keep + 1) * config.checkpoints.every
        held = (min(rounds, recent) if config.store.history == "recent" else rounds) / fragments
        found["contributions"] = DiskUse(held * sum(sum(one.values()) for one in every), math.ceil(held * deposits))
        of_records = rounds * (_RECORD_BYTES + _ENTRY_BYTES * sum(map(len, every)) / fragments)
        found["records"] = DiskUse(of_records, 2 * rounds)
        found["other"] = DiskUse(0.0, _OTHER_FILES - 1 + members)  # the incarnation of each slot
    return found
