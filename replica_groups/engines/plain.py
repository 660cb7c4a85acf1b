"""`engine: torch`: one process that trains the whole replica, an uncut model, with plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero_pp.core.device import computing
from hetero_pp.core.tensor_files import save_object
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import EMBEDDING, AfterLayer, Transformer, parameters_of
from replica_groups.engines.engine import LocalParameters, Moments
from stages.sender import copies_of

_STATE = "replica.pt"


class PlainEngine(LocalParameters):
    """Implements Engine with a WholeReplica."""

    def __init__(self, whole: WholeReplica, folder: Path | None = None) -> None:
        """`folder` holds copies for `undo` (Moments)."""
        super().__init__(whole.parameters)
        self.whole = whole
        self._moments = Moments(whole.optimizer.optimizers, folder=folder)

    @property
    def done(self) -> int:
        return self.whole.done

    def follow(self, rates: LearningRates) -> None:
        self.whole.optimizer.follow(rates)

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        return self.whole.inner_step(tokens, step)

    def remember(self, moments: bool) -> None:
        self._moments.remember(moments)

    def undo(self) -> None:
        self.whole.drop()
        self._moments.restore()

    def evaluate(self, validation: Sequence[Tensor]) -> float:
        return self.whole.evaluate(validation)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_object(self.whole.state(), folder / _STATE)

    def load(self, folder: Path) -> None:
        self.whole.load(torch.load(folder / _STATE, map_location="cpu", weights_only=True))


class WholeReplica:
    """A model and its inner optimizer."""

    def __init__(
        self, name: str, module: Transformer, inner: InnerSettings, total_steps: int | None, micro_batches: int = 1
    ) -> None:
        self.name = name
        self.module = module
        self.parameters = parameters_of(module)
        self.optimizer = InnerOptimizer(self.parameters, inner, total_steps)
        self.micro_batches = micro_batches
        self.done = 0  # number of finished micro-batches
        self._copies = copies_of(self.device)

    @property
    def device(self) -> torch.device:
        """Device of parameters, activations and loss."""
        return self.parameters[EMBEDDING].device

    def loss(self, tokens: Tensor, step: int = 0, micro_batch: int = 0) -> Tensor:
        """Return the mean cross entropy of tokens [B, L + 1], on any device, with this replica's forward."""
        return whole_loss(self.module, tokens.to(self.device))

    def backward(self, tokens: Tensor, step: int) -> float:
        """Accumulate the gradient of one inner step's batch; return its loss. `step` counts over the whole run."""
        return _sum(self._accumulate(tokens, step))

    def _accumulate(self, tokens: Tensor, step: int) -> list[Tensor]:
        """Accumulate the gradient; return each micro-batch's part of the loss, which is not read from the device."""
        parts = []
        for index, host in enumerate(tokens.chunk(self.micro_batches)):
            (micro_batch,) = self._copies.to_device((host,))
            with computing("forward", self.device):
                loss = self.loss(micro_batch, step, index) / self.micro_batches
            with computing("backward", self.device):
                loss.backward()
            parts.append(loss.detach())
            self.done += 1
        return parts

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """Run one inner step; return (loss, gradient norm, learning rate)."""
        losses = self._accumulate(tokens, step)
        with computing("optimizer step", self.device):
            norm = self.optimizer.gradient_norm()
            rate = self.optimizer.step(step, norm)
        return _sum(losses), norm.item(), rate

    def drop(self) -> None:
        """Discard the gradients of an unfinished step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return everything that the next step after an outer round depends on, as tensors that are still in use."""
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizer.state(),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, in a replica with the same settings."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load(state["optimizer"])

    @torch.no_grad()
    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Return the mean loss over batches [b, L + 1], weighted by rows."""
        rows = sum(len(tokens) for tokens in validation)
        losses = [self.loss(tokens) for tokens in validation]
        return sum(loss.item() * len(tokens) for loss, tokens in zip(losses, validation, strict=True)) / rows


def _sum(losses: Sequence[Tensor]) -> float:
    """Return the sum of the numbers, in their order. Waits for the device."""
    total = 0.0
    for loss in losses:  # not `sum`, which rounds differently since Python 3.12
        total += loss.item()
    return total


def whole_loss(module: Transformer, tokens: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
    """Return the loss of a model on tokens [B, L + 1]; `after_layer` transforms the output of each layer."""
    return module.loss(tokens[:, :-1], tokens[:, 1:], after_layer)
