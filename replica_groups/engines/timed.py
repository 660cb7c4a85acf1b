"""Engine `timed` of rehearsals: waits of the predicted length take the place of compute, and nothing holds parameters.

A timed stage sends messages of the true shapes. A timed engine waits as long as all accelerators of its replica would
compute, whatever engine trains it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.core.device import CPU
from hetero_pp.model.inner import InnerOptimizer
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import BoundarySettings, StageSpec
from hetero_pp.model.transformer import ModelShape, build_part
from hetero_pp.pipeline.coefficients import Symbols, format_of, noise_key
from replica_groups.engines.engine import LocalParameters
from stages.boundary import Boundary
from stages.stage import Stage

NORM = 1.0  # gradient norm of each stage


class TimedPace:
    """The clock of a timed device. It advances by what the device computes and by what its member waits for others.

    Other work of this process, such as the conversion of messages, is part of the costs. So it shortens the next wait.
    """

    def __init__(self) -> None:
        self.waited: Callable[[], float] = lambda: 0.0
        """Returns the seconds for which the member has waited for others since some moment before the step."""
        self.computed = 0.0  # seconds of timed computation so far
        self.late = 0.0  # most seconds by which this process was later than the device
        self._free_at, self._waited_before = time.monotonic(), 0.0

    def begin(self) -> None:
        """Begin a step: what the process did since the last computation took time of the device, too."""
        self._free_at, self._waited_before = time.monotonic(), self.waited()

    def compute(self, seconds: float) -> None:
        """Return once the device has computed for that long."""
        waited = self.waited()
        self._free_at += waited - self._waited_before + seconds
        self._waited_before = waited
        self.computed += seconds
        left = self._free_at - time.monotonic()
        self.late = max(self.late, -left)
        if left > 0:
            time.sleep(left)


class TimedEngine(LocalParameters):
    """Implements Engine without parameters, for all ranks of a replica."""

    def __init__(self, cost: MeasuredCost, micro_batches: int, vocabulary: int, pace: TimedPace) -> None:
        super().__init__({})
        self.done = 0
        self._cost, self._micro_batches, self._pace = cost, micro_batches, pace
        self._loss = math.log(vocabulary)
        self._rates: LearningRates | None = None

    def follow(self, rates: LearningRates) -> None:
        self._rates = rates

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        self._pace.begin()
        for _ in range(self._micro_batches):
            self._pace.compute(self._cost.forward + self._cost.backward)
            self.done += 1
        self._pace.compute(self._cost.update)
        return self._loss, NORM, math.nan if self._rates is None else self._rates.at(step)

    def evaluate(self, validation: Sequence[Tensor]) -> float:
        self._pace.begin()
        for _ in validation:
            self._pace.compute(self._cost.evaluate)
            self.done += 1
        return self._loss

    def remember(self, moments: bool) -> None:
        """Do nothing, because no step changes anything. Likewise below."""

    def undo(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class TimedBoundary(Boundary):
    """Sends the same random symbols with every message."""

    def __init__(self, settings: BoundarySettings, width: int, rows: int, length: int) -> None:
        """`rows`: most sequences of a message; `length`: positions of each."""
        super().__init__(width, format_of(settings))
        self._shape = (rows, length, settings.dimensions(width) or width)
        self._activations: dict[int, Symbols] = {}
        self.gradient: Symbols = self.format.gradient(self._random(rows), noise_key(0, "rehearsal", 0, 0, 0))

    @property
    def dimensions(self) -> int:
        return self._shape[2]

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


class TimedStage(Stage):
    """A stage without parameters, whose work takes the time that its cost says."""

    def __init__(
        self, spec: StageSpec, shape: ModelShape, boundary: TimedBoundary, cost: MeasuredCost, pace: TimedPace
    ) -> None:
        self.spec, self.boundary, self.anchors, self.parameters = spec, boundary, None, {}
        with torch.device("meta"):
            self.module = build_part(shape, spec)
        self.optimizer = _NoGradients()
        self.cost, self.pace = cost, pace
        self._gradient = boundary.gradient
        self._loss = torch.tensor(math.log(shape.vocabulary))
        self._rates: LearningRates | None = None
        self._reported = 0.0

    def computed(self) -> float:
        """Return the seconds of timed computation since the last call."""
        computed, self._reported = self.pace.computed - self._reported, self.pace.computed
        return computed

    @property
    def device(self) -> torch.device:
        return CPU

    def split_embedding(self, embedding: Tensor) -> None: ...

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

    def drop(self) -> None: ...

    def moments(self) -> dict[str, Tensor]:
        return {}

    def load_moments(self, moments: Mapping[str, Tensor]) -> None: ...
