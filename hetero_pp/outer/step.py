"""The outer step: theta <- theta_start - eta mean_m(D_m), or with momentum, to the bit the same on every machine.

Contributions are added in replica-name order in fp32, divided by the counted weight, and every operation is a
separate elementwise one (no fused multiply-add), so CPU and GPU agree. Source: SparseLoCo, equation 2 of Het-PP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from hetero_pp.model import Shapes
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.cosines import restored

DividesBy = Literal["replicas", "senders"]


def mean_of(
    shape: tuple[int, ...],
    weighted: Iterable[tuple[float, DecodedTensor]],
    divides_by: DividesBy = "replicas",
) -> Tensor:
    """The weighted mean of contributions (at least one) to one tensor, in the order given, as a dense fp32 tensor.

    Over all replicas (equation 2 of Het-PP), or at each coordinate over those that sent it (what is deployed); 0 where
    nobody did.
    """
    mean = None
    for weight, decoded in weighted:
        mean = mean or WeightedMean(shape, divides_by, decoded.values.device)
        mean.add(decoded, weight)
    assert mean is not None
    return mean.finish()


class WeightedMean:
    """Sums contributions to one tensor, dense, one after the other, until the mean is asked for."""

    def __init__(self, shape: tuple[int, ...], divides_by: DividesBy, device: torch.device) -> None:
        self.total = torch.zeros(shape, device=device)
        self.weight = 0.0
        self.sent = torch.zeros(shape, device=device) if divides_by == "senders" else None
        """The weights of those who sent a coordinate."""

    def add(self, decoded: DecodedTensor, weight: float = 1.0) -> None:
        """One contribution, in fp32."""
        decoded.add_to(self.total, weight)
        self.weight += weight
        if self.sent is not None:
            DecodedTensor(decoded.indices, torch.ones_like(decoded.values)).add_to(self.sent, weight)

    def finish(self, weight: float | None = None) -> Tensor:
        """The mean, in the memory of the sum. `weight` is that of all contributions, if some were summed elsewhere."""
        if self.sent is not None:
            return self.total.div_(self.sent.masked_fill_(self.sent == 0, 1.0))
        return self.total.div_(self.weight if weight is None else weight)


def outer_step(start: Tensor, direction: Tensor, learning_rate: float) -> Tensor:
    """theta_start - eta direction."""
    return start - direction.mul(learning_rate)


class RoundOptimizer(Protocol):
    """Makes theta after a round from theta before it and the means of what was contributed."""

    settings: OuterSettings

    def begin(self, round_: int) -> None:
        """What follows is of this round."""

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """The tensors whose mean has to be told in a round, by name; whole layer blocks."""

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        """Which rows of a tensor's mean it has to be told; all but on several ranks."""

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """The mean of one tensor's rows; theta may be changed in place already."""

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """Every mean was taken: theta has to be that after the round now."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What the next round depends on beside theta, for snapshots."""

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        """Go on from what `state` was after so many rounds."""


EXP_AVG, EXP_AVG_SQ = ".exp_avg", ".exp_avg_sq"
"""Behind a parameter's name, what Adam keeps of it."""


def parameter_of(state: str) -> str:
    """Of which parameter an outer optimizer keeps something under this name."""
    return state.removesuffix(EXP_AVG_SQ).removesuffix(EXP_AVG)


class OuterOptimizer:
    """SGD with momentum, or Adam, over named parameters: torch.optim's arithmetic, one elementwise operation at a time.

    Each round's step is taken once, so the number of steps that Adam has taken is that of the rounds since pretraining.
    """

    def __init__(self, settings: OuterSettings, settings_of: Callable[[int], OuterSettings] | None = None) -> None:
        """`settings_of` gives them by round, where they are not the same in all."""
        self.settings = settings
        self._settings_of = settings_of
        self._round = 1
        self.momentum: dict[str, Tensor] = {}
        """b [the parameter's shape] by parameter, only if momentum is used; or both of Adam's moments."""

    def begin(self, round_: int) -> None:
        """See RoundOptimizer."""
        self._round = round_
        if self._settings_of is not None:
            self.settings = self._settings_of(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """See RoundOptimizer: what is in theta."""
        return {name: tuple(tensor.shape) for name, tensor in theta.items()}

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        """See RoundOptimizer: all."""
        return range(shape[0])

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """See RoundOptimizer."""
        theta[name].copy_(self.step(name, theta[name], mean))

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """See RoundOptimizer: every tensor was finished when it was taken."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See RoundOptimizer: momentum."""
        return self.momentum

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        """See RoundOptimizer."""
        self.momentum = {name: tensor.clone() for name, tensor in state.items()}

    def step(self, name: str, start: Tensor, mean: Tensor) -> Tensor:
        """theta_start - eta (mean, or its signs, or what momentum or Adam make of that); mean alone in pretraining."""
        compression = self.settings.compression
        if compression.transform == "dct":
            mean = restored(mean, compression.tile)
        if self._round <= self.settings.pretraining:
            return outer_step(start, mean, 1.0)
        told = mean.sign() if self.settings.aggregation == "sign" else mean
        direction = self._adam(name, told) if self.settings.optimizer == "adam" else self._sgd(name, told)
        return outer_step(start, direction, self.settings.learning_rate_in(self._round))

    def _sgd(self, name: str, mean: Tensor) -> Tensor:
        """mean, or b, or mean + mu b for Nesterov, where b <- mu b + mean."""
        mu = self.settings.momentum
        if mu == 0:
            return mean
        buffer = self.momentum[name].mul(mu) + mean if name in self.momentum else mean.clone()
        self.momentum[name] = buffer
        return mean + buffer.mul(mu) if self.settings.nesterov else buffer

    def _adam(self, name: str, mean: Tensor) -> Tensor:
        """m^ / (sqrt(v^) + epsilon); m^ and v^ are both moments over 1 - beta^t, t rounds on (Kingma and Ba)."""
        powers = {EXP_AVG: mean, EXP_AVG_SQ: mean * mean}
        moments = []
        for (kind, power), beta in zip(powers.items(), self.settings.betas, strict=True):
            before = self.momentum.get(name + kind)
            now = power.mul(1 - beta) if before is None else before.mul(beta) + power.mul(1 - beta)
            self.momentum[name + kind] = now
            moments.append(now / (1 - beta ** (self._round - self.settings.pretraining)))
        return moments[0] / (moments[1].sqrt() + self.settings.epsilon)


def parameter_sha256(parameter: Tensor) -> bytes:
    """sha256 of a parameter's little-endian fp32 values."""
    values = parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return hashlib.sha256(values.numpy().astype("<f4", copy=False).data).digest()


def parameters_sha256(hashes: Mapping[str, bytes]) -> bytes:
    """sha256 over sorted (name, sha256 of the parameter): the hash of a replica."""
    digest = hashlib.sha256()
    for name, value in sorted(hashes.items()):
        digest.update(name.encode() + b"\0" + value)
    return digest.digest()
