"""Parts of an outer round that only tables vary: rounds of one replica alone, and a momentum that drops values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, outer_step
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.error_feedback import select


class PretrainedOptimizer(OuterOptimizer):
    """Outer optimizer that begins after the `pretraining` first rounds, which set theta to the mean of one replica.

    Its learning rates, and the number of its steps, count from the first round after them.
    """

    def __init__(self, settings: OuterSettings, pretraining: int) -> None:
        super().__init__(settings.model_copy(update={"rounds": max(1, settings.rounds - pretraining)}))
        self._pretraining = pretraining

    def begin(self, round_: int) -> None:
        super().begin(round_ - self._pretraining)

    def _step(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        if self._round <= 0:
            outer_step(theta[name], mean, 1.0)
        else:
            super()._step(theta, name, mean)


def drop_largest(momentum: Tensor, share: float, settings: CompressionSettings) -> None:
    """Set the largest `share` of a momentum's values in each chunk to zero, in place (SparseLoCo, section 2.2)."""
    largest = {"density": share, "selection": "top_k", "quantiser": "levels", "value_bits": 32}
    plain = {"memory": "error_feedback", "error_feedback_decay": 1.0, "transform": "none"}
    select(momentum, torch.zeros_like(momentum), settings.model_copy(update=largest | plain))
