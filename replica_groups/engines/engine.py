"""Interface of a whole replica's trainer to the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hetero_pp.model.learning_rates import LearningRates
from replica_groups.engines.parameter_store import ParameterStore


class Engine(ParameterStore, Protocol):
    """A whole replica in one process or on the ranks of one torchrun. Every rank makes every call, in the same order.

    Each rank is given the whole replica's tokens and takes its own share. A replica's training data therefore does not
    depend on its number of ranks. Losses and norms are the whole replica's, on every rank.
    """

    @property
    def done(self) -> int:
        """Number of micro-batches that it has finished. Safe to read from another thread."""

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """Take step `step` of the run on tokens [B, L + 1]; return (loss, gradient norm, learning rate)."""

    def remember(self, moments: bool) -> None:
        """Copy what the next steps depend on beside the parameters; copy Adam's moments only if `moments` is set."""

    def undo(self) -> None:
        """Return, between two steps, to the copied state. The caller writes the parameters."""

    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Return the mean loss over batches [b, L + 1], weighted by rows."""

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on, including the parameters, to a folder of its own."""

    def load(self, folder: Path) -> None:
        """Resume from a folder that `save` wrote."""


Parameters = Mapping[str, Tensor]
"""Initial parameters of the whole model by name, fp32."""
