"""Limits that follow from a run's configuration alone: the inner steps of a round, and the size of a contribution.

AdamW moves an element by at most c times the learning rate in a step, and by its weight decay. By the Cauchy-Schwarz
inequality c is the largest of (1 - b1) / sqrt(1 - b2) * sqrt(sum_k (b1^2 / b2)^k) with both corrections of the bias:
1.17 for betas 0.9 and 0.95. Where round t moves an element by at most R_t, error feedback holds at most
A_t = beta A_{t-1} + R_t. So no honest value exceeds A_t, and no k values together have a norm above sqrt(k) A_t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ReplicaSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import LAYERS, block_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import kept_values

MARGIN = 1.1
"""How many times the limit is allowed: for rounding, and for quantised values larger than those they stand for."""

SHORTEST_STEP_SECONDS = 1e-3
"""No inner step takes less time, however small the model is."""

_LARGEST_SINGULAR_VALUE = 1.3
"""Bound on the singular values of Muon's steps, whose Newton-Schulz iterations end between 0.7 and 1.2."""

_MUON_RMS = 0.2
"""Muon's steps are this times the root of a matrix's longer side (`match_rms_adamw`)."""

_CONVERGED_STEPS = 4096
"""Number of AdamW steps after which c grows no more."""

Sizes = Mapping[tuple[str, str], float]
"""(block, "norm" or "peak") -> the norm of the block's values, or the largest of them."""


@dataclass(frozen=True)
class _Tensor:
    """How far one step at learning rate 1 moves a tensor, without weight decay."""

    block: str
    peak: float
    """Bound on the change of each element."""
    norm: float
    """Bound on the norm of all changes together."""
    elements: int
    kept: int
    """Number of values that are sent."""
    decays: bool
    """Whether weight decay acts on it."""


class ContributionLimits:
    """Bound the norm and the largest value of each block of an honest contribution."""

    def __init__(self, inner: InnerSettings, outer: OuterSettings, rates: Callable[[int], float]) -> None:
        """`rates` returns the sum of the learning rates of a round's inner steps."""
        self._inner, self._outer, self._rates = inner, outer, rates
        self._adamw_step = adamw_step(inner.betas) or math.inf
        """Largest step of an element at learning rate 1; equal for all tensors."""
        self._accumulated, self._moved = [0.0], [0.0]
        self._tensors = list[_Tensor]()
        self._largest: dict[str, float] = {}
        self._from_round = 0

    def begin(self, parameters: Mapping[str, Tensor], round_: int) -> None:
        """Take the shapes and the largest values of the parameters after a round."""
        self._from_round, self._largest = round_, {}
        self._tensors = [self._tensor(name, tuple(tensor.shape)) for name, tensor in parameters.items()]
        for name, tensor in parameters.items():
            if tensor.ndim > 1:
                block, (least, most) = block_of(name), torch.aminmax(tensor)
                self._largest[block] = max(self._largest.get(block, 0.0), float(-least), float(most))

    def accumulated(self, round_: int) -> float:
        """Return the sum of learning rates, with error feedback's decay, that a value sent in a round comes from."""
        beta = self._outer.compression.error_feedback_decay
        while len(self._accumulated) <= round_:
            self._accumulated.append(beta * self._accumulated[-1] + self._rates(len(self._accumulated)))
            self._moved.append(self._moved[-1] + self._accumulated[-1])
        if self._outer.compression.memory == "momentum":  # sends Delta + beta m, where m has Delta already
            return self._rates(round_) + beta * self._accumulated[round_]
        return self._accumulated[round_]

    def of(self, round_: int) -> Sizes:
        """Return the limits of a round."""
        peaks, squares, largest = dict[str, float](), dict[str, float](), MARGIN * self.accumulated(round_)
        for one in self._tensors:
            decay = self._decay(one, round_) if one.decays else 0.0
            peak, norm = one.peak + decay, one.norm + decay * math.sqrt(one.elements)
            if self._outer.compression.transform == "dct":  # keeps the norm, and may gather it in one coefficient
                peak = norm
            else:
                norm = min(norm, math.sqrt(one.kept) * peak)
            peaks[one.block] = max(peaks.get(one.block, 0.0), largest * peak)
            squares[one.block] = squares.get(one.block, 0.0) + (largest * norm) ** 2
        norms = {(block, "norm"): math.sqrt(total) for block, total in squares.items()}
        return norms | {(block, "peak"): peak for block, peak in peaks.items()}

    def _decay(self, one: _Tensor, round_: int) -> float:
        """Bound on the weight decay of a step at learning rate 1.

        Steps and decay balance where the decay of a parameter is as large as a step. A parameter that starts below
        that stays below it, and outer steps have moved it by no more than what was contributed.
        """
        inner, outer, largest = self._inner, self._outer, self._largest.get(one.block, 0.0)
        if inner.weight_decay == 0:
            return 0.0
        moved = math.inf
        if outer.optimizer == "sgd" and outer.aggregation != "sign" and round_ > self._from_round:
            gain = outer.learning_rate / (1 - outer.momentum) * (2 if outer.compression.memory == "momentum" else 1)
            moved = gain * one.peak * (self._moved[round_ - 1] - self._moved[self._from_round])
        decay = inner.weight_decay * max(largest, min(one.peak / inner.weight_decay, largest + moved))
        return decay / (1 - (inner.momentum or 0.0)) if inner.optimizer == "sgd" else decay

    def _tensor(self, name: str, shape: tuple[int, ...]) -> _Tensor:
        inner, elements = self._inner, math.prod(shape)
        if inner.optimizer == "sgd":
            peak = (inner.clip_norm or math.inf) / (1 - (inner.momentum or 0.0))
        else:
            peak = self._adamw_step
        norm = peak if inner.optimizer == "sgd" else peak * math.sqrt(elements)
        if inner.optimizer == "muon" and name.startswith(LAYERS) and len(shape) > 1:
            peak = _MUON_RMS * _LARGEST_SINGULAR_VALUE * math.sqrt(max(shape))
            norm = peak * math.sqrt(min(shape))
        kept = kept_values(shape, self._outer.compression)
        return _Tensor(block_of(name), peak, norm, elements, kept, len(shape) > 1)


