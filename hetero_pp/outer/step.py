"""Outer step: theta <- theta_start - eta mean_m(D_m), or with momentum, bitwise equal on every machine.

Contributions are added in replica-name order in fp32 and divided by the included weight. Every operation is a separate
elementwise one (no fused multiply-add), so CPU and GPU agree. Source: SparseLoCo, equation 2 of Het-PP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from hetero_pp.model.transformer import Shapes, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.cosines import restored

DividesBy = Literal["replicas", "senders"]


def mean_of(
    shape: tuple[int, ...], weighted: Iterable[tuple[float, DecodedTensor]], divides_by: DividesBy = "replicas"
) -> Tensor:
    """Return the weighted mean of at least one contribution to one tensor, in the order given, as a dense fp32 tensor.

    The mean is over all included replicas (equation 2 of Het-PP). With `divides_by="senders"`, the mean of a coordinate
    is over the replicas that sent it. A coordinate without senders is 0.
    """
    mean = None
    for weight, decoded in weighted:
        mean = mean or WeightedMean(shape, divides_by, decoded.values.device)
        mean.add(decoded, weight)
    assert mean is not None
    return mean.finish()


class WeightedMean:
    """Accumulates contributions to one tensor, dense, until the mean is asked for."""

    def __init__(self, shape: tuple[int, ...], divides_by: DividesBy, device: torch.device) -> None:
        self.total = torch.zeros(shape, dtype=torch.float32, device=device)
        self.weight = 0.0
        self.sent = torch.zeros(shape, dtype=torch.float32, device=device) if divides_by == "senders" else None
        """Sum of the weights of the contributions that have a coordinate."""

    def add(self, decoded: DecodedTensor, weight: float = 1.0) -> None:
        """Add one contribution, in fp32."""
        decoded.add_to(self.total, weight)
        self.weight += weight
        if self.sent is not None:
            DecodedTensor(decoded.indices, torch.ones_like(decoded.values)).add_to(self.sent, weight)

    def finish(self, weight: float | None = None) -> Tensor:
        """Return the mean, in the memory of the sum.

        `weight` is the weight of all contributions, if some were summed elsewhere.
        """
        if self.sent is not None:
            return self.total.div_(self.sent.masked_fill_(self.sent == 0, 1.0))
        return self.total.div_(self.weight if weight is None else weight)


def outer_step(theta: Tensor, direction: Tensor, learning_rate: float) -> None:
    """Change theta to theta - eta direction, in place; the direction is used up, because a copy of it may be large."""
    theta.sub_(direction if learning_rate == 1 else direction.mul_(learning_rate))


def start_before_mean(theta: Tensor, sent: DecodedTensor, settings: OuterSettings) -> Tensor:
    """Return a replica's start of a round before the previous mean is known: theta - presumes * sent.

    With `overlap` a replica trains the next round while its contribution is on its way to the others. It starts that
    round from the theta that it knows, minus a part of its own contribution, and its next contribution is measured from
    there. So theta after a round includes the contributions of that round and of all before, as without overlap. But
    each was made without knowing those of the round before. Source: eager updates (Kale et al. 2025), which apply all
    of a replica's own share of the mean, and the others' of the round before in place of theirs. Here contributions are
    sparse, and error feedback keeps the rest.
    """
    start = theta.clone()
    sent.add_to(start, -settings.presumes)
    return start


class RoundOptimizer(Protocol):
    """Computes theta after a round from theta before it and the means of the contributions."""

    settings: OuterSettings

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        """Begin a round; the calls below are about it.

        `weights` are those of the included replicas, by name; `tokens` are those of the run so far (RoundRecord).
        """

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """Return the shapes of the tensors to average in a round, by name; whole layer blocks."""

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """Apply the mean of one tensor's rows. May change theta in place, and may overwrite the mean."""

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """Finish the round after every mean was taken; theta is then that after the round."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Tensors that the next round depends on beside theta, for run checkpoints."""

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        """Resume from the `state` after `rounds` rounds."""


