"""The learning rate of engines whose steps are torch's schedulers': a share of the rate that the engine began with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hetero_pp.inner import InnerSettings
from hetero_pp.learning_rates import LearningRates


class Schedule:
    """What share of its first peak the learning rate is at a step, by settings that may change on the way."""

    def __init__(self, inner: InnerSettings, total_steps: int | None) -> None:
        self._peak = inner.learning_rate
        self._rates = inner.first_rates(total_steps)

    def share(self, step: int) -> float:
        """Of step `step`, which counts over the run."""
        return self._rates.at(step) / self._peak

    def follow(self, rates: LearningRates, schedulers: Iterable[LRScheduler]) -> None:
        """From the next step on other rates: of that step, a scheduler has told the optimizer the rate already."""
        self._rates = rates
        for scheduler in schedulers:
            told = [base * self.share(scheduler.last_epoch) for base in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, told, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = told
