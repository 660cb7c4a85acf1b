"""Contributions of the replicas of a row to an outer round, and their mean, tensor by tensor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import robust_mean
from hetero_pp.outer.step import OuterOptimizer, WeightedMean, outer_step
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import give_back, select
from hetero_pp.pseudo_gradient.selection import generator_of
from hetero_pp.research.settings import research_of
from hetero_pp.research.trainer.measurements import Measured
from hetero_pp.research.trainer.participation import Death, deaths_in, missed_in, replicas_in

WORTH_NUMBA = 10_000  # selections of a run that save several times as much with numba as its import takes, 0.7 s


class ElectedMean:
    """Mean of the contributions that have the elected sign in a coordinate: the sign of the weighted sum of all.

    Source: the disjoint merge of TIES (Yadav et al. 2023), which DiLoCo tried instead of the mean (section 6.1). It has
    the interface of WeightedMean.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self.total = torch.zeros(2, *shape, device=device)
        """Weighted sums of the positive values, and of the negative ones."""
        self.sent = torch.zeros(2, *shape, device=device)  # their weights

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


class RobustMean:
    """Holds contributions to one tensor until their robust mean is asked for. It has the interface of WeightedMean."""

    def __init__(self, shape: tuple[int, ...], settings: OuterSettings) -> None:
        self.weighted: list[tuple[float, DecodedTensor]] = []
        self._shape, self._settings = shape, settings

    def add(self, decoded: DecodedTensor, weight: float = 1.0) -> None:
        self.weighted.append((weight, decoded))

    def finish(self, weight: float | None = None) -> Tensor:
        return robust_mean(self._shape, self.weighted, self._settings)


Mean = WeightedMean | ElectedMean | RobustMean  # takes one parameter's contributions one by one


