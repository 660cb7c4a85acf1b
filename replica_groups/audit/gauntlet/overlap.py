"""Copies among the contributions to a round, by the positions and signs of the values that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import torch

from hetero_pp.pseudo_gradient.contribution import DecodedTensor

Contribution = Mapping[str, DecodedTensor]
"""Tensors by the parameters' names."""

FEW = 0.5
"""Usual overlap of a round that has no other pair."""


def overlap(one: Contribution, other: Contribution) -> float:
    """Return the overlap of two contributions to one model: 1 if equal, about 0 if unrelated.

    It is the cosine of a tensor, and the mean over tensors, weighted by the number of values that they keep. Positions
    alone would say nothing about contributions of all values.
    """
    total = 0.0
    kept = {name: min(len(one[name].indices), len(other[name].indices)) for name in one}
    for name, count in kept.items():
        total += count * _cosine(one[name], other[name])
    return total / max(1, sum(kept.values()))


def copies(contributions: Mapping[str, Contribution], arrived: Sequence[str], limit: float) -> dict[str, str]:
    """Return the original of each copy: of two contributions that overlap too much, the later is a copy.

    `arrived`: all replicas, in the order in which their contributions arrived. The overlap of honest replicas differs
    between methods, so `limit` is on a scale from the median of the round's pairs (0) to equal contributions (1).
    """
    pairs = {pair: overlap(contributions[pair[0]], contributions[pair[1]]) for pair in combinations(arrived, 2)}
    usual = max(0.0, median(pairs.values())) if len(pairs) > 1 else FEW
    found: dict[str, str] = {}
    for (original, later), share in pairs.items():
        if share - usual > limit * (1 - usual):
            found.setdefault(later, original)
    return found


def _cosine(one: DecodedTensor, other: DecodedTensor) -> float:
    if not len(one.indices) or not len(other.indices):
        return 0.0
    size = int(torch.maximum(one.indices.max(), other.indices.max())) + 1
    dense = torch.zeros(size, device=one.values.device).index_copy_(0, one.indices, one.values)
    norms = float(one.values.norm()) * float(other.values.norm())
    return float(dense.index_select(0, other.indices) @ other.values) / norms if norms > 0 else 0.0
