"""Contributions of the replicas on this rank to an outer round, and their mean over all ranks, tensor by tensor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.outer.robust import RobustMean
from hetero_pp.outer.step import WeightedMean
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import give_back, select
from hetero_pp.pseudo_gradient.selection import generator_of
from hetero_pp.research.outer import ElectedMean, drop_largest
from hetero_pp.research.participation import missed_in, replicas_in
from hetero_pp.research.settings import research_of
from hetero_pp.research.vectorized.measured import Measured
from hetero_pp.run.spec import RunSpec
from replica_groups.engines.ranks import Ranks

WORTH_NUMBA = 10_000
"""Selections of a run that save several times as much with numba as its import takes, 0.7 s."""

Mean = WeightedMean | ElectedMean | RobustMean
"""Takes one parameter's contributions one by one."""


class Contributions:
    """Error feedback of the replicas here, named `names`, and what they send."""

    def __init__(
        self,
        spec: RunSpec,
        names: Sequence[str],
        theta: Mapping[str, Tensor],
        ranks: Ranks,
        measured: Measured,
        kept_on: torch.device | None = None,
    ) -> None:
        """`kept_on`: device that holds the error feedback; by default that of theta."""
        self.errors = [
            {name: torch.zeros_like(tensor, device=kept_on) for name, tensor in theta.items()} for _ in names
        ]
        self.missed: frozenset[str] = frozenset()
        """Replicas, on all ranks, that the current round excludes."""
        self._spec, self._names, self._ranks, self._measured = spec, names, ranks, measured
        self._device = next(iter(theta.values())).device
        selections = spec.config.outer.rounds * len(names) * len(theta)
        self._compression = fastest(spec.config.outer.compression, selections)
        self._weights: Mapping[str, float] = {}
        self._round, self._counted = 0, 0.0

    def barred(self, round_: int) -> frozenset[str]:
        """Return the replicas that may not take part in a round: none, unless some are hostile (hostile.py)."""
        return frozenset()

    def prepare(self, round_: int, deltas: Callable[[str], Iterable[tuple[int, Tensor]]]) -> None:
        """Learn of a round's pseudo-gradients by parameter before it begins; only hostile replicas need them all."""

    def begin(self, round_: int, weights: Mapping[str, float]) -> None:
        """Begin a round; `weights` are those of all replicas, by name."""
        names = [replica.name for replica in replicas_in(self._spec.config, round_)]
        self.missed = missed_in(round_, names, research_of(self._spec.config).missed, self._spec.config.seed)
        self._round, self._weights = round_, weights
        self._counted = sum(weights[name] for name in names if name not in self.missed)
        self._measured.begin(round_)

    def mean(self, name: str, deltas: Iterable[tuple[int, Tensor]]) -> tuple[Tensor, list[DecodedTensor]]:
        """Return the mean of a parameter's contributions, and what each replica sends.

        `deltas` are the pseudo-gradients of replicas here, by their index.
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
        self._measured.parameter(name, sent, self._counted)
        if isinstance(mean, RobustMean):
            mean.weighted = _of_all_ranks(mean.weighted, self._ranks)
            return mean.finish(), sent
        self._ranks.sum(mean.total)
        if mean.sent is not None:
            self._ranks.sum(mean.sent)
        return mean.finish(self._counted), sent

    def _send(self, index: int, name: str, delta: Tensor, mean: Mean) -> DecodedTensor:
        """Add a replica's contribution to the mean, or restore it to error feedback if the round excludes it."""
        outer, replica, error = self._spec.config.outer, self._names[index], self.errors[index][name]
        generator = generator_of(self._spec.run, self._round, replica, name)
        selection = select(error, delta, self._compression, generator=generator)
        sent = DecodedTensor(selection.indices, selection.values)
        before = None if self._measured.outer is None else _before_removal(error, sent, outer.compression.memory)
        if drops := research_of(self._spec.config).memory_drops:
            drop_largest(error, drops, outer.compression)
        self._measured.contribution(replica, name, selection)
        if self._measured.outer is not None and before is not None and replica not in self.missed:
            self._measured.outer.contribution(replica, self._weights[replica], delta, before, error)
        if replica in self.missed:
            give_back(error, sent.indices, sent.values, outer.given_back)
        else:
            mean.add(sent, self._weights[replica])
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


def _of_all_ranks(weighted: Sequence[tuple[float, DecodedTensor]], ranks: Ranks) -> list[tuple[float, DecodedTensor]]:
    """Return (weight, contribution) of the replicas on all ranks, in the order of the replicas."""
    if ranks.world == 1:
        return list(weighted)
    found = []
    fields = [{"weight": torch.tensor(weight, dtype=torch.float64), **vars(one)} for weight, one in weighted]
    own = {f"{index:06}.{key}": tensor for index, one in enumerate(fields) for key, tensor in one.items()}
    for data in ranks.gather_bytes(save(own)):
        part = load(data)
        for index in sorted({name.partition(".")[0] for name in part}):
            indices, values = (part[f"{index}.{key}"].to(ranks.device) for key in ("indices", "values"))
            found.append((part[f"{index}.weight"].item(), DecodedTensor(indices, values)))
    return found


def _before_removal(error: Tensor, sent: DecodedTensor, memory: str) -> Tensor:
    """Return a replica's memory of one parameter as it was when the sent values were chosen: a momentum keeps them."""
    before = error.clone()
    if memory == "error_feedback":
        before.view(-1).index_add_(0, sent.indices, sent.values)
    return before
