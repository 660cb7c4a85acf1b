"""Inner optimizer of a compressed replica that keeps the trained part T_S of its embedding in the subspace.

Het-PP section 2.4 constrains T_S to the subspace and leaves open how it is trained (`boundary.embedding`). Between two
rounds T_perp is fixed, so the embedding is T_perp + T_S. Shapes: V vocabulary, D width, K rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING


class SubspaceOptimizer(InnerOptimizer):
    """Inner optimizer that knows the basis U [D, K] of the replica's boundaries.

    With `coefficients` it trains C [V, K] of T_S = C U^T. With `projected` it trains the table [V, D], and projects T_S
    onto the subspace after each step. With `free` it is an InnerOptimizer.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: InnerSettings,
        total_steps: int | None,
        basis: Tensor,
        embedding: EmbeddingTraining,
    ) -> None:
        self.basis = basis
        """U [D, K]; it may change only with a new split."""
        self.trains: EmbeddingTraining = embedding
        self.coefficients: nn.Parameter | None = None
        """C [V, K], if they are trained; set from the embedding with each `perpendicular`."""
        if embedding == "coefficients" and EMBEDDING in parameters:
            self.coefficients = nn.Parameter(parameters[EMBEDDING].detach() @ basis)
        super().__init__(parameters, settings, total_steps)

    @property
    def embedding(self) -> nn.Parameter:
        """TE [V, D]."""
        return self._named[EMBEDDING]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for group in super()._groups():
            is_own = self.coefficients is not None and group.get("embeds", False)
            yield group | {"params": [self.coefficients]} if is_own else group

    def _take_perpendicular(self, table: Tensor | None) -> None:
        if self.coefficients is None:
            super()._take_perpendicular(table)
        elif self._embedding is not None:
            with torch.no_grad():
                self.coefficients.copy_(self._embedding @ self.basis)

    @torch.no_grad()
    def _before(self, rate: float) -> None:
        """Project the embedding's gradient onto its coefficients, or apply weight decay to T_S."""
        embedding = self._embedding
        is_split = embedding is not None and self._perpendicular is not None
        if is_split and self.coefficients is not None and embedding is not None and embedding.grad is not None:
            self.coefficients.grad = embedding.grad @ self.basis
        else:
            super()._before(rate)

    def step(self, step: int, replica_norm: Tensor) -> float:
        rate = super().step(step, replica_norm)
        if not self.defers:
            self._after()
        return rate

    @torch.no_grad()
    def _after(self) -> None:
        """Put the embedding together again: T_perp and the trained T_S."""
        embedding, table, basis = self._embedding, self._perpendicular, self.basis
        if embedding is None or table is None:
            return
        if self.coefficients is not None:
            embedding.copy_(table + self.coefficients @ basis.T)
        elif self.trains == "projected":
            embedding.copy_(table + ((embedding - table) @ basis) @ basis.T)


def inner_optimizer(
    parameters: Mapping[str, nn.Parameter],
    settings: InnerSettings,
    total_steps: int | None,
    basis: Tensor | None,
    embedding: EmbeddingTraining,
) -> InnerOptimizer:
    """Return the inner optimizer of a replica, or of a stage; `basis` [D, K] is None if no boundary is compressed."""
    if basis is None or embedding == "free" or EMBEDDING not in parameters:
        return InnerOptimizer(parameters, settings, total_steps)
    return SubspaceOptimizer(parameters, settings, total_steps, basis, embedding)
