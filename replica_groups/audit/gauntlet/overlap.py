"""Copies among the contributions to a round, by the positions and signs of the values that they keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import torch

from hetero_pp.pseudo_gradient.contribution import DecodedTensor

Contribution = Mapping[str, DecodedTensor]
"""Tensors by the parameters' names."""

FEW = 0.9
"""Usual overlap of two among fewer than four replicas, where nothing tells two copies from two with little noise."""

_LEAST = 0.02
"""Overlap of two replicas below which it is mostly noise."""


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


def overlapping(contributions: Mapping[str, Contribution], limit: float) -> list[tuple[str, str]]:
    """Return the pairs of contributions that overlap too much, the nearest first: at least one of each is a copy.

    `limit` is on a scale from what is usual of a pair (0) to equal contributions (1): what is usual differs between
    methods, and grows with the batches.
    """
    names = sorted(contributions)
    pairs = {pair: overlap(contributions[pair[0]], contributions[pair[1]]) for pair in combinations(names, 2)}
    between = pairs | {(other, one): share for (one, other), share in pairs.items()}
    least = median(pairs.values()) if pairs else 0.0
    found: list[tuple[str, str]] = []
    for (one, other), share in sorted(pairs.items(), key=lambda pair: -pair[1]):
        known = {pair[1] for pair in found}  # one of each pair does not tell what is usual
        others = [name for name in names if name not in (one, other) and name not in known]
        usual = max(least, _usual(one, other, others, between))
        if share - usual > limit * (1 - usual):
            found.append((one, other))
    return found


def _usual(one: str, other: str, others: Sequence[str], between: Mapping[tuple[str, str], float]) -> float:
    """Return the overlap that two honest replicas have, as their overlaps with all others tell.

    The noise of two honest replicas is independent, so their overlap is r_one r_other: each is the part of a
    contribution that is no noise. Three overlaps tell one of these parts. The median is over pairs of the others.
    """
    if len(others) < 2:
        return FEW
    found = [
        between[one, a] * between[one, b] * between[other, a] * between[other, b] / between[a, b] ** 2
        for a, b in combinations(others, 2)
        if abs(between[a, b]) > _LEAST
    ]
    return min(1.0, math.sqrt(max(0.0, median(found)))) if found else 0.0


def _cosine(one: DecodedTensor, other: DecodedTensor) -> float:
    if not len(one.indices) or not len(other.indices):
        return 0.0
    size = int(torch.maximum(one.indices.max(), other.indices.max())) + 1
    dense = torch.zeros(size, device=one.values.device).index_copy_(0, one.indices, one.values)
    norms = float(one.values.norm()) * float(other.values.norm())
    return float(dense.index_select(0, other.indices) @ other.values) / norms if norms > 0 else 0.0
