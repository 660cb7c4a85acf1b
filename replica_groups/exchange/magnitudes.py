"""Bound contributions: scale down, or leave out, those that are larger than a replica can honestly send.

A contribution is held against up to three measures, block by block, by its norm and its largest value:

1. what the configured inner steps can move parameters by at most (ContributionLimits), which needs no history;
2. the median of its round, where three or more contribute, for as many steps and batches as large;
3. its replica's own contributions before, as far as the learning rates let these grow or shrink. Where only two
   contribute, its own lowest level counts as well, unless the other one is as large.

New replicas begin without moments and error feedback, so their contributions are small. If fewer than three of a round
were in each of the last three rounds, these few are held against their own lowest level instead of the median.

Where the first exists, nothing that one replica sends has another's contribution scaled. Honest runs of twelve methods
and mixes came to .80 of the first at most, and to 2.4 times the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median, median_low

import torch
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, MagnitudeSettings
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import LAYERS, block_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import kept_values, scale_of
from replica_groups.rounds.rules import MOST_TIMES_THE_STEPS

RECENT_ROUNDS = 8  # number of rounds whose median is a replica's own level

REMEMBERED_ROUNDS = 64
"""Number of rounds among which a replica's lowest level is looked for, beside the run's first RECENT_ROUNDS."""

_LEAST_ROUNDS = 3  # number of a replica's own contributions that are enough for a level

_STEADY_ROUNDS = 3  # number of rounds in a row, just before, that included a steady replica

_LEAST_REPLICAS = 3  # smallest number of contributions whose median a single replica cannot set

MARGIN = 1.1
"""How many times the limit is allowed: for rounding, and for quantised values larger than those they stand for."""

SHORTEST_STEP_SECONDS = 1e-3  # no inner step takes less time, however small the model is

_LARGEST_SINGULAR_VALUE = 1.3
"""Bound on the singular values of Muon's steps, whose Newton-Schulz iterations end between 0.7 and 1.2."""

_MUON_RMS = 0.2  # Muon's steps are this times the root of a matrix's longer side (`match_rms_adamw`)

_CONVERGED_STEPS = 4096  # number of AdamW steps after which c grows no more

Sizes = Mapping[tuple[str, str], float]
"""(block, "norm" or "peak") -> the norm of the block's values, or the largest of them."""


def remembered_before(round_: int, fragments: int = 1) -> list[int]:
    """Return the rounds of the records that `bound` reads for a round, in order: earlier ones of its fragment."""
    earlier = range(round_ - fragments, 0, -fragments)[::-1]
    return [*earlier[:-REMEMBERED_ROUNDS][:RECENT_ROUNDS], *earlier[-REMEMBERED_ROUNDS:]]


def bound(
    record: RoundRecord,
    before: Iterable[RoundRecord],
    settings: MagnitudeSettings,
    trains_on: bool = False,
    limits: ContributionLimits | None = None,
    fragments: int = 1,
) -> None:
    """Scale down or leave out contributions of a record that nobody has read yet.

    `before`: the records of `remembered_before`, of a model in so many `fragments`. With `trains_on`, a replica that
    was not counted sends several rounds' changes at once. Without `limits`, the smaller of two contributions bounds the
    larger until that has a history. With fewer than three, one without history is rejected only for exceeding the
    limits. If all would be rejected, none is.
    """
    by_level, is_crowd = {one.replica for one in record.contributions}, len(record.contributions) >= _LEAST_REPLICAS
    if is_crowd:  # the others are a measure, if enough of them are not new; the lowest level of long ago is not
        before = [past for past in before if past.round >= record.round - RECENT_ROUNDS * fragments]
        last = [past for past in before if past.round >= record.round - _STEADY_ROUNDS * fragments]
        steady = by_level.intersection(*({one.replica for one in past.contributions} for past in last))
        by_level = steady if len(last) >= _STEADY_ROUNDS and len(steady) < _LEAST_REPLICAS else set()
    *earlier, measured = _with_all_steps([*before, record]) if trains_on else [*before, record]
    # In fragments, what a replica has trained goes on if it misses a round. A new one may have missed its first.
    since = {one.replica: record.round - min(fragments, 2) * fragments for one in record.contributions}
    for past in earlier if fragments > 1 else ():
        since |= dict.fromkeys([*(one.replica for one in past.contributions), *past.left_out], past.round)
    if limits is not None:
        earlier = [_as_in(record.round, past, limits) for past in earlier]
    least = max(0, record.round - RECENT_ROUNDS * fragments)
    largest = {} if limits is None else {one: limits.of(record.round, max(one, least)) for one in {*since.values()}}
    # How many times as large as the configuration allows a contribution is; 0 where it says nothing.
    beyond = {
        one.replica: max((size / cap[what] for what, size in _sizes(one).items() if cap.get(what, 0) > 0), default=0.0)
        for one in measured.contributions
        for cap in [largest.get(since[one.replica], {})]
    }
    own, lower = _own(earlier), _lower_medians(measured)
    is_limited = not is_crowd and limits is not None
    excess = {
        one.replica: _excess(one, own.get(one.replica, []), lower(one), one.replica in by_level, is_limited)
        for one in measured.contributions
    }
    left_out = [replica for replica, ratio in excess.items() if ratio > settings.leave_out]
    if len(record.contributions) < _LEAST_REPLICAS:
        left_out = [replica for replica in left_out if len(own.get(replica, [])) >= _LEAST_ROUNDS]
    left_out = [one for one in excess if one in left_out or beyond[one] > settings.leave_out / settings.scale]
    if len(left_out) == len(record.contributions):
        left_out = []
    for replica in left_out:
        record.contributions.remove(next(one for one in record.contributions if one.replica == replica))
    record.left_out.extend(left_out)
    for one in record.contributions:
        if (too_large := max(excess[one.replica] / settings.scale, beyond[one.replica])) > 1:
            one.scale = 1 / too_large


