"""Vectorized trainer: trains every replica whole, one after the other, with nothing serialised.

It makes the tables. On GPUs replicas of one kind may take their inner steps together. The ranks of torchrun may share
the replicas.

One step's gradients agree with the staged reference to 1e-5, final losses to within the spread over seeds. All losses
are bitwise equal to the staged run's if no replica is a group and nothing is compiled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.sources import Source
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.research.attacks.training import success
from hetero_pp.research.peers.peer import bytes_per_token
from hetero_pp.research.settings import UNMEASURED, Every, ablations_of
from hetero_pp.research.vectorized.all_replicas import AllReplicas
from hetero_pp.research.vectorized.checkpoint import Checkpoint
from hetero_pp.research.vectorized.hostile import HostileContributions
from hetero_pp.research.vectorized.measured import contribution_bytes
from hetero_pp.research.vectorized.outer_gradients import OuterGradient
from hetero_pp.run.spec import RunSpec
from replica_groups.engines.ranks import ALONE, CPU, Ranks

SLICES = 8
"""Number of consecutive parts of the validation rows; losses on them show what other rows would have given."""


@dataclass(frozen=True)
class FastResult:
    """Result of a run. Losses are of the synced model after the embedding is split again, in nats."""

    validation_loss: list[float]
    """Loss after each round: each replica's own forward, averaged over replicas."""
    uncompressed: float
    compressed: float | None
    """Loss in the forward of the first compressed replica; None if there is none."""
    tokens: int
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads of this process."""
    contribution_bytes: int
    """Bytes of the contributions of all replicas over the run."""
    boundary_bytes_per_token: float
    """Tensor bytes of a token at one hop, in one direction, in the replica that sends the most; 0 without a hop."""
    diverged: bool = False
    bias: list[tuple[int, float]] = field(default_factory=list)
    """Bias of equation 5 as a share of the unbiased pseudo-gradient: (round, share) for each measured round."""
    similarity: list[tuple[int, float, float]] = field(default_factory=list)
    """Similarity of contributions in measured rounds: (round, mean of the cosines of all pairs, standard deviation)."""
    volume: list[tuple[int, float, float, float | None, float]] = field(default_factory=list)
    """Volume of contributions in measured rounds: (round, bytes that a replica sends with each collective of Volume).
    """
    outer_gradients: list[OuterGradient] = field(default_factory=list)
    """Outer gradients in measured rounds: norms, and cosines with a reference momentum."""
    compiled: bool = False
    """Whether layers were compiled."""
    stacked: bool = False
    """Whether equal replicas took their inner steps together."""
    slices: dict[str, list[float]] = field(default_factory=dict)
    """Loss on each of SLICES parts of the validation rows, by forward (`own`, `uncompressed`, `compressed`)."""
    attacks: dict[str, Any] = field(default_factory=dict)
    """Fields of hostile.Told: actions of attacks and defences. Empty for a row without `research.attacks`."""


def train_fast(
    spec: RunSpec,
    source: Source,
    on_round: Callable[[int, float], None] = lambda round_, loss: None,
    compiles: bool = False,
    every: Every = UNMEASURED,
    device: torch.device = CPU,
    ranks: Ranks = ALONE,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 300.0,
    stacks: bool | None = None,
    on_result: Callable[[FastResult], object] = lambda result: None,
) -> FastResult:
    """Train a whole topology in this thread; `on_round` is called with each round's validation loss.

    `compiles`: use torch.compile where it works. Losses then differ by rounding.
    `stacks`: replicas of one kind take their inner steps together where they can. Losses then differ by rounding. By
    default they do so on a GPU if a measurement finds it faster.
    `every`: rounds between measurements. `ranks`: ranks of torchrun, which all call this alike and get one result.
    `checkpoint`: the file of the state, saved after a round if `checkpoint_seconds` have passed. If it exists, training
    resumes from it, bitwise equal on a CPU. It is removed once `on_result`, which stores the result, returns.

    Raises ConfigError before the round in which a streamed corpus ends that may not be repeated. The state is saved
    then, and training resumes from it once repeats are allowed.
    """
    started, worked = time.monotonic(), time.process_time()
    kept = None if checkpoint is None else Checkpoint(checkpoint, _kept_as(spec), ranks, checkpoint_seconds)
    saved = None if kept is None else kept.load()
    stacks = stacks if saved is None else saved["group"]["is_stacked"]
    group = AllReplicas(spec, source, compiles, every, device, ranks, stacks)
    losses: list[float] = [] if saved is None else saved["losses"]
    if saved is not None:
        started, worked = started - saved["seconds"], worked - saved.get("cpu_seconds", 0.0)
        group.load(saved["group"])
    del saved  # otherwise everything would be held twice

    def save() -> None:
        if kept is not None:
            spent = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - worked}
            kept.save(len(losses), {"losses": losses, **spent, "group": group.state()})

    for round_ in range(len(losses) + 1, spec.config.outer.rounds + 1):
        try:
            group.read_ahead(round_)
        except ConfigError as error:
            save()
            told = "" if kept is None else f"; the state after round {round_ - 1} is kept to resume from"
            raise ConfigError(error.key, error.message + told) from error
        loss = group.evaluate() if group.round(round_) else math.nan
        if not math.isfinite(loss):
            break
        losses.append(loss)
        if kept is not None and kept.is_due():
            save()
        on_round(round_, loss)
    result = _result(group, losses, started, worked)
    on_result(result)
    if kept is not None:
        kept.remove()
    return result


def _result(group: AllReplicas, losses: list[float], started: float, worked: float) -> FastResult:
    """Return the result of a run that began at these monotonic and CPU times; it diverged if losses are missing."""
    spec = group.spec
    diverged = len(losses) < spec.config.outer.rounds
    return FastResult(
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
        outer_gradients=[] if group.measured.outer is None else group.measured.outer.found,
        compiled=group.is_compiled,
        stacked=group.is_stacked,
        slices={} if diverged else _slices(group),
        attacks=_attacks(group),
    )


def _attacks(group: AllReplicas) -> dict[str, Any]:
    if not isinstance(group.contributions, HostileContributions):
        return {}
    followed = success(group.replicas[0].module, group.validation)
    return asdict(group.contributions.told) | {"backdoor": followed}


def _kept_as(spec: RunSpec) -> str:
    """Return the run's name for its checkpoints.

    A streamed run is named as if it repeated its corpus, so that it can resume with repeats once the stream has ended.
    """
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
    """Return the tensor bytes of one token at one hop, in the direction that costs more."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return 0.0
    rank = replica.boundary.dimensions(spec.shape.width) or spec.shape.width
    rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
    if (peer := ablations_of(spec.config, replica).peer) is not None:
        return max(bytes_per_token(peer, replica.boundary, spec.shape.width, replica.batch_size * length))
    return format_of(replica.boundary).wire_bytes((rows, length, rank)) / (rows * length)
