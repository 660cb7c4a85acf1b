"""The fast in-process engine: every replica whole, one after the other, with nothing serialised. It makes the tables.

One step's gradients agree with the staged reference to 1e-5, final losses to within the spread over seeds. Held once
per replica: weights, optimizer state and error feedback; once for all: theta at the start of the round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_pp.ablations import grassmann_step
from hetero_pp.compiler import can_compile, compile_layers
from hetero_pp.data.batches import Batches
from hetero_pp.data.tokens import TokenStore
from hetero_pp.inner import EMBEDDING
from hetero_pp.model import Transformer
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.program.bias import BiasMeter
from hetero_pp.program.check import contribution_bytes
from hetero_pp.program.config import MemberPlan, RunPlan
from hetero_pp.program.train import replica_batches
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.snapshot import Snapshot, initial_snapshot
from hetero_pp.topology import ParticipantsReplica, ReplicaSettings
from replica_groups.whole import WholeReplica
from stages.boundary import boundary_of, format_of


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
    contribution_bytes: int
    boundary_bytes_per_token: float
    """Tensor bytes of a token at one hop, in one direction, in the replica that sends most; 0 without a hop."""
    diverged: bool = False
    bias: list[tuple[int, float]] = field(default_factory=list)
    """Of equation 5, as a share of the unbiased pseudo-gradient: (round, share), where it was measured."""


def train_fast(
    plan: RunPlan,
    store: TokenStore,
    on_round: Callable[[int, float], None] = lambda round_, loss: None,
    compiles: bool = False,
    bias_every: int | None = None,
) -> FastResult:
    """Train a whole topology in this thread. `on_round` is told each round's validation loss.

    `compiles`: with torch.compile, where it works. Losses then differ by what rounding makes of them.
    `bias_every`: rounds between measurements of equation 5's bias, which run those rounds twice.
    """
    started = time.monotonic()
    group = Group(plan, store, compiles, bias_every)
    losses: list[float] = []
    for round_ in range(1, plan.config.outer.rounds + 1):
        loss = group.evaluate() if group.round(round_) else math.nan
        if not math.isfinite(loss):
            break
        losses.append(loss)
        on_round(round_, loss)
    diverged = len(losses) < plan.config.outer.rounds
    return FastResult(
        validation_loss=losses,
        uncompressed=math.nan if diverged else group.evaluate_uncompressed(),
        compressed=None if diverged else group.evaluate_compressed(),
        tokens=len(losses) * group.tokens_per_round,
        seconds=time.monotonic() - started,
        contribution_bytes=len(losses) * contribution_bytes(plan),
        boundary_bytes_per_token=max(boundary_bytes_per_token(replica, plan) for replica in plan.config.replicas),
        diverged=diverged,
        bias=group.bias,
    )


class Group:
    """All replicas of a run, and theta."""

    def __init__(self, plan: RunPlan, store: TokenStore, compiles: bool = False, bias_every: int | None = None) -> None:
        self.plan = plan
        snapshot = initial_snapshot(plan.shape, plan.largest_rank, plan.config.seed)
        firsts = {member.replica.name: member for member in reversed(plan.members.values())}
        members = [firsts[replica.name] for replica in plan.config.replicas]
        data = [replica_batches(plan, member, store) for member in members]
        self.batches: list[Batches] = [batches for batches, _ in data]
        self.validation: Sequence[Tensor] = data[0][1]
        self.replicas = [build_whole(plan, member, snapshot) for member in members]
        self.is_compiled = compiles and can_compile(torch.device("cpu"))
        if self.is_compiled:
            compile_layers(replica.module for replica in self.replicas)
        self.theta = {name: tensor.clone() for name, tensor in snapshot.parameters.items()}
        self.errors = [{name: torch.zeros_like(tensor) for name, tensor in self.theta.items()} for _ in members]
        self.outer = OuterOptimizer(plan.config.outer)
        self.bias_every = bias_every
        self.bias: list[tuple[int, float]] = []
        self.own_embeddings: dict[int, Tensor] = {}
        """theta's embedding as replicas start from it that dropped what left the subspace (an ablation)."""
        self.tokens_per_round = plan.config.inner.steps * sum(
            member.replica.batch_size * plan.config.data.sequence_length for member in members
        )
        self._split()

    def round(self, round_: int) -> bool:
        """H inner steps on every replica, and the outer round; False if it diverged."""
        count = self.plan.config.inner.steps
        steps = range((round_ - 1) * count, round_ * count)
        measures = self.bias_every is not None and round_ % self.bias_every == 0
        meter = BiasMeter(self.replicas, self.batches, steps) if measures else None
        if not self._inner_steps(steps):
            return False
        if meter is not None:
            self.bias.append((round_, meter.share(self.theta)))
        if self.outer.settings.source == "difference":
            self._synchronise()
        self._move_basis(round_)
        self._split()
        return True

    def _inner_steps(self, steps: range) -> bool:
        for step in steps:
            if self.outer.settings.source == "gradient":
                self._step_together(step)
            else:
                for replica, batches in zip(self.replicas, self.batches, strict=True):
                    _, norm, _ = replica.inner_step(batches.train(step), step)
                    if not math.isfinite(norm):
                        return False
        return True

    @torch.no_grad()
    def _synchronise(self) -> None:
        """The outer round, parameter by parameter."""
        compression = self.outer.settings.compression
        for name, start in self.theta.items():
            total = torch.zeros(start.numel())
            for index, replica in enumerate(self.replicas):
                own_start = self.own_embeddings.get(index, start) if name == EMBEDDING else start
                sent = select(self.errors[index][name], own_start - replica.parameters[name], compression)
                total[sent.indices] += sent.values
            mean = total.view_as(start).div_(len(self.replicas))
            start.copy_(self.outer.step(name, start, mean))
            for replica in self.replicas:
                replica.parameters[name].copy_(start)

    def _step_together(self, step: int) -> None:
        """AdamW DDP: average the gradients, clip, one step that all replicas share."""
        first, *others = self.replicas
        for replica, batches in zip(self.replicas, self.batches, strict=True):
            replica.backward(batches.train(step), step)
        with torch.no_grad():
            for name, parameter in first.parameters.items():
                assert parameter.grad is not None
                for other in others:
                    theirs = other.parameters[name].grad
                    assert theirs is not None
                    parameter.grad += theirs
                    other.parameters[name].grad = None
                parameter.grad /= len(self.replicas)
            first.optimizer.step(step, first.optimizer.gradient_norm())
            for name, parameter in first.parameters.items():
                for other in others:
                    other.parameters[name].copy_(parameter)
        self._split()

    @torch.no_grad()
    def _split(self) -> None:
        for index, replica in enumerate(self.replicas):
            replica.split_embedding()
            if replica.boundary is not None and replica.boundary.discards:
                self.own_embeddings[index] = replica.parameters[EMBEDDING].detach().clone()

    @torch.no_grad()
    def _move_basis(self, round_: int) -> None:
        """Grassmann update of the one U that all replicas share (an ablation)."""
        for replica, settings in zip(self.replicas, self.plan.config.replicas, strict=True):
            if not isinstance(settings, ParticipantsReplica):
                continue
            every, boundary = settings.boundary.ablations.grassmann_every, replica.boundary
            if every is None or round_ % every or boundary is None or boundary.basis is None:
                continue
            assert boundary.last_gradient is not None
            moved = grassmann_step(boundary.basis, boundary.last_gradient.flatten(0, 1))
            for other in self.replicas:
                if other.boundary is not None and other.boundary.basis is not None:
                    other.boundary.move(moved)
                    other.optimizer.basis = moved
            return

    def evaluate(self) -> float:
        """Mean over replicas of the validation loss in each one's own forward; equal forwards are run once."""
        losses: dict[object, float] = {}
        own = []
        for replica, settings in zip(self.replicas, self.plan.config.replicas, strict=True):
            key = _forward_of(settings)
            if key not in losses:
                losses[key] = replica.evaluate(self.validation)
            own.append(losses[key])
        return sum(own) / len(own)

    def evaluate_uncompressed(self) -> float:
        """The loss without any boundary."""
        plain = WholeReplica("plain", self.replicas[0].module, self.plan.config.inner, self.plan.total_steps)
        return plain.evaluate(self.validation)

    def evaluate_compressed(self) -> float | None:
        """The loss in the forward of the first compressed replica."""
        for replica in self.replicas:
            if replica.boundary is not None and replica.boundary.basis is not None and replica.hops:
                return replica.evaluate(self.validation)
        return None


