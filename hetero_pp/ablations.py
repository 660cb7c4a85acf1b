"""Ablations from the papers: parts of a compressed replica that are off by default.

Sources: Het-PP section 2.4 and Table 5; Subspace Networks (Ramasinghe et al. 2025) for weight projection, modified
AdamW and Grassmann updates. Each is one cell of a participant group's `boundary.ablations`. Shapes: V vocabulary, D
width, K rank, F any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hetero_pp.settings import AddedLater, Ratio, Settings

OUTPUT_PROJECTIONS = ("attention.wo.weight", "feed_forward.w2.weight")
"""W_p1 and W_p2 [D, F]: their outputs in the residual stream should lie in the subspace. Het-PP names only W_p1."""


class PeerSettings(Settings):
    """Published boundary method in place of the subspace; `rank` and `bits` or `dtype` of the boundary set its size."""

    method: Literal["resbm", "mapl", "tah_quant"] = Field(
        description="published method that replaces the subspace (see stages/peers)"
    )
    four_bits: Ratio = Field(0.8, description="TAH-Quant: share of the tiles that use 4 bits; the others use 3")
    gradient_bits: int = Field(6, ge=2, le=8, description="TAH-Quant: bits per value of a gradient")


class AblationSettings(Settings):
    """Parts of a compressed replica, as the papers vary them."""

    embedding: Literal["free", "coefficients", "projected"] = Field(
        "free",
        description="training of T_S: `free` (leaves the subspace until the next split), "
        "`coefficients` (C of T_S = C U^T), or `projected` (back onto the subspace after "
        "each step)",
    )
    adaptation: Literal["on", "stale", "discarded"] = Field(
        "on",
        description="treatment of the embedding after an outer round: `on` splits it again, `stale` "
        "keeps the first T_perp, `discarded` drops the part of T_S that left the "
        "subspace (replicas then differ between rounds)",
    )
    weight_projection: Literal[False, "w_p1", "both"] = Field(
        False,
        description="matrices that are projected onto the subspace after each step: `w_p1` "
        "(attention), or `both` W_p1 and W_p2 (feed-forward)",
    )
    modified_adamw: bool = Field(
        False, description="share second moments across the width, so that an update stays in the subspace"
    )
    grassmann_every: int | None = Field(
        None, ge=1, description="outer rounds between updates of U along the gradients (only in `reproduce`)"
    )
    grassmann_step: Annotated[float, AddedLater()] = Field(
        0.1, gt=0, description="size of an update of U: tangent of its largest angle"
    )
    peer: Annotated[PeerSettings | None, AddedLater()] = Field(
        None, description="published boundary in place of the subspace (only in `reproduce`)"
    )


@torch.no_grad()
def project_weights(parameters: Mapping[str, nn.Parameter], basis_DK: Tensor, names: tuple[str, ...]) -> None:
    """Project the output projections whose names end in `names` onto the subspace: W <- U U^T W."""
    for name, parameter in parameters.items():
        if name.endswith(names):
            parameter.copy_(basis_DK @ (basis_DK.T @ parameter))


class SharedSecondMomentAdamW(torch.optim.Optimizer):
    """AdamW whose second moment is averaged along one dimension of each matrix.

    All entries along `shared_dim` (0 for output projections, 1 for the embedding) are divided by the same number. So an
    update from a gradient in the subspace stays in it. Groups hold `params`, `lr`, `weight_decay`, `shared_dim`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "shared_dim": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step over all groups."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter.sum(group["shared_dim"], keepdim=True))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].lerp_(gradient.square().mean(group["shared_dim"], keepdim=True), 1 - second)
        scale = (state["square"] / (1 - second ** state["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(state["mean"] / (1 - first ** state["step"]) / scale * group["lr"])


def grassmann_step(basis_DK: Tensor, gradients_ND: Tensor, size: float = 0.1) -> Tensor:
    """Return U after a step on the Grassmann manifold towards the directions of the gradients [N, D].

    The ascent direction of |G U|^2 is (I - U U^T) G^T G U. It is scaled so that `size` is the tangent of the largest
    angle by which the subspace turns; QR restores orthonormal columns. Difference from the source: Subspace Networks
    tune the step, which Het-PP does not specify.
    """
    toward = gradients_ND.T @ (gradients_ND @ basis_DK)
    toward = toward - basis_DK @ (basis_DK.T @ toward)
    largest = torch.linalg.matrix_norm(toward, ord=2)
    if not bool(largest > 0):
        return basis_DK
    moved, upper = torch.linalg.qr((basis_DK + toward * (size / largest)).double())
    return (moved * upper.diagonal().sign()).float().contiguous()