class Contributions:
    """Error feedback of the replicas, named `names`, and what they send."""

    def __init__(
        self,
        spec: RunSpec,
        names: Sequence[str],
        theta: Mapping[str, Tensor],
        measured: Measured,
        kept_on: torch.device | None = None,
    ) -> None:
        """`kept_on`: device that holds the error feedback; by default that of theta."""
        self.errors = [
            {name: torch.zeros_like(tensor, device=kept_on) for name, tensor in theta.items()} for _ in names
        ]
        self.missed: frozenset[str] = frozenset()  # replicas that the current round excludes
        self.deaths: Mapping[str, Death] = {}  # replicas that have lost a stage in the current round, and resume
        self._spec, self._names, self._measured = spec, names, measured
        self._device = next(iter(theta.values())).device
        selections = spec.config.rounds * len(names) * len(theta)
        self._compression = fastest(spec.config.outer.compression, selections)
        self._weights: Mapping[str, float] = {}
        self._round, self._taking_part = 0, list[str]()

    def barred(self, round_: int) -> frozenset[str]:
        """Return the replicas that may not take part in a round: none, unless some are hostile (hostile.py)."""
        return frozenset()

    def prepare(self, round_: int, deltas: Callable[[str], Iterable[tuple[int, Tensor]]]) -> None:
        """Learn of a round's pseudo-gradients by parameter before it begins; only hostile replicas need them all."""

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        """Begin a round; `weights` are those of all replicas, by name."""
        names = [replica.name for replica in replicas_in(self._spec.config, round_)]
        deaths, undoes = deaths_in(round_, self._spec), research_of(self._spec.config).undoes_deaths
        self.deaths, undone = ({}, deaths.keys()) if undoes else (deaths, set[str]())
        self.missed = missed_in(round_, names, research_of(self._spec.config).missed, self._spec.config.seed)
        self._round, self._weights = round_, weights
        self._taking_part = [name for name in names if name not in self.missed | undone]
        self._measured.begin(round_)

    def mean(self, name: str, deltas: Iterable[tuple[int, Tensor]]) -> tuple[Tensor, list[DecodedTensor]]:
        """Return the mean of a parameter's contributions, and what each replica sends.

        `deltas` are the pseudo-gradients of replicas, by their index.
        """
        shape, outer = self._spec.parameter_shapes[name], self._spec.config.outer
        mean: Mean
        if outer.is_robust:
            mean = RobustMean(shape, outer)
        elif research_of(self._spec.config).elects_signs:
            mean = ElectedMean(shape, self._device)
        else:
            mean = WeightedMean(shape, outer.divides_by, self._device)
        sent = [self._send(index, name, delta, mean) for index, delta in deltas]
        counted = sum(self._weight(replica, name) for replica in self._taking_part)
        self._measured.parameter(name, sent, counted)
        return mean.finish(counted), sent

    def _weight(self, replica: str, name: str) -> float:
        """Return the weight of a parameter, by the steps that the last holder of its stage has trained."""
        death, steps = self.deaths.get(replica), self._spec.inner_steps
        if death is None or name not in death.parameters:
            return self._weights[replica]
        return self._weights[replica] * max(1, steps - death.step) / steps

    def _send(self, index: int, name: str, delta: Tensor, mean: Mean) -> DecodedTensor:
        """Add a replica's contribution to the mean, or restore it to error feedback if the round excludes it."""
        outer, replica, error = self._spec.config.outer, self._names[index], self.errors[index][name]
        generator = generator_of(self._spec.run, self._round, replica, name)
        selection = select(error, delta, self._compression, generator=generator)
        sent = DecodedTensor(selection.indices, selection.values)
        if self._measured.outer is not None:
            # the memory as it was when the sent values were chosen; a momentum still has them
            before = error.clone()
            if outer.compression.memory == "error_feedback":
                before.view(-1).index_add_(0, sent.indices, sent.values)
        if drops := research_of(self._spec.config).memory_drops:
            drop_largest(error, drops, outer.compression)
        self._measured.contribution(replica, name, selection)
        if self._measured.outer is not None and replica not in self.missed:
            self._measured.outer.contribution(replica, self._weight(replica, name), delta, before, error)
        if replica in self.missed:
            give_back(error, sent.indices, sent.values, outer.given_back)
        else:
            mean.add(sent, self._weight(replica, name))
        return sent

    def state(self) -> dict[str, Any]:
        """Return what later rounds depend on beside the error feedback."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state`."""

    def finish(self) -> None:
        self._measured.finish()


def fastest(settings: CompressionSettings, selections: int) -> CompressionSettings:
    """Return the settings of a run with so many selections, with numba if that is worth it. The bits are the same."""
    if settings.accelerator != "torch" or selections < WORTH_NUMBA or importlib.util.find_spec("numba") is None:
        return settings
    return settings.model_copy(update={"accelerator": "numba"})


def drop_largest(momentum: Tensor, share: float, settings: CompressionSettings) -> None:
    """Set the largest `share` of a momentum's values in each chunk to zero, in place (SparseLoCo, section 2.2)."""
    largest = {"density": share, "selection": "top_k", "quantiser": "levels", "value_bits": 32}
    plain = {"memory": "error_feedback", "error_feedback_decay": 1.0, "transform": "none"}
    select(momentum, torch.zeros_like(momentum), settings.model_copy(update=largest | plain))


class PretrainedOptimizer(OuterOptimizer):
    """Outer optimizer that begins after the `pretraining` first rounds, which set theta to the mean of one replica.

    Its learning rates, and the number of its steps, count from the first round after them.
    """

    def __init__(self, settings: OuterSettings, pretraining: int) -> None:
        super().__init__(settings.model_copy(update={"rounds": max(1, (settings.rounds or 0) - pretraining)}))
        self._pretraining = pretraining

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        super().begin(round_ - self._pretraining, weights)

    def _step(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        if self._round <= 0:
            outer_step(theta[name], mean, 1.0)
        else:
            super()._step(theta, name, mean)
