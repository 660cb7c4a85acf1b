"""The inner optimizer: AdamW with warm-up, cosine decay and clipping by the norm of the whole replica.

Source: Het-PP Table 9. Its state is kept across outer rounds. Steps are counted over the whole run, so the
learning rate of a step is the same function of (round, step) in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor, nn

from hetero_pp.settings import Settings

EMBEDDING = "tok_embeddings.weight"


class InnerSettings(Settings):
    """The inner loop of a round."""

    steps: int = Field(10, ge=1, description="inner steps between outer rounds, H in the papers")
    learning_rate: float = Field(1e-2, gt=0)
    final_learning_rate_share: float = Field(0.1, ge=0, le=1, description="of the peak, at the end of the cosine")
    warmup_steps: int = Field(10, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="not applied to norms")
    clip_norm: float | None = Field(1.0, gt=0, description="of the whole replica's gradient; null for none")

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Linear warm-up, then a cosine down to the final share at `total_steps`; `step` counts from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        floor = self.final_learning_rate_share
        return self.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


class InnerOptimizer:
    """AdamW over the parameters of one replica, or of one stage of it.

    In a replica with compressed boundaries T_perp is fixed during the inner loop, so the embedding's weight decay
    acts on T_S = TE - T_perp only; set `perpendicular` to T_perp [V, D] after every outer round.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: InnerSettings, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.perpendicular: Tensor | None = None
        self._embedding = parameters.get(EMBEDDING)
        self._parameters = list(parameters.values())
        decayed = [p for name, p in parameters.items() if p.ndim > 1 and name != EMBEDDING]
        undecayed = [p for p in self._parameters if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        if self._embedding is not None:
            groups.append({"params": [self._embedding], "weight_decay": settings.weight_decay})
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients here."""
        return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def step(self, step: int, replica_norm: Tensor) -> float:
        """Clip by the whole replica's norm, step, clear the gradients; returns the learning rate."""
        if self.settings.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.settings.clip_norm, replica_norm)
        rate = self.settings.learning_rate_at(step, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if self._embedding is not None and self.perpendicular is not None:
            self._decay_within_subspace(self._embedding, self.perpendicular, rate)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return rate

    def _decay_within_subspace(self, embedding: nn.Parameter, perpendicular: Tensor, rate: float) -> None:
        self.adamw.param_groups[-1]["weight_decay"] = 0.0
        with torch.no_grad():
            embedding.sub_((embedding - perpendicular).mul_(rate * self.settings.weight_decay))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters by name, in a fixed order."""
    return dict(sorted(module.named_parameters()))
