"""The reference for every engine: the model, torch.optim.AdamW and a loop, without the code of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import Transformer


class PlainLoop:
    """Trains a whole model in one process. Implements ParameterStore."""

    def __init__(self, module: Transformer, inner: InnerSettings, total_steps: int, micro_batches: int) -> None:
        self.module, self.inner, self.total_steps, self.micro_batches = module, inner, total_steps, micro_batches
        self.parameters = dict(module.named_parameters())
        matrices = [parameter for parameter in self.parameters.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters.values() if parameter.ndim == 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": inner.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=inner.betas,
            eps=inner.epsilon,
            foreach=False,
            fused=False,
        )

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token, for tokens of shape [B, L + 1]."""
        return F.cross_entropy(self.module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, tokens: Tensor, micro_batches: int) -> float:
        """Accumulate the gradient of a batch and return its loss."""
        losses = [self.loss(micro_batch) / micro_batches for micro_batch in tokens.chunk(micro_batches)]
        for loss in losses:
            loss.backward()
        return sum(loss.item() for loss in losses)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate: a warm-up, then half a cosine down to the final share."""
        peak, warmup, floor = (
            self.inner.learning_rate,
            self.inner.warmup_steps or 0,
            self.inner.final_learning_rate_share,
        )
        if step < warmup:
            return peak * (step + 1) / warmup
        share = (step - warmup) / (self.total_steps - warmup)
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2)

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """Take a step. Return loss, gradient norm before clipping, and learning rate."""
        loss, rate = self.backward(tokens, self.micro_batches), self.learning_rate(step)
        assert self.inner.clip_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.inner.clip_norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad()
        return loss, norm.item(), rate

    @torch.no_grad()
    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Return the loss over all rows at once."""
        return self.loss(torch.cat(list(validation))).item()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in sorted(self.parameters.items())}

    def read(self, name: str, rows: range) -> Tensor:
        """Return a view of these rows."""
        return self.parameters[name].detach()[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        """Return the gradient and remove it from the parameter."""
        gradient, self.parameters[name].grad = self.parameters[name].grad, None
        assert gradient is not None
        return gradient

    def write(self, name: str, whole: Tensor) -> None:
        """Write all rows at once."""
        with torch.no_grad():
            self.parameters[name].copy_(whole)

    def finish_writing(self) -> None:
        """Do nothing: `write` has written at once."""
