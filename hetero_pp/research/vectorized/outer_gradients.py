"""The outer gradient of measured rounds: its norm, and how well each replica's own memory follows its momentum.

    Delta = sum_r w_r Delta_r / sum_r w_r,  m <- beta m + Delta      r: the k replicas that a round includes
    uncorrelated = sqrt(sum_r w_r^2 |Delta_r|^2) / sum_r w_r         |Delta| for orthogonal Delta_r; |Delta_r| / sqrt(k)

Sources: DiLoCo (Douillard et al. 2023), section 6.2, says that |Delta| falls as 1 / sqrt(k). SparseLoCo (Sarfi et al.
2025), A.1, reports the cosine of such a reference m and the momentum a_r of each replica. Here a_r is also the error
feedback, and beta is that of a_r. The paper does not say whether a_r is taken before or after its largest values are
removed, by LOM-Sub-k or because they are sent. Both are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.pseudo_gradient.compression import CompressionSettings

OuterGradient = tuple[int, float, float, float | None, float | None]
"""(round, norm, norm if contributions were uncorrelated, mean cosine of a_r and m before the removal, and after it).

The cosines are None for replicas without a memory.
"""


class OuterGradients:
    """Measurements of every `every`-th round, and the reference momentum, which advances in all rounds."""

    def __init__(self, compression: CompressionSettings, every: int) -> None:
        """Raises ConfigError for a transform, as coefficients have no angle to a momentum of parameters."""
        if compression.transform != "none":
            raise ConfigError(
                ("outer_every",), f"found transform {compression.transform}, expected contributions without transform"
            )
        self._every, self._decay = every, compression.error_feedback_decay
        self.found: list[OuterGradient] = []
        self.reference: dict[str, Tensor] = {}

    def begin(self, round_: int) -> None:
        self._round = round_
        self._squares, self._own_squares, self._weight = 0.0, 0.0, 0.0
        self._angles: dict[str, _Angles] = {}
        self._waiting: list[tuple[str, Tensor, Tensor]] = []
        self._sum: Tensor | None = None

    def contribution(self, replica: str, weight: float, delta: Tensor, before: Tensor, after: Tensor) -> None:
        """Add a replica's pseudo-gradient of one parameter, and its memory before and after the removal."""
        self._sum = delta * weight if self._sum is None else self._sum.add_(delta, alpha=weight)
        if self._round % self._every == 0:
            self._own_squares += weight**2 * _product(delta, delta)
            if self._decay > 0:
                self._waiting.append((replica, before, after.clone()))

    def parameter(self, name: str, counted: float) -> None:
        """End a parameter: all included replicas have contributed; `counted` is the sum of their weights."""
        if self._sum is None:
            return
        mean = self._sum / counted
        reference = self.reference.setdefault(name, torch.zeros_like(mean)).mul_(self._decay).add_(mean)
        self._squares, self._weight = self._squares + _product(mean, mean), counted
        for replica, before, after in self._waiting:
            self._angles.setdefault(replica, _Angles()).add(reference, before, after)
        self._waiting, self._sum = [], None

    def finish(self) -> None:
        if self._round % self._every == 0 and self._weight > 0:
            norms = math.sqrt(self._squares), math.sqrt(self._own_squares) / self._weight
            before, after = (
                _mean([angles.cosine(kind) for angles in self._angles.values()]) for kind in ("before", "after")
            )
            self.found.append((self._round, *norms, before, after))

    def state(self) -> dict[str, Any]:
        """Return what later rounds depend on, and the measurements."""
        return {"outer_gradients": self.found, "reference": self.reference}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.found = state.get("outer_gradients", [])
        self.reference = {name: tensor.to(device) for name, tensor in state.get("reference", {}).items()}


class _Angles:
    """Products of one replica's memory and the reference, over the parameters added so far, in fp64."""

    def __init__(self) -> None:
        self._squares = {"reference": 0.0, "before": 0.0, "after": 0.0}
        self._products = {"before": 0.0, "after": 0.0}

    def add(self, reference: Tensor, before: Tensor, after: Tensor) -> None:
        for kind, tensor in (("reference", reference), ("before", before), ("after", after)):
            self._squares[kind] += _product(tensor, tensor)
            if kind != "reference":
                self._products[kind] += _product(tensor, reference)

    def cosine(self, kind: str) -> float:
        """Return the cosine; 0 if a vector is zero."""
        length = math.sqrt(self._squares[kind] * self._squares["reference"])
        return self._products[kind] / length if length > 0 else 0.0


def _product(one: Tensor, other: Tensor) -> float:
    return torch.dot(one.flatten().double(), other.flatten().double()).item()


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
