"""All replicas of a run, each whole, in one process or over the ranks of torchrun: inner steps and outer rounds.

Weights, optimizer state and error feedback are held once per replica. theta at the start of the round is held once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.shares import SharedBatches
from hetero_pp.data.sources import Source
from hetero_pp.model.compiler import can_compile, compile_layers
from hetero_pp.model.subspace_optimizer import SubspaceOptimizer
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.outer.step import OuterOptimizer, start_before_mean
from hetero_pp.research.ablations import AblatedBoundary, grassmann_step
from hetero_pp.research.outer import PretrainedOptimizer, RenewedWarmup, average_moments
from hetero_pp.research.participation import Weights, replicas_in, sequences_in, share_of, table_batches
from hetero_pp.research.peers.peer import average_peers
from hetero_pp.research.settings import UNMEASURED, Every, research_of
from hetero_pp.research.vectorized.bias import BiasMeter, require_rounds_together
from hetero_pp.research.vectorized.build import build_whole, can_stack, forward_of
from hetero_pp.research.vectorized.hostile import contributions_of
from hetero_pp.research.vectorized.measured import Measured
from hetero_pp.research.vectorized.stack import Stack, is_faster
from hetero_pp.research.vectorized.together import StepsTogether
from hetero_pp.run.snapshot import first_snapshot
from hetero_pp.run.spec import RunSpec
from replica_groups.engines.plain import WholeReplica
from replica_groups.engines.ranks import ALONE, CPU, Ranks


class AllReplicas:
    """All replicas of a run, or this rank's share of them, and theta."""

    def __init__(
        self,
        spec: RunSpec,
        source: Source,
        compiles: bool = False,
        every: Every = UNMEASURED,
        device: torch.device = CPU,
        ranks: Ranks = ALONE,
        stacks: bool | None = None,
    ) -> None:
        """The arguments are those of `train_fast`."""
        if every.bias is not None:
            require_rounds_together(spec)
        self.spec, self.ranks, self.every = spec, ranks, every
        self.research = research_of(spec.config)
        self.count = len(spec.config.replicas)
        """Number of replicas on all ranks."""
        self.indices = ranks.mine(self.count)
        """Indices of the replicas on this rank; all indexed attributes below count only these."""
        snapshot = first_snapshot(spec)
        firsts = {member.replica.name: member for member in reversed(spec.members.values())}
        everyone = [firsts[replica.name] for replica in spec.config.replicas]
        members = [everyone[index] for index in self.indices]
        self.settings: list[ReplicaSettings] = [member.replica for member in members]
        self.batches: list[SharedBatches] = [table_batches(spec, member, source)[0] for member in members]
        self.validation = [tokens.to(device) for tokens in table_batches(spec, everyone[0], source)[1]]
        self.replicas = [build_whole(spec, member, snapshot, device) for member in members]
        if ranks.world > 1 and any(replica.peer is not None for replica in self.replicas):
            raise ConfigError(
                ("research", "ablations", "peer"), "found a peer's boundary on several ranks, expected one process"
            )
        self.is_compiled = compiles and can_compile(device)
        if self.is_compiled:
            compile_layers(replica.module for replica in self.replicas)
        self.theta = {name: tensor.to(device, copy=True) for name, tensor in snapshot.parameters.items()}
        self.measured = Measured(spec, every, device, ranks.world)
        names = [own.name for own in self.settings]
        self.contributions = contributions_of(spec, names, self.theta, ranks, self.measured, self.batches)
        outer, pretraining = spec.config.outer, self.research.pretraining
        self.together = StepsTogether(spec.config.replicas, self.replicas, ranks)
        self.outer = PretrainedOptimizer(outer, pretraining) if pretraining else OuterOptimizer(outer)
        self.bias: list[tuple[int, float]] = []
        self.ahead: list[dict[str, Tensor]] = []
        """With overlap, between rounds: the pseudo-gradient of the round that each replica has already trained."""
        self.local: dict[int, dict[str, Tensor]] = {}
        """With keep_local, between rounds: the parameters of each replica here that the last round excluded."""
        self.own_embeddings: dict[int, Tensor] = {}
        """Embedding at which a replica starts if its boundary discards the part outside the subspace (an ablation)."""
        self.inner_steps = spec.config.inner.require_steps("the vectorized trainer has no clock")
        if self.research.warms_up_again:
            self._warm_up_again()
        self._weights = Weights(spec, source)
        self._enter(1)
        self.stacks: list[Stack] = []
        self.loose = list(range(len(self.replicas)))
        """Indices of replicas in no stack, which take their steps one after the other."""
        self._split()
        if self._may_stack() and (stacks or (stacks is None and device.type == "cuda")):
            self._stack(is_measured=stacks is None)

    def _warm_up_again(self) -> None:
        since, warmup = self.research.pretraining * self.inner_steps, self.spec.config.inner.warmup_steps or 0
        for replica in self.replicas:
            replica.optimizer.follow(RenewedWarmup(replica.optimizer.rates, since, warmup))

    def _may_stack(self) -> bool:
        """Return whether nothing in the run acts on replicas one by one."""
        own = self.research
        excludes = own.attacks is not None and own.attacks.excludes
        is_one_by_one = own.counts or own.averages_moments or excludes or self.spec.config.inner.optimizer == "muon"
        return self.every.bias is None and not is_one_by_one

    def _enter(self, round_: int) -> None:
        """Set which replicas take part in a round, and their weights."""
        self.taking_part = self._taking_part_in(round_)
        """Indices of the replicas here that take part in the current or last round."""
        self.weights = self._weights.in_round(round_)
        """Weight of every replica, by name, in the current or last round."""

    def _taking_part_in(self, round_: int) -> list[int]:
        names = {one.name for one in replicas_in(self.spec.config, round_)} - self.contributions.barred(round_)
        return [index for index, own in enumerate(self.settings) if own.name in names]

    def tokens_in(self, rounds: int) -> int:
        """Return the training tokens of all replicas, on all ranks, in the first `rounds` rounds."""
        config = self.spec.config
        return sequences_in(config, rounds) * config.data.sequence_length * self.inner_steps

    @property
    def errors(self) -> list[dict[str, Tensor]]:
        """Error feedback of each replica here, by parameter."""
        return self.contributions.errors

    @property
    def is_stacked(self) -> bool:
        return len(self.stacks) > 0

    def _stack(self, is_measured: bool) -> None:
        """Stack the replicas that can be stacked; with `is_measured`, only if stacking is faster."""
        kinds: dict[object, list[int]] = {}
        for index, settings in enumerate(self.settings):
            if can_stack(settings, self.research.ablations) and not self.replicas[index].trains_otherwise:
                kinds.setdefault((settings.batch_size, settings.micro_batches, forward_of(settings)), []).append(index)
        groups = [indices for indices in kinds.values() if len(indices) > 1]
        stacks = [
            Stack([self.replicas[i] for i in indices], [self.batches[i] for i in indices], self.is_compiled)
            for indices in groups
        ]
        for stack in stacks:
            stack.split_embedding()
        if is_measured and stacks and not is_faster(stacks, self.theta):
            return
        self.stacks = stacks
        self.loose = [index for index in self.loose if not any(index in indices for indices in groups)]

    def read_ahead(self, round_: int) -> None:
        """Read a round's batches ahead.

        Raises ConfigError, on every rank, if the text of a replica ends before the round does. The state is then that
        of the previous round.
        """
        ended, overlap = None, self.outer.settings.overlap
        last = min(round_ + overlap, self.spec.config.outer.rounds)
        first = round_ + 1 if self.ahead else round_
        try:
            for index in self._taking_part_in(round_):
                self.batches[index].read_ahead(range(self._steps(first).start, self._steps(last).stop))
        except ConfigError as error:
            ended = error
        if any(self.ranks.gather(ended is not None)):
            raise ended or ConfigError(("data", "corpus"), "found too little text for another rank, expected more")

    def _steps(self, round_: int) -> range:
        return range((round_ - 1) * self.inner_steps, round_ * self.inner_steps)

    def round(self, round_: int) -> bool:
        """Run H inner steps on every replica, and the outer round; return False if training diverged.

        With overlap, runs the inner steps of the next round while this round's mean is on its way.
        """
        if self.outer.settings.overlap:
            return self._overlapped_round(round_)
        steps = self._steps(round_)
        self._enter(round_)
        for index in self.taking_part:
            self.replicas[index].enter_round(round_)
            self.batches[index].take(share_of(self.spec, self.settings[index].name, round_), steps.start)
        for index, local in self.local.items():
            _copy(local, self.replicas[index].parameters)
        self.local = {}
        meter = None
        if self.every.bias is not None and round_ % self.every.bias == 0:
            fresh = self.inner_steps * self.spec.config.outer.rounds
            meter = BiasMeter(self.replicas, self.batches, steps, fresh, len(self._compressed))
        if not all(self.ranks.gather(self._inner_steps(steps))):
            return False
        if meter is not None:
            self.bias.append((round_, meter.share(self.theta, self.ranks)))
        if self.outer.settings.source == "difference":
            self._synchronise(round_)
        if self.research.averages_moments:
            average_moments(self.replicas, self.weights, self.ranks)
        self._move_basis(round_)
        self._split()
        return True

    def _overlapped_round(self, round_: int) -> bool:
        """Run a round with overlap: the steps of OuterRound in the same order, on all replicas."""
        if not self.ahead and not self._train(round_, [self.theta for _ in self.replicas]):
            return False
        means, starts = self._contribute(round_)
        if round_ < self.spec.config.outer.rounds:
            for replica, start in zip(self.replicas, starts, strict=True):
                _copy(start, replica.parameters)
            if not self._train(round_ + 1, starts):
                return False
        self.outer.begin(round_, self.weights)
        for name, mean in means.items():
            self.outer.take(self.theta, name, mean)
        for replica in self.replicas:
            replica.enter_round(round_)
            _copy(self.theta, replica.parameters)
        average_peers([replica.peer for replica in self.replicas])
        self._move_basis(round_)
        self._split()
        return True

    def _train(self, round_: int, starts: Sequence[Mapping[str, Tensor]]) -> bool:
        """Run a round's inner steps from each replica's own start; return False if a replica diverged."""
        for replica in self.replicas:
            replica.enter_round(round_)
        if not all(self.ranks.gather(self._inner_steps(self._steps(round_)))):
            return False
        with torch.no_grad():
            self.ahead = [
                {name: start[name] - replica.parameters[name] for name in self.theta}
                for start, replica in zip(starts, self.replicas, strict=True)
            ]
        return True

    @torch.no_grad()
    def _contribute(self, round_: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return the means of the contributions trained ahead, and each replica's start of the next round."""
        self.contributions.begin(round_, self.weights)
        outer, means = self.outer.settings, {}
        starts: list[dict[str, Tensor]] = [{} for _ in self.replicas]
        for name, theta in self.theta.items():
            means[name], sent = self.contributions.mean(name, enumerate(own[name] for own in self.ahead))
            for start, own in zip(starts, sent, strict=True):
                start[name] = start_before_mean(theta, own, outer)
        self.contributions.finish()
        return means, starts

    def _inner_steps(self, steps: range) -> bool:
        for step in steps:
            if self.outer.settings.source == "gradient":
                self._step_together(step)
            else:
                for stack in self.stacks:
                    if not math.isfinite(stack.inner_step(step).sum().item()):
                        return False
                for index in (one for one in self.loose if one in self.taking_part):
                    _, norm, _ = self.replicas[index].inner_step(self.batches[index].train(step), step)
                    if not math.isfinite(norm):
                        return False
        return True

    @torch.no_grad()
    def _synchronise(self, round_: int) -> None:
        """Run the outer round, parameter by parameter."""
        self.contributions.prepare(round_, self._deltas)
        self.contributions.begin(round_, self.weights)
        self.outer.begin(round_, self.weights)
        missed = self.contributions.missed if self.outer.settings.keep_local else frozenset()
        apart = [i for i, own in enumerate(self.settings) if own.name in missed]
        self.local = {
            index: {name: tensor.detach().clone() for name, tensor in self.replicas[index].parameters.items()}
            for index in apart
        }
        for name, start in self.theta.items():
            mean = self.contributions.mean(name, self._deltas(name))[0]
            self.outer.take(self.theta, name, mean)
            for replica in self.replicas:
                replica.parameters[name].copy_(start)
        self.contributions.finish()
        average_peers([replica.peer for replica in self.replicas])

    def _deltas(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the pseudo-gradients of one parameter, of all replicas here that contribute, by index."""
        for index in self.taking_part:
            if index not in self.local:
                is_own = name == EMBEDDING and index in self.own_embeddings
                start = self.own_embeddings[index] if is_own else self.theta[name]
                yield index, start - self.replicas[index].parameters[name]

    def _step_together(self, step: int) -> None:
        """Take one step of a synchronous method."""
        for stack in self.stacks:
            stack.backward(step)
            stack.give_gradients()
        for index in self.loose:
            self.replicas[index].backward(self.batches[index].train(step), step)
        self.together.step(step)
        for replica in self.replicas:
            replica.step_own(step)
        self._split()

    @torch.no_grad()
    def _split(self) -> None:
        for stack in self.stacks:
            stack.split_embedding()
        for index in self.loose:
            replica = self.replicas[index]
            replica.split_embedding()
            if isinstance(replica.boundary, AblatedBoundary) and replica.boundary.discards:
                self.own_embeddings[index] = replica.parameters[EMBEDDING].detach().clone()

    @torch.no_grad()
    def _move_basis(self, round_: int) -> None:
        """Update the one basis U that all replicas share by a Grassmann step (an ablation)."""
        every = self.research.ablations.grassmann_every
        if every is None or round_ % every or not self._compressed:
            return
        moved = self._moved_basis(self._compressed[0])
        for replica in self.replicas:
            if replica.boundary is not None and replica.boundary.basis is not None:
                replica.boundary.move(moved)
                if isinstance(replica.optimizer, SubspaceOptimizer):
                    replica.optimizer.basis = moved

    def _moved_basis(self, index: int) -> Tensor:
        """Return the basis [D, K] after a replica's Grassmann step, on every rank; `index` counts over all ranks."""
        settings = self.spec.config.replicas[index]
        assert isinstance(settings, ParticipantsReplica)
        width = self.spec.shape.width
        moved = self.theta[EMBEDDING].new_empty(width, settings.boundary.dimensions(width) or width)
        if index in self.indices:
            boundary = self.replicas[self.indices.index(index)].boundary
            assert isinstance(boundary, AblatedBoundary)
            assert boundary.basis is not None and boundary.last_gradient is not None
            step = self.research.ablations.grassmann_step
            moved = grassmann_step(boundary.basis, boundary.last_gradient.flatten(0, 1), step)
        self.ranks.broadcast(moved, self.ranks.owner(index, self.count))
        return moved

    def state(self) -> dict[str, Any]:
        """Return everything that the next round depends on; save it before continuing, as its tensors are in use."""
        return {
            "theta": self.theta,
            "errors": self.errors,
            "contributions": self.contributions.state(),
            "momentum": self.outer.momentum,
            "own_embeddings": self.own_embeddings,
            "ahead": self.ahead,
            "local": self.local,
            "bias": self.bias,
            **self.measured.state(),
            "replicas": [replica.state() for replica in self.replicas],
            "batches": [batches.state() for batches in self.batches],
            "is_stacked": self.is_stacked,
            "stacks": [stack.optimizer.state() for stack in self.stacks],
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state`, in a group of the same run."""
        _copy(state["theta"], self.theta)
        for error, saved in zip(self.errors, state["errors"], strict=True):
            _copy(saved, error)
        device = self.theta[EMBEDDING].device
        self.outer.momentum = {name: tensor.to(device) for name, tensor in state["momentum"].items()}
        self.own_embeddings = {index: tensor.to(device) for index, tensor in state["own_embeddings"].items()}
        self.ahead = [{name: one.to(device) for name, one in ahead.items()} for ahead in state.get("ahead", ())]
        self.local = {
            index: {name: one.to(device) for name, one in local.items()}
            for index, local in state.get("local", {}).items()
        }
        self.bias = state["bias"]
        self.measured.load(state)
        self.contributions.load(state.get("contributions", {}))
        for replica, saved in zip(self.replicas, state["replicas"], strict=True):
            replica.load(saved)
        for batches, saved in zip(self.batches, state["batches"], strict=True):
            batches.load(saved)
        for stack, saved in zip(self.stacks, state["stacks"], strict=True):
            stack.optimizer.load(saved)
            stack.split_embedding()

    def evaluate(self, rows: Sequence[Tensor] | None = None) -> float:
        """Return the mean loss over the participating replicas, each in its own forward.

        Equal forwards run once per rank. `rows`: batches [b, L + 1], here and below; the validation rows if None.
        """
        losses: dict[object, float] = {}
        own = []
        for index in self.taking_part:
            key = forward_of(self.settings[index])
            if key not in losses:
                losses[key] = self.replicas[index].evaluate(rows or self.validation)
            own.append(losses[key])
        return sum(self.ranks.gather(sum(own))) / sum(self.ranks.gather(len(own)))

    @torch.no_grad()
    def evaluate_uncompressed(self, rows: Sequence[Tensor] | None = None) -> float:
        """Return the loss of the synced model without any boundary.

        Uses the synced embedding, because a replica may have discarded a part of its own.
        """
        plain = WholeReplica("plain", self.replicas[0].module, self.spec.config.inner, self.spec.total_steps)
        own, embedding = self.own_embeddings.get(0), plain.parameters[EMBEDDING]
        if own is not None:
            embedding.copy_(self.theta[EMBEDDING])
        loss = plain.evaluate(rows or self.validation)
        if own is not None:
            embedding.copy_(own)
        return loss

    def evaluate_compressed(self, rows: Sequence[Tensor] | None = None) -> float | None:
        """Return the loss in the forward of the first compressed replica, on every rank; None if there is none."""
        if not self._compressed:
            return None
        first = self._compressed[0]
        is_here = first in self.indices
        loss = self.replicas[self.indices.index(first)].evaluate(rows or self.validation) if is_here else math.nan
        return self.ranks.gather(loss)[self.ranks.owner(first, self.count)]

    @property
    def _compressed(self) -> list[int]:
        """Indices over all ranks of the replicas that send less than all of their activations."""
        has_peer = self.research.ablations.peer is not None
        return [
            index
            for index, replica in enumerate(self.spec.config.replicas)
            if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1
            if replica.boundary.rank != "full" or has_peer
        ]


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
