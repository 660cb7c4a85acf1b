"""What a whole replica offers the run, whatever trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hetero_pp.learning_rates import LearningRates
from replica_groups.parameter_store import ParameterStore


class Engine(ParameterStore, Protocol):
    """A whole replica on one process, or on the ranks of one torchrun. Every rank makes every call, in one order.

    Each rank is given the whole replica's tokens and takes those that are its own, so that what a replica trains on
    does not depend on how many ranks it has. Losses and norms are the whole replica's, on every rank.
    """

    def follow(self, rates: LearningRates) -> None:
        """From the next step on other learning rates."""

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        """One inner step on tokens [B, L + 1]: (loss, gradient norm, learning rate). `step` counts over the run."""

    def remember(self, moments: bool) -> None:
        """Copy what the next steps depend on beside the parameters, the moments of Adam only if `moments` says so."""

    def undo(self) -> None:
        """Between two steps: go back to what was copied; whoever calls writes the parameters."""

    def evaluate(self, validation: Sequence[Tensor]) -> float:
        """Mean loss over batches [b, L + 1], by rows."""

    def save(self, folder: Path) -> None:
        """Write all that the next step depends on, beside the parameters too, into a folder of its own."""

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""


Parameters = Mapping[str, Tensor]
"""The whole model by name, fp32: what an engine starts from."""