def _with_all_steps(records: Iterable[RoundRecord]) -> list[RoundRecord]:
    """Return copies with the steps that a replica may have taken since it was last counted or left out."""
    found, last = [], dict[str, int]()
    for record in records:
        copy = deepcopy(record)
        for one in copy.contributions:
            rounds = min(record.round - last.get(one.replica, record.round - 1), RECENT_ROUNDS)
            one.steps, one.tokens = rounds * one.steps, rounds * one.tokens
        last |= dict.fromkeys([*(one.replica for one in copy.contributions), *copy.left_out], record.round)
        found.append(copy)
    return found


def _as_in(round_: int, past: RoundRecord, limits: ContributionLimits) -> RoundRecord:
    """Return a record with the sizes that its contributions would have with the learning rates of another round."""
    copy = deepcopy(past)
    before = limits.accumulated(past.round)
    growth = limits.accumulated(round_) / before if before > 0 else 1.0
    for one in copy.contributions:
        for blob in one.blobs:
            blob.norm, blob.peak = growth * blob.norm, growth * blob.peak
    return copy


def _excess(
    one: ContributionEntry, earlier: Sequence[ContributionEntry], lower: Sizes, by_level: bool, is_limited: bool
) -> float:
    """Return how many times as large as others, or its own before, a contribution is, where that is most.

    `earlier`: its replica's own. `lower`: the lower medians of the round's. `by_level`: its own lowest level replaces
    these, once it has one. `is_limited`: it needs neither, because the configuration limits it.
    """
    own = [_sizes(past, one) for past in earlier]
    has_history, ratios = len(own) >= _LEAST_ROUNDS, [0.0]
    for what, size in _sizes(one).items():
        references = [median(sizes[what] for sizes in own[-RECENT_ROUNDS:])] if has_history else []
        if has_history and by_level:
            seen = [sizes[what] for sizes in own]
            starts = range(0, max(1, len(seen) - RECENT_ROUNDS + 1), RECENT_ROUNDS // 2)
            lowest_level = min(median(seen[start : start + RECENT_ROUNDS]) for start in starts)
            references.append(max(lowest_level, lower[what]))
        elif not is_limited:
            references.append(lower[what])
        ratios += [size / reference for reference in references if reference > 0]
    return max(ratios)


def _lower_medians(record: RoundRecord) -> Callable[[ContributionEntry], Sizes]:
    """Return the lower medians of a round's sizes, as they would be with the steps and the batch of a contribution.

    Contributions with the same steps and tokens share them: to compare each with each would take longest in large runs.
    """
    known: dict[tuple[int, int], Sizes] = {}

    def lower(like: ContributionEntry) -> Sizes:
        key = like.steps, like.tokens
        if key not in known:
            around = [_sizes(other, like) for other in record.contributions]
            known[key] = {what: median_low([sizes[what] for sizes in around]) for what in around[0]}
        return known[key]

    return lower


def _own(earlier: Iterable[RoundRecord]) -> dict[str, list[ContributionEntry]]:
    """Return the earlier contributions of each replica, oldest first: those that were included unscaled, with sizes."""
    found: dict[str, list[ContributionEntry]] = {}
    for record in earlier:
        for one in record.contributions:
            if scale_of(one) == 1 and any(blob.norm for blob in one.blobs):
                found.setdefault(one.replica, []).append(one)
    return found


def _sizes(one: ContributionEntry, like: ContributionEntry | None = None) -> Sizes:
    """Return the sizes of a contribution, as they would be at most with the steps and the batch of another.

    Changes grow with the number of steps, and with the root of a step's tokens, as gradients have less noise then.
    """
    factors = dict.fromkeys((blob.block for blob in one.blobs), 1.0)
    if like is not None:
        own, other = one.tokens / max(1, one.steps), like.tokens / max(1, like.steps)
        of_noise = math.sqrt(max(1.0, other / own)) if own > 0 else 1.0
        for blob in one.blobs:  # those of a slot that was restarted within the round come from fewer steps
            times = like.steps / max(1, blob.steps or one.steps)
            factors[blob.block] = of_noise * min(max(1.0, times), MOST_TIMES_THE_STEPS)
    norms = {(blob.block, "norm"): factors[blob.block] * blob.norm for blob in one.blobs}
    return norms | {(blob.block, "peak"): factors[blob.block] * blob.peak for blob in one.blobs}


@dataclass(frozen=True)
class _Tensor:
    """How far one step at learning rate 1 moves a tensor, without weight decay."""

    block: str
    peak: float  # bound on the change of each element
    norm: float  # bound on the norm of all changes together
    elements: int
    kept: int  # number of values that are sent
    decays: bool  # whether weight decay acts on it


class ContributionLimits:
    """Bound the norm and the largest value of each block of an honest contribution, from the configuration alone.

    AdamW moves an element by at most c times the learning rate in a step, and by its weight decay. By the
    Cauchy-Schwarz inequality c is the largest of (1 - b1) / sqrt(1 - b2) * sqrt(sum_k (b1^2 / b2)^k) with both
    corrections of the bias: 1.17 for betas 0.9 and 0.95. Where round t moves an element by at most R_t, error feedback
    holds at most A_t = beta A_{t-1} + R_t. So no honest value exceeds A_t, and no k values together have a norm above
    sqrt(k) A_t.
    """

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

    def accumulated(self, round_: int, since: int | None = None) -> float:
        """Return the sum of learning rates, with error feedback's decay, that a value sent in a round comes from.

        `since`: last round that included the replica; by default the round before of the same fragment.
        """
        beta, fragments = self._outer.compression.error_feedback_decay, self._outer.fragments

        def trained(since: int, last: int) -> float:
            return sum(map(self._rates, range(since + 1, last + 1)))

        while (number := len(self._accumulated)) <= round_:
            before = max(0, number - fragments)
            self._accumulated.append(beta * self._accumulated[before] + trained(before, number))
            self._moved.append(self._moved[-1] + self._accumulated[-1])
        since = max(0, round_ - fragments) if since is None else since
        own = trained(since, round_)
        total = beta * self._accumulated[since] + own
        # A momentum sends Delta + beta m, where m has Delta already.
        return own + beta * total if self._outer.compression.memory == "momentum" else total

    def of(self, round_: int, since: int | None = None) -> Sizes:
        """Return the limits of a round. `since` is as in `accumulated`."""
        peaks, squares, largest = dict[str, float](), dict[str, float](), MARGIN * self.accumulated(round_, since)
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
        is_sgd = inner.optimizer == "sgd"
        peak = (inner.clip_norm or math.inf) / (1 - (inner.momentum or 0.0)) if is_sgd else self._adamw_step
        norm = peak if is_sgd else peak * math.sqrt(elements)
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
    if steps is None or outer.source == "gradient" or outer.keep_local or outer.mixing:
        return None
    if (inner.clip_norm is None) if inner.optimizer == "sgd" else (adamw_step(inner.betas) is None):
        return None
    if any(isinstance(one, DatacenterReplica) and "optimizer" in one.deepspeed for one in spec.replicas_ever):
        return None  # its inner optimizer is not the one of `inner`

    def rates(round_: int) -> float:
        if spec.at(round_).outer.tokens is not None:  # the rate follows records; the peak bounds it
            return steps * spec.at(round_).inner.learning_rate
        first = (round_ - 1) * steps
        of_round = spec.rates_in(round_, first, steps)
        return sum(of_round.at(step) for step in range(first, first + steps))

    return ContributionLimits(inner, outer, rates)


def inner_steps(spec: RunSpec) -> range:
    """Return how many inner steps a contribution may come from."""
    inner = spec.config.inner
    if inner.steps is not None:
        return range(inner.steps, inner.steps + 1)
    assert inner.seconds is not None
    return range(1, 3 + math.floor(inner.seconds / SHORTEST_STEP_SECONDS))  # a first round may have two, however long
