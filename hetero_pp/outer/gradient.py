"""Outer step for gradients that are averaged after every step: one AdamW that every holder of theta applies alike.

Clips by the norm of the whole model's averaged gradient. Every holder therefore reads all of it and keeps what it
needs. Source: the AdamW baseline of Het-PP's Table 4, data parallel with gradients clipped after averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerOptimizer, InnerSettings, SubspaceOptimizer
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING, Shapes
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import COEFFICIENTS, RoundOptimizer
from hetero_pp.pipeline.subspace import perpendicular


@dataclass(frozen=True)
class Compressed:
    """A compressed replica: the basis U [D, K] of its boundaries, and how it trains its embedding."""

    basis: Tensor
    embedding: EmbeddingTraining = "free"  # `free` or `coefficients`


class GradientOptimizer(RoundOptimizer):
    """AdamW on theta by averaged gradients; the counterpart of OuterOptimizer.

    `shapes` are those of the whole model. The result is the mean of the steps that the replicas of the round would take
    from the same parameters and gradient, as in a round with H = 1. Only their embeddings differ. In a compressed
    replica, weight decay acts on T_S = TE - T_perp only. The mean of the decays acts on TE - w T_perp, where w is the
    share of the compressed replicas in the round. With `coefficients`, AdamW acts on C of T_S = C U^T and keeps moments
    of C. There is one such AdamW for each K.
    """

    def __init__(
        self,
        settings: OuterSettings,
        inner: InnerSettings,
        total_steps: int | None,
        shapes: Mapping[str, tuple[int, ...]],
        compressed: Mapping[str, Compressed],
        schedule: Callable[[int], LearningRates] | None = None,
    ) -> None:
        """`compressed`: compressed replicas by name. `schedule` returns learning rates by round, if they change."""
        self.settings = settings
        self._inner, self._total_steps = inner, total_steps
        self._rates: LearningRates | None = None
        self._shapes = dict(shapes)
        self._free = {name: one.basis for name, one in compressed.items() if one.embedding == "free"}
        self._inside = {name: one.basis for name, one in compressed.items() if one.embedding == "coefficients"}
        """U by replica that trains C."""
        self._weights: Mapping[str, float] = {}
        self._schedule = schedule
        self._adamw: InnerOptimizer | None = None
        self._of_coefficients: dict[int, SubspaceOptimizer] = {}  # AdamW of C by K
        self._parameters: dict[str, nn.Parameter] = {}
        self._squares: dict[str, float] = {}
        self._step = 0
        self._loaded: Mapping[str, Tensor] = {}

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        self._weights = weights
        if self._schedule is not None:
            self._rates = self._schedule(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """Return the shapes of all tensors of the model, because clipping needs the whole gradient."""
        return self._shapes

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """Take the averaged gradient of one tensor."""
        self._squares[name] = mean.double().square().sum().item()
        if name in theta:
            parameter = self._parameters.setdefault(name, nn.Parameter(theta[name]))
            parameter.data = theta[name]  # shares its memory, which may be another in each round
            parameter.grad = mean

    @torch.no_grad()
    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """Change theta in place, after every tensor was taken."""
        if self._adamw is None:
            for basis in self._inside.values() if EMBEDDING in theta else ():
                if basis.shape[1] not in self._of_coefficients:
                    copy = {EMBEDDING: nn.Parameter(theta[EMBEDDING].clone())}
                    own_adamw = SubspaceOptimizer(copy, self._inner, self._total_steps, basis, "coefficients")
                    self._of_coefficients[basis.shape[1]] = own_adamw
            self._adamw = InnerOptimizer(dict(sorted(self._parameters.items())), self._inner, self._total_steps)
            for name, parameter, optimizer in self._trained() if self._loaded else ():
                moments = {kind: self._loaded[f"{name}.{kind}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(float(self._step)), **moments}
            self._loaded = {}
        for one in (self._adamw, *self._of_coefficients.values()):
            one.follow(self._rates or one.rates)
        norm = torch.tensor(sum(self._squares[name] for name in sorted(self._shapes)) ** 0.5)
        inside: dict[int, Tensor] = {}  # the embedding [V, D] after the own step of replicas that train C, by K
        if EMBEDDING in theta:
            before = self._parameters[EMBEDDING]
            for rank, adamw in self._of_coefficients.items():
                assert before.grad is not None
                adamw.embedding.copy_(before)
                adamw.embedding.grad = before.grad.clone()  # clipped in place
                adamw.perpendicular = perpendicular(adamw.embedding.detach(), adamw.basis)
                adamw.step(self._step, norm)
                inside[rank] = adamw.embedding.detach()
            self._adamw.perpendicular = self._mean_perpendicular(theta[EMBEDDING])
        self._adamw.step(self._step, norm)
        if inside:
            mean = theta[EMBEDDING].clone()
            for rank, own in inside.items():
                mean += (own - theta[EMBEDDING]) * self._share(self._inside, rank)
            theta[EMBEDDING].copy_(mean)
        self._squares.clear()
        self._step += 1

    def _mean_perpendicular(self, embedding: Tensor) -> Tensor | None:
        """Return the mean T_perp [V, D] over the replicas of the round that train TE itself; None if all are 0.

        It is 0 in an uncompressed replica.
        """
        mean: Tensor | None = None
        others = 1 - sum(self._share(self._inside, rank) for rank in self._of_coefficients)
        for rank, basis in {basis.shape[1]: basis for basis in self._free.values()}.items():
            if (share := self._share(self._free, rank)) > 0:
                own = perpendicular(embedding, basis).mul_(share / others)
                mean = own if mean is None else mean.add_(own)
        return mean

    def _share(self, bases: Mapping[str, Tensor], rank: int) -> float:
        """Return the share of the replicas with this rank in the round, of those in `bases`."""
        alike = sum(w for name, w in self._weights.items() if name in bases and bases[name].shape[1] == rank)
        return alike / sum(self._weights.values()) if self._weights else 0.0

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self._loaded, self._step = state, rounds

    def _trained(self) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer]]:
        """Yield (name, parameter, its optimizer) of everything that has moments."""
        named = [] if self._adamw is None else [(self._adamw, self._parameters)]
        for rank, adamw in self._of_coefficients.items():
            assert adamw.coefficients is not None
            named.append((adamw, {f"{EMBEDDING}{COEFFICIENTS}{rank}": adamw.coefficients}))
        for inner, parameters in named:
            for optimizer in inner.optimizers:
                held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
                yield from ((name, one, optimizer) for name, one in parameters.items() if one in held)

    @property
    def state(self) -> dict[str, Tensor]:
        """Both moments of each tensor of theta, and of C, for run checkpoints."""
        return {
            f"{name}.{moment}": optimizer.state[parameter][moment]
            for name, parameter, optimizer in self._trained()
            for moment in (("exp_avg", "exp_avg_sq") if optimizer.state.get(parameter) else ())
        }
