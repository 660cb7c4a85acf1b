"""Contributions that go another way than the others of their round, by the signs of the values that they keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from statistics import median_high

import torch

from replica_groups.audit.gauntlet.overlap import Contribution

_CHANCE = 0.5
_DEVIATIONS = 8.0
"""Least standard deviations by which the usual agreement exceeds chance. With fewer, nobody is judged."""


def against_others(contributions: Mapping[str, Contribution], least: float | None) -> dict[str, float]:
    """Return the agreements that are below `least`, by replica; none without a limit."""
    if least is None:
        return {}
    return {name: found for name, found in agreements(contributions).items() if found < least}


def agreements(contributions: Mapping[str, Contribution]) -> dict[str, float]:
    """Return how far each contribution agrees with the others: 0 as by chance, 1 as usual, below 0 if against them.

    Two contributions agree in the share of the places that both keep in which their signs are equal. A contribution's
    agreement is the median over the others, and the usual one is the median over all. So fewer than half of the
    replicas cannot change the verdict on the rest, whatever the sizes of their values are. Empty if the round shares
    too few places to tell the usual agreement from chance.
    """
    shares: dict[str, list[float]] = {name: [] for name in contributions}
    places: dict[str, list[int]] = {name: [] for name in contributions}
    for pair in combinations(sorted(contributions), 2):
        equal, shared = _equal_signs(*(contributions[name] for name in pair))
        for name in pair:
            shares[name].append(equal / shared if shared else _CHANCE)
            places[name].append(shared)
    if len(shares) < 3:
        return {}
    found = {name: median_high(own) for name, own in shares.items()}
    usual = median_high(found.values()) - _CHANCE
    # Most pairs may have a hostile replica, so a median over pairs would let few silent ones end the check.
    count = median_high(median_high(own) for own in places.values())
    if usual * math.sqrt(count) < _DEVIATIONS * _CHANCE:  # a share of n places deviates by .5 / sqrt(n)
        return {}
    return {name: (share - _CHANCE) / usual for name, share in found.items()}


def _equal_signs(one: Contribution, other: Contribution) -> tuple[int, int]:
    """Return (number of places with equal signs, number of places) of those that both contributions keep."""
    equal = shared = 0
    for name, mine in one.items():
        theirs = other[name]
        if not len(mine.indices) or not len(theirs.indices):
            continue
        size = int(torch.maximum(mine.indices.max(), theirs.indices.max())) + 1
        signs = torch.zeros(size, dtype=torch.int8, device=mine.indices.device)
        signs.index_copy_(0, mine.indices, mine.values.sign().to(torch.int8))
        products = signs.index_select(0, theirs.indices) * theirs.values.sign().to(torch.int8)
        equal += int((products > 0).sum())
        shared += int((products != 0).sum())
    return equal, shared
