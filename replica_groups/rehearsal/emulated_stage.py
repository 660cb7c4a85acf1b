"""A stage that computes nothing: its messages have the true shapes, and timed waits take the place of its work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.topology import BoundarySettings, StageSpec
from hetero_pp.core.device import CPU
from hetero_pp.model.inner import InnerOptimizer
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import ModelShape, build_part
from hetero_pp.pipeline.coefficients import Symbols, format_of, noise_key
from hetero_pp.run.simulate_section import MeasuredCost
from replica_groups.rehearsal.pace import Pace
from stages.boundary import Boundary
from stages.stage import Stage

NORM = 1.0
"""Gradient norm of each stage."""


class EmulatedBoundary(Boundary):
    """Sends the same random symbols with every message."""

    def __init__(self, settings: BoundarySettings, width: int, rows: int, length: int) -> None:
        """`rows`: most sequences of a message; `length`: positions of each."""
        super().__init__(width, format_of(settings))
        self._rank = settings.dimensions(width) or width
        self._shape = (rows, length, self._rank)
        self._activations: dict[int, Symbols] = {}
        self.gradient: Symbols = self.format.gradient(self._random(rows), noise_key(0, "rehearsal", 0, 0, 0))

    @property
    def dimensions(self) -> int:
        return self._rank

    def _random(self, rows: int) -> Tensor:
        return torch.randn(rows, *self._shape[1:], generator=torch.Generator().manual_seed(0))

    def encode_activation(self, x_BLD: Tensor) -> Symbols:
        """Return the symbols of activations [B, L, K]; only B is read from the argument."""
        rows = len(x_BLD)
        if rows not in self._activations:
            self._activations[rows] = self.format.activation(self._random(rows))
        return self._activations[rows]


class _NoGradients(InnerOptimizer):
    """Has nothing to step."""

    def __init__(self) -> None:
        self._norm = torch.tensor(NORM)

    def gradient_norm(self) -> Tensor:
        return self._norm


class EmulatedStage(Stage):
    """A stage without parameters, whose work takes the time that its cost says."""

    def __init__(
        self, spec: StageSpec, shape: ModelShape, boundary: EmulatedBoundary, cost: MeasuredCost, pace: Pace
    ) -> None:
        self.spec, self.boundary, self.anchors, self.parameters = spec, boundary, None, {}
        with torch.device("meta"):
            self.module = build_part(shape, spec)
        self.optimizer = _NoGradients()
        self.cost, self.pace = cost, pace
        self._gradient = boundary.gradient
        self._loss = torch.tensor(math.log(shape.vocabulary))
        self._rates: LearningRates | None = None

    @property
    def device(self) -> torch.device:
        return CPU

    def split_embedding(self, embedding: Tensor) -> None:
        """Do nothing: there is no embedding."""

    def enter_round(self, round_: int) -> None:
        self.pace.begin()

    def forward(self, micro_batch: int, tokens: Tensor, came: Symbols | None, micro_batches: int) -> Tensor:
        self.pace.compute(self.cost.forward)
        return self._loss / micro_batches if self.spec.is_last else tokens

    def backward(self, micro_batch: int, came: Symbols | None, key: Tensor) -> Symbols | None:
        self.pace.compute(self.cost.backward)
        return None if self.spec.is_first else self._gradient

    def evaluate(self, tokens: Tensor, came: Symbols | None) -> Tensor:
        self.pace.compute(self.cost.evaluate)
        return self._loss if self.spec.is_last else tokens

    def step(self, step: int, replica_norm: Tensor) -> float:
        self.pace.compute(self.cost.update)
        return math.nan if self._rates is None else self._rates.at(step)

    def follow(self, rates: LearningRates) -> None:
        self._rates = rates

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return []

    def drop(self) -> None:
        """Do nothing: no micro-batch is kept."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing: `state` is empty."""
