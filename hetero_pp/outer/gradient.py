"""Outer step for gradients that are averaged after every step: one AdamW that every holder of theta applies alike.

Clips by the norm of the whole model's averaged gradient. Every holder therefore reads all of it and keeps what it
needs. Source: the AdamW baseline of Het-PP's Table 4, data parallel with gradients clipped after averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import EMBEDDING, Shapes
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pipeline.subspace import perpendicular


class GradientOptimizer:
    """AdamW on theta by averaged gradients; the counterpart of OuterOptimizer.

    `shapes` are those of the whole model. The result is the mean of the steps that the replicas of the round would take
    from the same parameters and gradient, as in a round with H = 1. Their steps differ in one thing: in a compressed
    replica, the embedding's weight decay acts on T_S = TE - T_perp only. The mean of the decays therefore acts on
    TE - w T_perp, where w is the share of the compressed replicas in the round.
    """

    def __init__(
        self,
        settings: OuterSettings,
        inner: InnerSettings,
        total_steps: int | None,
        shapes: Mapping[str, tuple[int, ...]],
        bases: Mapping[str, Tensor],
        schedule: Callable[[int], LearningRates] | None = None,
    ) -> None:
        """`bases` are U [D, K] by compressed replica; `schedule` returns learning rates by round, if they change."""
        self.settings = settings
        self._inner, self._total_steps = inner, total_steps
        self._rates: LearningRates | None = None
        self._shapes = dict(shapes)
        self._bases = bases
        self._weights: Mapping[str, float] = {}
        self._schedule = schedule
        self._adamw: InnerOptimizer | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._squares: dict[str, float] = {}
        self._step = 0
        self._loaded: Mapping[str, Tensor] = {}

    def begin(self, round_: int, weights: Mapping[str, float]) -> None:
        self._weights = weights
        if self._schedule is not None:
            self._rates = self._schedule(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """Return the shapes of the tensors whose mean is needed in a round, by name."""
        return self._shapes

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        """Return all rows, because clipping needs the whole gradient."""
        return range(shape[0])

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
            ordered = dict(sorted(self._parameters.items()))
            self._adamw = InnerOptimizer(ordered, self._inner, self._total_steps)
            self._give_moments(self._adamw)
        if self._rates is not None:
            self._adamw.follow(self._rates)
        if EMBEDDING in theta:
            self._adamw.perpendicular = self._mean_perpendicular(theta[EMBEDDING])
        norm = sum(self._squares[name] for name in sorted(self._shapes)) ** 0.5
        self._adamw.step(self._step, torch.tensor(norm))
        self._squares.clear()
        self._step += 1

    def _mean_perpendicular(self, embedding: Tensor) -> Tensor | None:
        """Return the mean T_perp [V, D] over the replicas of the round, 0 in uncompressed ones; None if all are 0."""
        by_rank: dict[int, list[str]] = {}
        for replica in self._weights:
            if replica in self._bases:
                by_rank.setdefault(self._bases[replica].shape[1], []).append(replica)
        mean, total = None, sum(self._weights.values())
        for replicas in by_rank.values():
            share = sum(self._weights[replica] for replica in replicas) / total
            own = perpendicular(embedding, self._bases[replicas[0]]).mul_(share)
            mean = own if mean is None else mean.add_(own)
        return mean

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self._loaded, self._step = state, rounds

    def _give_moments(self, adamw: InnerOptimizer) -> None:
        """Give the loaded moments to the optimizer, once it exists."""
        for optimizer in adamw.optimizers if self._loaded else ():
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self._parameters.items():
                if parameter in held:
                    moments = {kind: self._loaded[f"{name}.{kind}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter] = {"step": torch.tensor(float(self._step)), **moments}
        self._loaded = {}

    @property
    def state(self) -> dict[str, Tensor]:
        """Both moments of each tensor of theta, for snapshots."""
        found: dict[str, Tensor] = {}
        for optimizer in () if self._adamw is None else self._adamw.optimizers:
            for name, parameter in self._parameters.items():
                moments = optimizer.state.get(parameter, {})
                found |= {f"{name}.{moment}": moments[moment] for moment in ("exp_avg", "exp_avg_sq") if moments}
        return found
