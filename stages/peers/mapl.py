"""MAPL: a projection for each boundary that stays orthogonal while it learns, and factorised tables by token.

    sender    Z = (X - E_p[t] W_p) A_p                receiver  X_hat = Z A_p^T + E_(p+1)[t] W_(p+1)

E [V, K] is trained, one for each stage; W [K, D] is fixed, with orthonormal rows; A [D, K] has orthonormal columns and
takes a step of SPEL each inner step:

    g <- g - A sym(A^T g),   m <- beta m + (1 - beta) g,   A <- polar(A - alpha polar(m))

Source: MAPL (arXiv 2606.05484), of which code, beta and initial values are not published. What is ours: beta 0.95, E
from zero by AdamW (theirs is Muon for the model), polar factors by SVD, and that replicas average A and E in each outer
round, after which A is brought back to orthonormal columns. A_p crosses each step, and the receiver's half of its
gradient comes back: both are a part of its bytes. Its vector quantisation is left out, of which no sizes are known.
Shapes: B, L, D width, K rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.inner import InnerSettings
from hetero_pp.model import ModelShape
from stages.boundary import Boundary
from stages.own_parameters import OwnParameters

MOMENTUM = 0.95
STEP_SHARE = 0.1
"""alpha, as a share of the learning rate."""


class Mapl(OwnParameters):
    """The projections of all hops of a replica, and the tables of all its stages."""

    def __init__(
        self, wire: Boundary, shape: ModelShape, hops: int, inner: InnerSettings, total_steps: int | None, seed: int
    ) -> None:
        """`wire`: how K numbers cross, both ways."""
        self.wire = wire
        rank, generator = wire.dimensions, torch.Generator().manual_seed(seed)
        self.projections = {f"projection.{hop}": _orthonormal(shape.width, rank, generator) for hop in range(hops)}
        self.expansions = [_orthonormal(shape.width, rank, generator).detach().T for _ in range(hops + 1)]
        self.momenta = {name: torch.zeros_like(one) for name, one in self.projections.items()}
        tables = {f"table.{stage}": nn.Parameter(torch.zeros(shape.vocabulary, rank)) for stage in range(hops + 1)}
        super().__init__(tables, inner.model_copy(update={"weight_decay": 0.0}), total_steps)
        self.parameters = {**tables, **self.projections}

    def to(self, device: torch.device) -> None:
        """See OwnParameters."""
        super().to(device)
        self.expansions = [one.to(device) for one in self.expansions]
        self.momenta = {name: one.to(device) for name, one in self.momenta.items()}

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """What the receiver makes of what the sender's output is."""
        projection_DK = self.projections[f"projection.{hop}"]
        z_BLK = self.wire.cross((x_BLD - self._told(hop, tokens_BL)) @ projection_DK, tokens_BL, key)
        return z_BLK @ projection_DK.T + self._told(hop + 1, tokens_BL)

    def _told(self, stage: int, tokens_BL: Tensor) -> Tensor:
        return F.embedding(tokens_BL, self.parameters[f"table.{stage}"]) @ self.expansions[stage]

    @torch.no_grad()
    def step(self, step: int) -> None:
        """AdamW for the tables, SPEL for the projections."""
        super().step(step)
        alpha = STEP_SHARE * self.optimizer.rates.at(step)
        for name, projection in self.projections.items():
            if projection.grad is None:
                continue
            inner = projection.T @ projection.grad
            tangent = projection.grad - projection @ (inner + inner.T) / 2
            self.momenta[name].lerp_(tangent, 1 - MOMENTUM)
            projection.copy_(polar(projection - alpha * polar(self.momenta[name])))
            projection.grad = None

    @torch.no_grad()
    def averaged(self) -> None:
        """After an average with other replicas': a mean of orthonormal columns has none."""
        for projection in self.projections.values():
            projection.copy_(polar(projection))

    def state(self) -> dict[str, Any]:
        """See OwnParameters."""
        return super().state() | {"momenta": self.momenta}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """See OwnParameters."""
        super().load(state)
        for name, kept in state["momenta"].items():
            self.momenta[name].copy_(kept)


def polar(matrix_DK: Tensor) -> Tensor:
    """The matrix with orthonormal columns that is nearest; zero stays zero."""
    if not bool(matrix_DK.any()):
        return matrix_DK
    left, _, right = torch.linalg.svd(matrix_DK.double(), full_matrices=False)
    return (left @ right).to(matrix_DK)


def _orthonormal(width: int, rank: int, generator: torch.Generator) -> nn.Parameter:
    random = torch.randn(width, rank, generator=generator, dtype=torch.float64)
    return nn.Parameter(torch.linalg.qr(random)[0].float().contiguous())
