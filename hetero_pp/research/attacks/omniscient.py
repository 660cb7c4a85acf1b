"""Attacks of the literature that know what all honest replicas contribute."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from hetero_pp.research.attacks.attack import Known

_LEAST_DEVIATIONS = 1.5
"""Standard deviations of ALIE where the formula of its paper gives fewer: it gives 0 for 2 hostile of 8."""

_REVERSED = 4.0
"""Epsilon of the inner-product manipulation. Above n / m = 3 the mean of n = 6 and m = 2 points backwards."""

_HALVINGS = 12


def deviations(replicas: int, hostile: int) -> float:
    """Return z of ALIE: as many honest values as a majority needs are farther from the mean (its algorithm 3)."""
    honest = replicas - hostile
    supporters = replicas // 2 + 1 - hostile
    return NormalDist().inv_cdf(min(max((honest - supporters) / honest, 1e-6), 1 - 1e-6))


def alie(known: Known) -> Tensor:
    """A little is enough: the honest mean less z standard deviations (Baruch et al. 2019, arXiv:1902.06156)."""
    z = max(deviations(len(known.honest) + len(known.fellows), len(known.fellows)), _LEAST_DEVIATIONS)
    return known.honest.mean(0) - z * known.honest.std(0, correction=0)


def min_max(known: Known) -> Tensor:
    """Go as far from the honest mean as two honest replicas are from each other (Shejwalkar and Houmansadr 2021).

    The direction is that of the negative standard deviations. The largest step is found by halving, on what the format
    keeps.
    """
    mean, direction = known.honest.mean(0), -known.honest.std(0, correction=0)
    farthest = torch.cdist(known.honest, known.honest).max()

    def sent(step: float) -> Tensor:
        return known.kept(mean + step * direction)

    low, high = 0.0, 64.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_inside = (known.honest - sent(middle)).norm(dim=1).max() <= farthest
        low, high = (middle, high) if is_inside else (low, middle)
    return sent(low)


def inner_product(known: Known) -> Tensor:
    """Contribute -epsilon times the honest mean, so that the mean of all points backwards (Xie et al. 2020)."""
    return -_REVERSED * known.honest.mean(0)