EXP_AVG, EXP_AVG_SQ = ".exp_avg", ".exp_avg_sq"  # suffixes of a parameter's name for Adam's moments of it
COEFFICIENTS = ".coefficients-"  # part of a state's name after the embedding's and before K: the state is of C [V, K]


def parameter_of(state: str) -> str:
    """Return the parameter of a state of the outer optimizer, from the state's name."""
    return state.removesuffix(EXP_AVG_SQ).removesuffix(EXP_AVG).split(COEFFICIENTS)[0]


class OuterOptimizer(RoundOptimizer):
    """SGD with momentum, or Adam, over named parameters: torch.optim's arithmetic, one elementwise operation at a time.

    Each round takes one step.
    """

    def __init__(self, settings: OuterSettings, settings_of: Callable[[int], OuterSettings] | None = None) -> None:
        """`settings_of` returns the settings by round, if they change between rounds."""
        self.settings = settings
        self._settings_of = settings_of
        self._round, self._tokens = 1, 0
        self.momentum: dict[str, Tensor] = {}
        """Momentum buffers b [the parameter's shape] by parameter, if momentum is used; or both of Adam's moments."""

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        self._round, self._tokens = round_, tokens
        if self._settings_of is not None:
            self.settings = self._settings_of(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """Return the shapes of theta's tensors."""
        return shapes_of(theta)

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """Change one tensor of theta to theta - eta direction, by SGD or Adam; the direction is from mean or signs."""
        compression = self.settings.compression
        self._step(theta, name, restored(mean, compression.tile) if compression.transform == "dct" else mean)

    def _step(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        told = mean.sign_() if self.settings.aggregation == "sign" else mean
        direction = self._adam(name, told) if self.settings.optimizer == "adam" else self._sgd(name, told)
        outer_step(theta[name], direction, self.settings.learning_rate_in(self._round, self._tokens))

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """Do nothing: `take` has finished every tensor."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Momentum buffers or Adam's moments."""
        return self.momentum

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self.momentum = {name: tensor.clone() for name, tensor in state.items()}

    def _sgd(self, name: str, mean: Tensor) -> Tensor:
        """Return mean, or b, or mean + mu b for Nesterov, where b <- mu b + mean; in the memory of the mean."""
        mu = self.settings.momentum
        if mu == 0:
            return mean
        if name in self.momentum:
            self.momentum[name].mul_(mu).add_(mean)
        else:
            self.momentum[name] = mean.clone()
        buffer = self.momentum[name]
        return mean.add_(buffer.mul(mu)) if self.settings.nesterov else mean.copy_(buffer)

    def _adam(self, name: str, mean: Tensor) -> Tensor:
        """Return m^ / (sqrt(v^) + epsilon); m^ and v^ are the moments over 1 - beta^t in step t (Kingma and Ba)."""
        steps = -(-self._round // self.settings.fragments)  # rounds that synchronised the parameter's fragment
        powers = {EXP_AVG: mean, EXP_AVG_SQ: mean * mean}
        moments = []
        for (kind, power), beta in zip(powers.items(), self.settings.betas, strict=True):
            before = self.momentum.get(name + kind)
            now = power.mul(1 - beta) if before is None else before.mul(beta) + power.mul(1 - beta)
            self.momentum[name + kind] = now
            moments.append(now / (1 - beta**steps))
        return moments[0] / (moments[1].sqrt() + self.settings.epsilon)


def parameter_sha256(parameter: Tensor) -> bytes:
    """Return the sha256 of a parameter's little-endian fp32 values."""
    values = parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return hashlib.sha256(values.numpy().astype("<f4", copy=False).data).digest()


def parameters_sha256(hashes: Mapping[str, bytes]) -> bytes:
    """Return the hash of a replica: sha256 over sorted (name, sha256 of the parameter)."""
    digest = hashlib.sha256()
    for name, value in sorted(hashes.items()):
        digest.update(name.encode() + b"\0" + value)
    return digest.digest()
