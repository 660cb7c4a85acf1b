"""Parts of an outer round that only tables vary.

They are rounds of one replica alone, a second warm-up, a momentum that drops values, a mean of elected signs, and
averages of the moments of inner AdamW. Over the network the averages would triple the bytes, and contributions hold no
moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, outer_step
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.engines.plain import WholeReplica
from replica_groups.engines.ranks import Ranks

KINDS = ("exp_avg", "exp_avg_sq")


class PretrainedOptimizer(OuterOptimizer):
    """Outer optimizer that begins after the `pretraining` first rounds, which set theta to the mean of one replica.

    Its learning rates, and the number of its steps, count from the first round after them.
    """

    def __init__(self, settings: OuterSettings, pretraining: int) -> None:
        super().__init__(settings.model_copy(update={"rounds": max(1, settings.rounds - pretraining)}))
        self._pretraining = pretraining

    def begin(self, round_: int, weights: Mapping[str, float]) -> None:
        super().begin(round_ - self._pretraining, weights)

    def _step(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        if self._round <= 0:
            outer_step(theta[name], mean, 1.0)
        else:
            super()._step(theta, name, mean)


@dataclass(frozen=True)
class RenewedWarmup:
    """Learning rates that rise linearly once more, from step `since` on (DiLoCo, section 3.1)."""

    rates: LearningRates
    since: int
    steps: int

    def at(self, step: int) -> float:
        rate = self.rates.at(step)
        return rate if step < self.since else rate * min(1.0, (step - self.since + 1) / max(1, self.steps))


class ElectedMean:
    """Mean of the contributions that have the elected sign in a coordinate: the sign of the weighted sum of all.

    Source: the disjoint merge of TIES (Yadav et al. 2023), which DiLoCo tried instead of the mean (section 6.1). It has
    the interface of WeightedMean.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self.total = torch.zeros(2, *shape, device=device)
        """Weighted sums of the positive values, and of the negative ones."""
        self.sent = torch.zeros(2, *shape, device=device)
        """Their weights."""

    def add(self, decoded: DecodedTensor, weight: float = 1.0) -> None:
        dense = torch.zeros_like(self.total[0])
        decoded.add_to(dense, 1.0)
        for part, values in enumerate((dense.clamp_min(0), dense.clamp_max(0))):
            self.total[part].add_(values, alpha=weight)
            self.sent[part].add_(values != 0, alpha=weight)

    def finish(self, weight: float | None = None) -> Tensor:
        """Return the mean; 0 where nobody sent a value."""
        positive, negative = self.total / self.sent.masked_fill(self.sent == 0, 1.0)
        return torch.where(self.total.sum(0) >= 0, positive, negative)


def drop_largest(momentum: Tensor, share: float, settings: CompressionSettings) -> None:
    """Set the largest `share` of a momentum's values in each chunk to zero, in place (SparseLoCo, section 2.2)."""
    largest = {"density": share, "selection": "top_k", "quantiser": "levels", "value_bits": 32}
    plain = {"memory": "error_feedback", "error_feedback_decay": 1.0, "transform": "none"}
    select(momentum, torch.zeros_like(momentum), settings.model_copy(update=largest | plain))


@torch.no_grad()
def average_moments(replicas: Sequence[WholeReplica], weights: Mapping[str, float], ranks: Ranks) -> None:
    """Replace each moment of each parameter by its weighted mean over all replicas (DiLoCo, section 6.1)."""
    states = [_states(replica) for replica in replicas]
    for name in replicas[0].parameters:
        for kind in KINDS:
            total = torch.zeros_like(states[0][name][kind])
            for replica, own in zip(replicas, states, strict=True):
                total += own[name][kind] * weights[replica.name]
            ranks.sum(total)
            total /= sum(weights.values())
            for own in states:
                own[name][kind].copy_(total)


def _states(replica: WholeReplica) -> dict[str, dict[str, Tensor]]:
    """Return the optimizers' state of each parameter, by the parameter's name."""
    kept = {id(tensor): state for one in replica.optimizer.optimizers for tensor, state in one.state.items()}
    return {name: kept[id(parameter)] for name, parameter in replica.parameters.items()}
