"""What a receiving stage learns by itself of what its boundary dropped: a table by token, which nobody ever sends.

Shapes: B sequences, L positions, D width, R rank, V vocabulary. The receiver knows every token, so part of what
compression dropped can be told from the tokens alone:

    x_hat = P x + T_perp[t] + A[t] W

T_perp tells it of the embedding, and decays with depth; A [V, R] and W [R, D] learn the rest, by the gradient at x_hat,
which the receiver has. The idea of factorised anchors is MAPL's (arXiv 2606.05484), which sends and synchronises them
on boundaries that it learns, too. Here they are local: not contributed, not averaged, no part of the synced model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.inner import InnerOptimizer, InnerSettings
from hetero_pp.learning_rates import LearningRates
from hetero_pp.model import ModelShape
from hetero_pp.seeds import seed_of
from hetero_pp.topology import AnchorSettings


def anchors_of(
    settings: AnchorSettings | None, shape: ModelShape, inner: InnerSettings, total_steps: int | None, *of: object
) -> Anchors | None:
    """Those at the receiving side of a hop; `of`: the run's seed, the replica, and the hop, counted from its first."""
    if settings is None:
        return None
    rank = settings.dimensions(shape.width)
    return Anchors(shape.vocabulary, shape.width, rank, inner, total_steps, seed_of("anchors", *of))


class Anchors:
    """A [V, R] and W [R, D] of one boundary, and what trains them: AdamW as the inner loop's, without weight decay and
    clipped by their own norm. They begin with adding nothing.
    """

    def __init__(
        self, vocabulary: int, width: int, rank: int | None, inner: InnerSettings, total_steps: int | None, seed: int
    ) -> None:
        """`rank` None: A [V, D] alone."""
        self.table = nn.Parameter(torch.zeros(vocabulary, rank or width))
        self.expansion: nn.Parameter | None = None
        self.parameters = {"table": self.table}
        if rank is not None:
            random = torch.randn(rank, width, generator=torch.Generator().manual_seed(seed))
            self.expansion = self.parameters["expansion"] = nn.Parameter(random / rank**0.5)
        own = inner.model_copy(update={"weight_decay": 0.0})
        self.optimizer = InnerOptimizer(self.parameters, own, total_steps)
        self._remembered: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> Anchors:
        """On a device, before the first step."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)
        return self

    def add(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        """What was received, and what its tokens tell."""
        told = F.embedding(tokens_BL, self.table)
        return x_BLD + (told if self.expansion is None else told @ self.expansion)

    def follow(self, rates: LearningRates) -> None:
        """From the next step on other learning rates."""
        self.optimizer.follow(rates)

    def step(self, step: int) -> None:
        """One step of the gradients that have gathered, which are then gone."""
        self.optimizer.step(step, self.optimizer.gradient_norm())

    def drop(self) -> None:
        """Forget the gradients of a step that does not end."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def remember(self) -> None:
        """Keep what A and W are now; what the optimizer keeps is not copied."""
        for name, parameter in self.parameters.items():
            self._remembered.setdefault(name, torch.empty_like(parameter)).copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to what was kept, if something was."""
        for name, kept in self._remembered.items():
            self.parameters[name].copy_(kept)

    def state(self) -> dict[str, Any]:
        """A, W and moments, as tensors that are still in use."""
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"values": values, "optimizer": self.optimizer.state()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, of anchors of the same sizes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["values"][name])
        self.optimizer.load(state["optimizer"])
