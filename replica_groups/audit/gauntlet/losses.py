"""Primary evaluation: losses before and after one contribution alone is applied, on assigned and on other text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

import numpy as np
import torch
from torch import Tensor

from hetero_pp.config.member_inputs import batches_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.sources import Source
from hetero_pp.messages.messages_pb2 import Losses
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.model.transformer import ModelShape, Transformer, build_filled, parameters_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import mean_of, outer_step
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.cosines import restored

CLEAR = 4.0
"""Standard errors between the improvements on two texts from which on a contribution was trained on one of them."""

SEQUENCES_OF_A_PAIR = 64
"""Most sequences of each of two replicas of which one sent a copy. Few rounds have such a pair."""

_TRIES = 16
"""Windows that are drawn for each one that is needed, because some may be assigned to a replica."""


def losses_of(
    theta: Mapping[str, Tensor],
    contribution: Mapping[str, DecodedTensor],
    shape: ModelShape,
    assigned: Tensor,
    other: Tensor,
    rate: float,
    outer: OuterSettings,
) -> Losses:
    """Return the mean losses in nats of theta and of theta - rate * contribution; theta is not changed.

    `assigned` and `other` are tokens [S, L + 1] of the replica's text of the round, and of nobody's; S >= 2. `rate` is
    `audit.gauntlet.step` times the outer learning rate of the round. A contribution of coefficients or for signs is
    applied as the outer step would; momentum is not. Runs on theta's device, one sequence at a time.
    """
    module = build_filled(shape, theta, device=next(iter(theta.values())).device)
    before = [_losses(module, assigned), _losses(module, other)]
    _apply(module, contribution, rate, outer)
    after = [_losses(module, assigned), _losses(module, other)]
    return Losses(
        assigned_before=fmean(before[0]),
        assigned_after=fmean(after[0]),
        other_before=fmean(before[1]),
        other_after=fmean(after[1]),
        error=_error([_gains(*both) for both in zip(before, after, strict=True)]),
    )


def copy_of(
    pair: tuple[str, str],
    sent: Mapping[str, Mapping[str, DecodedTensor]],
    theta: Mapping[str, Tensor],
    shape: ModelShape,
    texts: tuple[Tensor, Tensor],
    rate: float,
    outer: OuterSettings,
) -> str | None:
    """Return which of two replicas sent a copy: the one on whose text the contributions improve less; None if unclear.

    The order in which they arrived says nothing: one that trains on the text of a slower replica sends first. `sent`
    has the contributions of both, and `texts` the tokens [S, L + 1] that each was assigned. Others as of `losses_of`.
    """
    clear = []
    for name in pair:
        found = losses_of(theta, sent[name], shape, *texts, rate, outer)
        gains = _gains([found.assigned_before, found.other_before], [found.assigned_after, found.other_after])
        clear.append((gains[0] - gains[1]) / found.error if found.error > 0 else 0.0)
    if max(map(abs, clear)) < CLEAR or min(clear) * max(clear) <= 0:
        return None
    return pair[1] if clear[0] > 0 else pair[0]


def median_of(told: Sequence[Losses]) -> Losses:
    """Return the median of each number over the losses that several validators measured for one contribution."""
    names = [number.name for number in Losses.DESCRIPTOR.fields]
    return Losses(**{name: median(getattr(one, name) for one in told) for name in names})


@torch.no_grad()
def _apply(module: Transformer, contribution: Mapping[str, DecodedTensor], rate: float, outer: OuterSettings) -> None:
    for name, parameter in parameters_of(module).items():
        step = mean_of(tuple(parameter.shape), [(1.0, contribution[name])])
        step = restored(step, outer.compression.tile) if outer.compression.transform == "dct" else step
        outer_step(parameter, step.sign_() if outer.aggregation == "sign" else step, rate)


@torch.no_grad()
def _losses(module: Transformer, tokens: Tensor) -> list[float]:
    """Return the loss of each sequence; infinite if it is no number or larger than any that counts."""
    rows = tokens.to(next(module.parameters()).device).split(1)
    found = [module.loss(row[:, :-1], row[:, 1:]).item() for row in rows]
    return [one if one <= MOST_LOSS else math.inf for one in found]


def _gains(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return the relative improvement of each sequence."""
    return [(one - then) / one for one, then in zip(before, after, strict=True)]


def _error(gains: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the difference of two mean gains; 0 if one of them is infinite."""
    if not all(math.isfinite(one) for of_text in gains for one in of_text):
        return 0.0
    return math.sqrt(sum(stdev(of_text) ** 2 / len(of_text) for of_text in gains))


class Texts:
    """Text of a run with a corpus that is encoded once."""

    def __init__(self, spec: RunSpec, source: Source, rows: int) -> None:
        """`rows`: least number of sequences of each kind. Raises ConfigError for a corpus with fewer."""
        self._spec, self._source = spec, source
        self._members = {member.replica.name: member for member in spec.members.values()}
        batches = self._batches(next(iter(self._members)), 1)
        self._windows = len(batches.store.train) // (batches.sequence_length + 1)
        if self._windows < rows:
            key, found = ("audit", "gauntlet", "sequences"), f"found {rows}, expected at most {self._windows}"
            raise ConfigError(key, f"{found}, the sequences of the corpus")

    def of(self, replica: str, round_: int, rows: int, drawing: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn sequences that a replica trained on in a round, and others, int64 [rows, L + 1] each.

        The corpus may be smaller than `rows`.

        The others are assigned to no replica in this round. If there are too few, because a round reads nearly the
        whole corpus, the rest are any that are not assigned to this replica, and then any.
        """
        own, batches = self._assigned(replica, round_), self._batches(replica, round_)
        rows = min(rows, self._windows)
        all_ = np.concatenate([self._assigned(one.name, round_) for one in self._spec.replicas_in(round_)])
        candidates = drawing.permutation(min(self._windows, 1 << 20))
        if self._windows > len(candidates):
            candidates = drawing.integers(self._windows, size=_TRIES * rows)
        known = np.where(np.isin(candidates, own), 2, np.isin(candidates, all_))
        others = candidates[np.argsort(known, kind="stable")][:rows]
        return batches.rows(drawing.choice(own, rows, replace=len(own) < rows)), batches.rows(others)

    def of_pair(self, pair: tuple[str, str], round_: int, drawing: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn sequences that each of two replicas was assigned in a round, int64 [S, L + 1] each."""
        drawn = [drawing.permutation(self._assigned(name, round_))[:SEQUENCES_OF_A_PAIR] for name in pair]
        one, other = (self._batches(name, round_).rows(rows) for name, rows in zip(pair, drawn, strict=True))
        return one, other

    def _assigned(self, replica: str, round_: int) -> np.ndarray:
        """Return the numbers of the training windows that a replica reads in a round."""
        first, steps = self._spec.share_of(replica, round_).first_step or 0, self._spec.inner_steps
        own = range((round_ - 1) * steps - first, round_ * steps - first)
        return np.concatenate([self._batches(replica, round_).windows(step) for step in own])

    def _batches(self, replica: str, round_: int) -> StoreBatches:
        share = self._spec.share_of(replica, round_)
        batches = batches_of(self._spec, self._members[replica], self._source, share)
        assert isinstance(batches, StoreBatches), "a validator does not read streams"
        return batches
