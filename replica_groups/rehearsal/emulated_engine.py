"""A whole replica that computes nothing: one process that waits as long as all its accelerators would compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.run.simulate_section import MeasuredCost
from replica_groups.outer.parameter_store import LocalParameters
from replica_groups.rehearsal.emulated_stage import NORM
from replica_groups.rehearsal.pace import Pace


class EmulatedEngine(LocalParameters):
    """Implements Engine without parameters. It stands for all ranks of a replica, whatever engine trains it."""

    def __init__(self, cost: MeasuredCost, micro_batches: int, vocabulary: int, pace: Pace) -> None:
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
        """Do nothing: no step changes anything."""

    def undo(self) -> None:
        """Do nothing, as `remember`."""

    def save(self, folder: Path) -> None:
        """Write nothing, as `remember`."""

    def load(self, folder: Path) -> None:
        """Read nothing, as `remember`."""
