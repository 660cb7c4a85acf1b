"""Ablations from the papers: parts of a compressed replica that are off by default.

Sources: Het-PP section 2.4 and Table 5; Subspace Networks (Ramasinghe et al. 2025) for weight projection, modified
AdamW and Grassmann updates. Each is one cell of `research.ablations`. Shapes: B sequences, L positions, V vocabulary,
D width, K rank, F any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.config.topology import EmbeddingTraining
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.subspace_optimizer import SubspaceOptimizer
from hetero_pp.pipeline.coefficients import Symbols
from hetero_pp.research.settings import AblationSettings
from stages.boundary import Boundary

OUTPUT_PROJECTIONS = ("attention.wo.weight", "feed_forward.w2.weight")
"""W_p1 and W_p2 [D, F]: their outputs in the residual stream should lie in the subspace. Het-PP names only W_p1."""


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


class AblatedOptimizer(SubspaceOptimizer):
    """Inner optimizer of a replica whose boundaries have the basis U [D, K], with ablations."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: InnerSettings,
        total_steps: int | None,
        basis: Tensor,
        embedding: EmbeddingTraining,
        ablations: AblationSettings,
    ) -> None:
        self.ablations = ablations
        super().__init__(parameters, settings, total_steps, basis, embedding)

    def _adamw(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        rate, betas, epsilon = self.settings.learning_rate, self.settings.betas, self.settings.epsilon
        shared = [group for group in groups if "shared_dim" in group]
        optimizers = super()._adamw([group for group in groups if "shared_dim" not in group])
        if shared:
            optimizers.append(SharedSecondMomentAdamW(shared, lr=rate, betas=betas, eps=epsilon))
        return optimizers

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups; `shared_dim` marks those of modified AdamW."""
        groups = list(super()._groups())
        if self.ablations.modified_adamw:
            special = [p for name, p in self._named.items() if name.endswith(OUTPUT_PROJECTIONS)]
            for group in groups:
                group["params"] = [p for p in group["params"] if not any(p is one for one in special)]
            embedding = [group | {"shared_dim": 1} for group in groups if group.get("embeds")]
            rest = [group for group in groups if not group.get("embeds")]
            shared = {"params": special, "weight_decay": self.settings.weight_decay, "shared_dim": 0}
            groups = [*rest, shared, *embedding]
        return (group for group in groups if group["params"])

    @torch.no_grad()
    def _after(self) -> None:
        if self.ablations.weight_projection:
            which = OUTPUT_PROJECTIONS[:1] if self.ablations.weight_projection == "w_p1" else OUTPUT_PROJECTIONS
            project_weights(self._named, self.basis, which)
        super()._after()


@dataclass
class AblatedBoundary(Boundary):
    """Boundary with ablations."""

    is_stale: bool = False
    """Whether T_perp stays as in the first split."""
    discards: bool = False
    """Whether replicas also drop what the synchronized embedding gained outside the subspace since."""
    keeps_gradient: bool = False
    last_gradient: Tensor | None = None
    """Newest gradient [B, L, D] that crossed, if `keeps_gradient` (for Grassmann updates of U)."""

    def split(self, embedding: Tensor) -> None:
        if not (self.is_stale and self.perpendicular is not None):
            super().split(embedding)

    @torch.no_grad()
    def discard(self, embedding: Tensor) -> None:
        """Replace the embedding [V, D], in place, by its projected form at the start of a round, if it `discards`."""
        if self.discards and self.basis is not None and self.perpendicular is not None:
            embedding.copy_(self.perpendicular + (embedding @ self.basis) @ self.basis.T)

    def move(self, basis_DK: Tensor) -> None:
        super().move(basis_DK)
        self.last_gradient = None

    def encode_gradient(self, gradient_BLD: Tensor, key: Tensor) -> Symbols:
        if self.keeps_gradient:
            self.last_gradient = gradient_BLD.detach()
        return super().encode_gradient(gradient_BLD, key)


def with_ablations(boundary: Boundary, ablations: AblationSettings) -> AblatedBoundary:
    return AblatedBoundary(
        boundary.width,
        boundary.format,
        boundary.basis,
        is_stale=ablations.adaptation != "on",
        discards=ablations.adaptation == "discarded",
        keeps_gradient=ablations.grassmann_every is not None,
    )