def adamw_step(betas: tuple[float, float]) -> float | None:
    """Return c, the largest step of an element in units of the learning rate; None if it grows without end."""
    first, second = betas
    if first * first >= second:
        return None
    ratio, total, largest = first * first / second, 0.0, 1.0
    for step in range(1, _CONVERGED_STEPS + 1):
        total += ratio ** (step - 1)
        correction = math.sqrt(1 - second**step) / (1 - first**step)
        largest = max(largest, (1 - first) / math.sqrt(1 - second) * math.sqrt(total) * correction)
    return largest


def contribution_limits(spec: RunSpec) -> ContributionLimits | None:
    """Return the limits of a run; None where its configuration does not bound what inner steps do."""
    inner, outer, steps = spec.config.inner, spec.config.outer, spec.config.inner.steps
    if steps is None or outer.source == "gradient" or outer.keep_local:
        return None
    if (inner.clip_norm is None) if inner.optimizer == "sgd" else (adamw_step(inner.betas) is None):
        return None
    if not all(map(_steps_as_configured, spec.replicas_ever)):
        return None

    def rates(round_: int) -> float:
        first = (round_ - 1) * steps
        of_round = spec.rates_in(round_, first, steps)
        return sum(of_round.at(step) for step in range(first, first + steps))

    return ContributionLimits(inner, outer, rates)


def _steps_as_configured(replica: ReplicaSettings) -> bool:
    """Return whether its inner optimizer is the one of `inner`."""
    return not isinstance(replica, DatacenterReplica) or "optimizer" not in replica.deepspeed


def inner_steps(spec: RunSpec) -> range:
    """Return how many inner steps a contribution may come from."""
    inner = spec.config.inner
    if inner.steps is not None:
        return range(inner.steps, inner.steps + 1)
    assert inner.seconds is not None
    return range(1, 3 + math.floor(inner.seconds / SHORTEST_STEP_SECONDS))  # a first round may have two, however long
