"""The learning rate of engines whose steps are torch's schedulers': a share of the rate that the engine began with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hetero_pp.inner import InnerSettings


class Schedule:
    """What share of its first peak the learning rate is at a step, by settings that may change on the way."""

    def __init__(self, inner: InnerSettings, total_steps: int) -> None:
        self._peak = inner.learning_rate
        self._inner, self._total_steps = inner, total_steps

    def share(self, step: int) -> float:
        """Of step `step`, which counts over the run."""
        return self._inner.learning_rate_at(step, self._total_steps) / self._peak

    def follow(self, inner: InnerSettings, total_steps: int, schedulers: Iterable[LRScheduler]) -> None:
        """From the next step on other settings: of that step, a scheduler has told the optimizer the rate already."""
        self._inner, self._total_steps = inner, total_steps
        for scheduler in schedulers:
            rates = [base * self.share(scheduler.last_epoch) for base in scheduler.base_lrs]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            scheduler._last_lr = rates
