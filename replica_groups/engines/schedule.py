"""Learning rates of engines that use torch's schedulers: a share of the initial rate."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.learning_rates import LearningRates


class RateSchedule:
    """Share of the first peak learning rate at each step, by settings that may change during the run."""

    def __init__(self, inner: InnerSettings, total_steps: int | None) -> None:
        self._peak = inner.learning_rate
        self._rates = inner.first_rates(total_steps)

    def share(self, step: int) -> float:
        """Return the share at step `step`, which counts over the run."""
        return self._rates.at(step) / self._peak

    def follow(self, rates: LearningRates, schedulers: Iterable[LRScheduler]) -> None:
        """Use other rates from the next step on; correct the rate that schedulers have already set for that step."""
        self._rates = rates
        for scheduler in schedulers:
            told = [base * self.share(scheduler.last_epoch) for base in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, told, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = told
