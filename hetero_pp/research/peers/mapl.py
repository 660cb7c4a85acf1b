"""MAPL: a projection for each boundary that stays orthogonal while it learns, and factorized tables by token.

    sender    Z = (X - E_p[t] W_p) A_p                receiver  X_hat = Z A_p^T + E_(p+1)[t] W_(p+1)

E [V, K] is trained, one for each stage. W [K, D] is fixed, with orthonormal rows. A [D, K] has orthonormal columns and
takes a SPEL step in each inner step:

    g <- g - A sym(A^T g),   m <- beta m + (1 - beta) g,   A <- polar(A - alpha polar(m))

Source: MAPL (arXiv 2606.05484). Its code, beta and initial values are not published. Differences from the source:

- beta is 0.95, E starts at zero and is trained by AdamW (theirs is Muon for the model), and polar factors use SVD.
- Replicas average A and E in each outer round, after which A gets orthonormal columns again.
- Vector quantisation is left out, because its sizes are not known.

A_p crosses in each step, and the receiver's half of its gradient comes back; both count as bytes. Shapes: B, L, D
width, K rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelShape
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
        """Create the parameters. `wire` sets how K numbers cross, in both directions."""
        self.wire = wire
        rank, generator = wire.dimensions, torch.Generator().manual_seed(seed)
        self.projections = {f"projection.{hop}": _orthonormal(shape.width, rank, generator) for hop in range(hops)}
        self.expansions = [_orthonormal(shape.width, rank, generator).detach().T for _ in range(hops + 1)]
        self.momenta = {name: torch.zeros_like(one) for name, one in self.projections.items()}
        tables = {f"table.{stage}": nn.Parameter(torch.zeros(shape.vocabulary, rank)) for stage in range(hops + 1)}
        super().__init__(tables, inner.model_copy(update={"weight_decay": 0.0}), total_steps)
        self.parameters = {**tables, **self.projections}

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.expansions = [one.to(device) for one in self.expansions]
        self.momenta = {name: one.to(device) for name, one in self.momenta.items()}

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        projection_DK = self.projections[f"projection.{hop}"]
        z_BLK = self.wire.cross((x_BLD - self._told(hop, tokens_BL)) @ projection_DK, tokens_BL, key)
        return z_BLK @ projection_DK.T + self._told(hop + 1, tokens_BL)

    def _told(self, stage: int, tokens_BL: Tensor) -> Tensor:
        return F.embedding(tokens_BL, self.parameters[f"table.{stage}"]) @ self.expansions[stage]

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Step the tables with AdamW, and the projections with SPEL."""
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
        """Restore orthonormal columns after averaging with other replicas, because their mean does not have them."""
        for projection in self.projections.values():
            projection.copy_(polar(projection))

    def state(self) -> dict[str, Any]:
        return super().state() | {"momenta": self.momenta}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        for name, kept in state["momenta"].items():
            self.momenta[name].copy_(kept)


def polar(matrix_DK: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns; zero stays zero."""
    if not bool(matrix_DK.any()):
        return matrix_DK
    left, _, right = torch.linalg.svd(matrix_DK.double(), full_matrices=False)
    return (left @ right).to(matrix_DK)


def _orthonormal(width: int, rank: int, generator: torch.Generator) -> nn.Parameter:
    random = torch.randn(width, rank, generator=generator, dtype=torch.float64)
    return nn.Parameter(torch.linalg.qr(random)[0].float().contiguous())
