"""Anchors: a table by token that a receiving stage learns for what its boundary dropped, and that is never sent.

Shapes: B sequences, L positions, D width, R rank, V vocabulary. The receiver knows every token, so it can estimate a
part of what compression dropped from the tokens alone:

    x_hat = P x + T_perp[t] + w A[t] W

T_perp gives the embedding's part, which decays with depth. A [V, R] and W [R, D] learn the rest from the gradient at
x_hat, which the receiver has. The idea of factorized anchors is MAPL's (arXiv 2606.05484), which also sends and
synchronizes them, on boundaries that it learns too.

Here they are local. They are not contributed, not averaged, and no part of the synchronized model. Their weight w is 1,
or falls to 0 towards the end of a run (`fade`), so that the synchronized model learns to do without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.core.device import CPU
from hetero_pp.core.seeds import seed_of
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import AnchorSettings
from hetero_pp.model.transformer import ModelShape

_VALUES = "values."  # prefix of the names of values among a replica's own tensors; the others are moments


class OwnParameters:
    """Parameters that a replica trains beside the synchronized model, always with AdamW, whatever trains the model.

    They are clipped by their own norm. `restore` returns to the values that `remember` kept."""

    def __init__(self, parameters: dict[str, nn.Parameter], inner: InnerSettings, total_steps: int | None) -> None:
        self.parameters = parameters
        adamw = inner.model_copy(update={"optimizer": "adamw", "momentum": None})
        self.optimizer = InnerOptimizer(parameters, adamw, total_steps)
        self._remembered: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> None:
        """Move the parameters to a device, before the first step."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""
        self.optimizer.follow(rates)

    def step(self, step: int) -> None:
        """Take one step with the accumulated gradients, and clear them."""
        self.optimizer.step(step, self.optimizer.gradient_norm())

    def drop(self) -> None:
        """Drop the gradients of an unfinished step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the current values; the optimizer's state is not copied."""
        for name, parameter in self.parameters.items():
            self._remembered.setdefault(name, torch.empty_like(parameter)).copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied values, if there are any."""
        for name, kept in self._remembered.items():
            self.parameters[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return values and moments by name, as tensors that are still in use."""
        values = {f"{_VALUES}{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return values | self.optimizer.moments()

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`. Raises KeyError for a missing value, ValueError for another shape."""
        self.optimizer.load_moments({name: one for name, one in tensors.items() if not name.startswith(_VALUES)})
        for name, parameter in self.parameters.items():
            if (value := tensors[f"{_VALUES}{name}"]).shape != parameter.shape:
                raise ValueError(f"found {name} {list(value.shape)}, expected {list(parameter.shape)}")
            parameter.copy_(value)


def anchors_of(
    settings: AnchorSettings | None,
    shape: ModelShape,
    inner: InnerSettings,
    total_steps: int | None,
    rounds: int,
    *of: object,
    device: torch.device = CPU,
) -> Anchors | None:
    """Return the anchors at the receiver of a hop, on a device; None without settings.

    `of` is the run's seed, the replica, and the hop, counted from its first.
    """
    if settings is None:
        return None
    rank = settings.dimensions(shape.width)
    anchors = Anchors(shape.vocabulary, shape.width, rank, inner, total_steps, anchors_seed(*of), device)
    anchors.weight_in = partial(settings.weight, rounds=rounds)
    return anchors


def anchors_seed(*of: object) -> int:
    """Return the seed of the anchors of a hop; `of` as in `anchors_of`."""
    return seed_of("anchors", *of)


def first_expansion(rank: int, width: int, seed: int) -> Tensor:
    """Return W [R, D] before the first step."""
    return torch.randn(rank, width, generator=torch.Generator().manual_seed(seed)) / rank**0.5


class Anchors(OwnParameters):
    """A [V, R] and W [R, D] of one boundary, trained by AdamW with the inner loop's settings but no weight decay.

    Initially they add nothing.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        rank: int | None,
        inner: InnerSettings,
        total_steps: int | None,
        seed: int,
        device: torch.device = CPU,
    ) -> None:
        """Create the parameters. If `rank` is None, there is only A [V, D]."""
        self.weight = 1.0  # w
        self.weight_in: Callable[[int], float] = lambda round_: 1.0  # w by round
        self.table = nn.Parameter(torch.zeros(vocabulary, rank or width, device=device))
        self.expansion: nn.Parameter | None = None
        parameters = {"table": self.table}
        if rank is not None:
            self.expansion = parameters["expansion"] = nn.Parameter(first_expansion(rank, width, seed).to(device))
        super().__init__(parameters, inner.model_copy(update={"weight_decay": 0.0}), total_steps)

    def add(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        """Return the received activations plus the weighted estimate from their tokens."""
        if self.weight == 0:
            return x_BLD
        told = F.embedding(tokens_BL, self.table)
        return x_BLD + self.weight * (told if self.expansion is None else told @ self.expansion)

    def enter_round(self, round_: int) -> None:
        """Use the weight of this round, until the next."""
        self.weight = self.weight_in(round_)