def _forward_of(replica: ReplicaSettings) -> object:
    """Equal for replicas whose forwards are equal."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return None
    return replica.boundary.model_dump_json(), str(replica.stages)


def build_whole(plan: RunPlan, member: MemberPlan, snapshot: Snapshot) -> WholeReplica:
    """The whole replica that `member` is, or is a stage of, with the snapshot's parameters."""
    replica = member.replica
    module = Transformer(plan.shape)
    _load(module, snapshot.parameters)
    boundary, cuts, ablations = None, [], None
    if isinstance(replica, ParticipantsReplica):
        boundary = boundary_of(replica.boundary, plan.shape.width, snapshot.basis)
        cuts = [layers.stop - 1 for layers in replica.layer_ranges(plan.shape.layers)[:-1]]
        ablations = replica.boundary.ablations
    return WholeReplica(
        replica.name,
        module,
        plan.config.inner,
        plan.total_steps,
        replica.micro_batches,
        boundary,
        cuts,
        plan.config.seed,
        ablations,
    )


@torch.no_grad()
def _load(module: Transformer, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(parameters[name])


def boundary_bytes_per_token(replica: ReplicaSettings, plan: RunPlan) -> float:
    """Tensor bytes that one token costs at one hop, in one direction."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return 0.0
    rank = replica.boundary.dimensions(plan.shape.width) or plan.shape.width
    rows, length = replica.batch_size // replica.micro_batches, plan.config.data.sequence_length
    return format_of(replica.boundary).wire_bytes((rows, length, rank)) / (rows * length)
