"""The fast path: every replica whole, one after the other, with nothing serialised. It makes the tables.

On GPUs replicas of one kind may take their inner steps together, and the ranks of torchrun may share the replicas.

One step's gradients agree with the staged reference to 1e-5, final losses to within the spread over seeds. Where no
replica is a group and nothing is compiled, all losses have the staged run's bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero_pp.coefficients import format_of
from hetero_pp.data.sources import Source
from hetero_pp.errors import ConfigError
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.loads import contribution_bytes
from hetero_pp.topology import ParticipantsReplica, ReplicaSettings
from replica_groups.fast.all_replicas import AllReplicas
from replica_groups.fast.checkpoint import Checkpoint
from replica_groups.ranks import ALONE, CPU, Ranks
from stages.peers.peer import bytes_per_token

SLICES = 8
"""Parts of the validation rows, one after the other: how losses differ among them tells what other rows would do."""


@dataclass(frozen=True)
class FastResult:
    """What a run came to. Losses are of the synced model after the embedding is split again, in nats."""

    validation_loss: list[float]
    """Per round: each replica's own forward, averaged over replicas."""
    uncompressed: float
    compressed: float | None
    """In the forward of the first compressed replica; None if there is none."""
    tokens: int
    seconds: float
    cpu_seconds: float
    """Of all threads of this process."""
    contribution_bytes: int
    """Of all replicas over the run."""
    boundary_bytes_per_token: float
    """Tensor bytes of a token at one hop, in one direction, in the replica that sends most; 0 without a hop."""
    diverged: bool = False
    bias: list[tuple[int, float]] = field(default_factory=list)
    """Of equation 5, as a share of the unbiased pseudo-gradient: (round, share), where it was measured."""
    similarity: list[tuple[int, float, float]] = field(default_factory=list)
    """Of contributions: (round, mean of the cosines of all pairs, their standard deviation), where it was measured."""
    volume: list[tuple[int, float, float, float | None, float]] = field(default_factory=list)
    """What contributions come to on the wires: (round, bytes that a replica sends by each way of Volume), likewise."""
    compiled: bool = False
    """Whether layers were compiled."""
    stacked: bool = False
    """Whether equal replicas took their inner steps together."""
    slices: dict[str, list[float]] = field(default_factory=dict)
    """By forward (`own`, `uncompressed`, `compressed`): the loss on each of SLICES parts of the validation rows."""


def train_fast(
    spec: RunSpec,
    source: Source,
    on_round: Callable[[int, float], None] = lambda round_, loss: None,
    compiles: bool = False,
    bias_every: int | None = None,
    device: torch.device = CPU,
    ranks: Ranks = ALONE,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 300.0,
    stacks: bool | None = None,
    similarity_every: int | None = None,
    volume_every: int | None = None,
    on_result: Callable[[FastResult], object] = lambda result: None,
) -> FastResult:
    """Train a whole topology in this thread. `on_round` is told each round's validation loss.

    `compiles`: with torch.compile, where it works. Losses then differ by what rounding makes of them.
    `bias_every`: rounds between measurements of equation 5's bias, which run those rounds twice.
    `ranks`: of torchrun, each of which calls this with the same arguments and gets the same result.
    `checkpoint`: the file that the state is kept in, saved after a round if `checkpoint_seconds` have passed. If it
    is there, training goes on from it, to the same bits on a CPU; it is gone at the end.
    `stacks`: replicas of one kind take their inner steps together (losses differ by rounding), where they can and the
    bias is not measured. None: on a GPU, if that is faster by a measurement, which a checkpoint remembers.

    `similarity_every`: rounds between measurements of how alike contributions are, in one process. `volume_every`: of
    what they come to on the wires. `on_result` keeps the result; the checkpoint is there until it returns.

    Raises ConfigError before the round in which a streamed corpus ends that may not be repeated. The state is saved
    then, and training goes on from it once the corpus may be.
    """
    started, worked = time.monotonic(), time.process_time()
    kept = None if checkpoint is None else Checkpoint(checkpoint, _kept_as(spec), ranks, checkpoint_seconds)
    saved = None if kept is None else kept.load()
    if saved is not None:
        stacks = saved["group"]["is_stacked"]
    group = AllReplicas(
        spec,
        source,
        compiles,
        bias_every,
        device,
        ranks,
        stacks=stacks,
        similarity_every=similarity_every,
        volume_every=volume_every,
    )
    losses: list[float] = []
    if saved is not None:
        losses = saved["losses"]
        started -= saved["seconds"]
        worked -= saved.get("cpu_seconds", 0.0)
        group.load(saved["group"])
    del saved  # or everything would be held twice

    def save() -> None:
        if kept is not None:
            spent = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - worked}
            kept.save(len(losses), {"losses": losses, **spent, "group": group.state()})

    for round_ in range(len(losses) + 1, spec.config.outer.rounds + 1):
        try:
            group.read_ahead(round_)
        except ConfigError as error:
            save()
            told = "" if kept is None else f"; the state after round {round_ - 1} is kept, to go on from"
            raise ConfigError(error.key, error.message + told) from error
        loss = group.evaluate() if group.round(round_) else math.nan
        if not math.isfinite(loss):
            break
        losses.append(loss)
        if kept is not None and kept.is_due():
            save()
        on_round(round_, loss)
    diverged = len(losses) < spec.config.outer.rounds
    result = FastResult(
        validation_loss=losses,
        uncompressed=math.nan if diverged else group.evaluate_uncompressed(),
        compressed=None if diverged else group.evaluate_compressed(),
        tokens=group.tokens_in(len(losses)),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - worked,
        contribution_bytes=contribution_bytes(spec, len(losses)),
        boundary_bytes_per_token=max(boundary_bytes_per_token(replica, spec) for replica in spec.config.replicas),
        diverged=diverged,
        bias=group.bias,
        similarity=group.measured.similarity,
        volume=group.measured.volume,
        compiled=group.is_compiled,
        stacked=group.is_stacked,
        slices={} if diverged else _slices(group),
    )
    on_result(result)
    if kept is not None:
        kept.remove()
    return result


def _kept_as(spec: RunSpec) -> str:
    """Names the run in its checkpoints: one whose stream has ended goes on as one that may repeat it."""
    config = spec.config
    if config.data.streamed is None or config.data.repeat:
        return spec.run
    repeats = config.model_copy(update={"data": config.data.model_copy(update={"repeat": True})})
    return RunSpec(repeats, spec.shape.vocabulary, spec.changes).run


def _slices(group: AllReplicas) -> dict[str, list[float]]:
    batches = group.validation
    count = min(SLICES, len(batches))
    parts = [batches[len(batches) * part // count : len(batches) * (part + 1) // count] for part in range(count)]
    found = {"own": [group.evaluate(part) for part in parts]}
    found["uncompressed"] = [group.evaluate_uncompressed(part) for part in parts]
    compressed = [group.evaluate_compressed(part) for part in parts]
    return found | {"compressed": [loss for loss in compressed if loss is not None]}


def boundary_bytes_per_token(replica: ReplicaSettings, spec: RunSpec) -> float:
    """Tensor bytes that one token costs at one hop, in the direction that costs more."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return 0.0
    rank = replica.boundary.dimensions(spec.shape.width) or spec.shape.width
    rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
    of_peer = bytes_per_token(replica.boundary, spec.shape.width, replica.batch_size * length)
    if of_peer is not None:
        return max(of_peer)
    return format_of(replica.boundary).wire_bytes((rows, length, rank)) / (rows * length)
