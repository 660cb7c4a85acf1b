"""Stacks: several whole replicas of one kind that take their inner steps together, because one leaves a GPU idle.

Parameters are one tensor [n, ...] per name, and each replica's are views of it. Code that reads or changes a replica's
parameters between steps needs no change. Boundaries may write floats but not few bits, because a bit format has one
scale for a whole message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hetero_pp.data.batches import Batches
from hetero_pp.model.inner import InnerOptimizer
from hetero_pp.model.subspace_optimizer import SubspaceOptimizer
from hetero_pp.research.ablations import AblatedOptimizer
from hetero_pp.research.vectorized.replica import TableReplica
from hetero_pp.research.vectorized.stacked_model import Block, stacked_block, stacked_losses


class Stack:
    """n replicas with the same boundary, splits and sizes, and their batches; all start with one theta."""

    def __init__(self, replicas: Sequence[TableReplica], batches: Sequence[Batches], compiles: bool = False) -> None:
        self.replicas = replicas
        self.batches = batches
        first = replicas[0]
        self.parameters = {name: _join([each.parameters[name] for each in replicas]) for name in first.parameters}
        self.optimizer = _stacked_optimizer(self.parameters, first.optimizer)
        self._block: Block = torch.compile(stacked_block, dynamic=False) if compiles else stacked_block
        self._device = next(iter(self.parameters.values())).device
        self._no_key = torch.tensor(0)

    def split_embedding(self) -> None:
        """Derive T_perp [V, D] from the synced token embedding, once for all replicas."""
        first, *others = self.replicas
        first.split_embedding()
        for other in others:
            if other.boundary is not None and first.boundary is not None:
                other.boundary.perpendicular = first.boundary.perpendicular
            other.optimizer.perpendicular = first.optimizer.perpendicular
        self.optimizer.perpendicular = first.optimizer.perpendicular

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy [n] of tokens [n, B, L + 1] in the replicas' own forward."""
        first = self.replicas[0]
        inputs = tokens[..., :-1].flatten(0, 1)

        def after_layer(layer: int, x_BLD: Tensor) -> Tensor:
            if first.boundary is None or layer not in first.hops:
                return x_BLD
            return first.boundary.cross(x_BLD, inputs, self._no_key)

        rope_LE = first.module.rope(inputs.shape[1], inputs.device)
        return stacked_losses(self.parameters, tokens, first.module.shape, rope_LE, after_layer, self._block)

    def backward(self, step: int) -> None:
        """Accumulate the gradients [n, ...] of one inner step's batches; `step` counts over the whole run."""
        tokens = torch.stack([batches.train(step) for batches in self.batches]).to(self._device)
        parts = self.replicas[0].micro_batches
        for micro_batch in tokens.chunk(parts, dim=1):
            (self.losses(micro_batch).sum() / parts).backward()

    def inner_step(self, step: int) -> Tensor:
        """Take one inner step of all replicas; return the gradients' norms [n]."""
        self.backward(step)
        norms = self.optimizer.gradient_norm()
        self.optimizer.step(step, norms)
        return norms

    def give_gradients(self) -> None:
        """Move the gradients to the replicas."""
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            for replica, gradient in zip(self.replicas, parameter.grad, strict=True):
                replica.parameters[name].grad = gradient
            parameter.grad = None

    @torch.no_grad()
    def start_again(self, theta: Mapping[str, Tensor]) -> None:
        """Reset the weights to theta, and clear the state of all optimizers, including the replicas' own."""
        for name, parameter in self.parameters.items():
            parameter.copy_(theta[name])
            parameter.grad = None
        for optimizer in (self.optimizer, *(replica.optimizer for replica in self.replicas)):
            for part in optimizer.optimizers:
                part.state.clear()


class StackedOptimizer(InnerOptimizer):
    """Inner optimizer of parameters [n, ...] of n replicas, each clipped by its own norm."""

    leading_dimensions = 1

    def gradient_norm(self) -> Tensor:
        """Return the 2-norms [n] of the replicas' gradients."""
        gradients = [p.grad.flatten(1) for p in self._parameters if p.grad is not None]
        return torch.stack([torch.linalg.vector_norm(each, dim=1) for each in gradients]).norm(dim=0)

    def _clip(self, largest: float, norm: Tensor) -> None:
        factors = (largest / (norm + 1e-6)).clamp(max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factors.view(-1, *[1] * (parameter.ndim - 1)))


class StackedSubspaceOptimizer(StackedOptimizer, SubspaceOptimizer):
    """The same for replicas that keep the trained part of their embeddings in the subspace."""


class StackedAblatedOptimizer(StackedOptimizer, AblatedOptimizer):
    """The same for replicas with ablations that act on the last two dimensions of a parameter."""


def _stacked_optimizer(parameters: Mapping[str, nn.Parameter], own: InnerOptimizer) -> StackedOptimizer:
    """Return the optimizer of a stack whose replicas have optimizers like `own`."""
    needed = parameters, own.settings, own.total_steps
    if isinstance(own, AblatedOptimizer):
        return StackedAblatedOptimizer(*needed, own.basis, own.trains, own.ablations)
    if isinstance(own, SubspaceOptimizer):
        return StackedSubspaceOptimizer(*needed, own.basis, own.trains)
    return StackedOptimizer(*needed)


def is_faster(stacks: Sequence[Stack], theta: Mapping[str, Tensor]) -> bool:
    """Return whether inner steps of stacks are faster here than the replicas' steps one after the other.

    Call it before the first step: it resets the replicas to theta.
    """

    def stacked(step: int) -> None:
        for stack in stacks:
            stack.inner_step(step)

    def looped(step: int) -> None:
        for stack in stacks:
            for replica, batches in zip(stack.replicas, stack.batches, strict=True):
                replica.inner_step(batches.train(step), step)

    seconds = []
    for run in (looped, stacked):
        seconds.append(_seconds(run))
        for stack in stacks:
            stack.start_again(theta)
    return seconds[1] < seconds[0]


def _seconds(run: Callable[[int], None], steps: int = 3, warm_up: int = 2) -> float:
    """Return the seconds that `steps` steps take; infinity if they exceed the GPU's memory."""
    try:
        for step in range(warm_up):
            run(step)
        _synchronise()
        started = time.monotonic()
        for step in range(steps):
            run(step)
        _synchronise()
    except torch.OutOfMemoryError:
        return float("inf")
    return time.monotonic() - started


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _join(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """Join parameters in one tensor [n, ...]; they become views of it."""
    whole = nn.Parameter(torch.stack([parameter.detach() for parameter in parameters]))
    for parameter, part in zip(parameters, whole.detach(), strict=True):
        parameter.data = part
    return whole
