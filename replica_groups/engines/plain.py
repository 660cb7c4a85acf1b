"""`engine: torch`: one process that trains the whole replica with plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.core.tensor_files import save_object
from hetero_pp.model.learning_rates import LearningRates
from replica_groups.engines.moments import Moments
from replica_groups.engines.whole import WholeReplica
from replica_groups.outer.parameter_store import LocalParameters

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
