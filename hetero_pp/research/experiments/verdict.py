"""Verdict on a claim from paired seeds: holds, does not hold, or within noise, with an interval; one seed decides none.

A claim bounds one quantity or several: a difference should be positive or, for equality, small. Each quantity's values
at the seeds that all rows share give a mean and an interval (Student's t). Rows of one seed share initial weights and
data order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from hetero_pp.research.experiments.definition import SEEDLESS, Claim

LEVEL = 0.05
"""Share of claims about noise that get a verdict by chance."""

Values = Mapping[str, Mapping[int, float]]
"""Final loss (or other measurement) by row and seed."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim: `holds`, `does not hold`, `within noise`, `one seed`, or `not run`."""

    text: str
    verdict: str
    interval: Interval | None
    """Interval of the claim's difference, in nats for losses; None with fewer than two seeds."""
    seeds: int
    difference: float | None = None
    """Mean of the claim's difference over the seeds."""


def judge(claim: Claim, values: Values, shares: Mapping[str, float], level: float = LEVEL) -> Verdict:
    """Return the verdict on a claim; `not run` if one of its rows has no loss.

    `shares`: what the values of a claim of several rows are proportional to, by row (`claims.shares_of`).
    """
    found = quantities(claim, values, shares)
    if not found:
        return Verdict(claim.text, "not run", None, 0)
    seeds = len(found[0])
    intervals = [interval_of(list(one.values()), level) for one in found]
    lowest, highest = _bounds(claim)
    if seeds == 1 and claim.of not in SEEDLESS:
        verdict = "one seed"
    elif all(lowest < low and high < highest for low, high in intervals):
        verdict = "holds"
    elif any(high < lowest or low > highest for low, high in intervals):
        verdict = "does not hold"
    else:
        verdict = "within noise"
    place = _decisive(claim, intervals)
    return Verdict(claim.text, verdict, intervals[place] if seeds > 1 else None, seeds, fmean(found[place].values()))


def p_value(claim: Claim, values: Values, shares: Mapping[str, float]) -> float | None:
    """Return the smallest level at which the claim has a verdict other than `within noise`.

    None with fewer than two seeds. A claim about several quantities holds at the largest of their levels. It fails at
    the smallest level of those beyond their bound.
    """
    found = quantities(claim, values, shares)
    if not found or len(found[0]) < 2:
        return None
    lowest, highest = _bounds(claim)
    within: list[float] = []
    beyond: list[float] = []
    for one in found:
        mean = fmean(one.values())
        slack = min(mean - lowest, highest - mean)
        (within if slack > 0 else beyond).append(_tail(abs(slack), list(one.values())))
    return min(beyond) if beyond else max(within)


def holm(values: Sequence[float | None], level: float = LEVEL) -> list[float | None]:
    """Return the level at which to judge each claim of a family. None stays None.

    The probability of any wrong verdict on noise in the whole family is then at most `level`. Source: Holm 1979. The
    smallest p-value of m is judged at level / m, the next at level / (m - 1), and so on. From the first claim that is
    within noise, all are judged at its level.
    """
    ordered = sorted((value, index) for index, value in enumerate(values) if value is not None)
    levels: list[float | None] = [None] * len(values)
    own, is_over = level, False
    for place, (value, index) in enumerate(ordered):
        if not is_over:
            own = level / (len(ordered) - place)
            is_over = value > own
        levels[index] = own
    return levels


def quantities(claim: Claim, values: Values, shares: Mapping[str, float]) -> list[dict[int, float]]:
    """Return the values that the claim bounds, by seed, at the seeds of all its rows; empty if there are none."""
    seeds = sorted(set.intersection(*(set(values.get(row, {})) for row in claim.rows())))
    if not seeds:
        return []

    def difference(first: str, second: str, share: float = 1.0) -> dict[int, float]:
        return {seed: values[second][seed] - share * values[first][seed] for seed in seeds}

    if (rows := claim.proportional or claim.inverse_root) is not None:
        base, *others = rows
        return [difference(base, row, shares[row] / shares[base]) for row in others]
    if claim.at_least is not None:
        row, bound = claim.at_least
        return [{seed: values[row][seed] - bound for seed in seeds}]
    if claim.grows is not None:
        gaps = [difference(*pair) for pair in claim.grows]
        return [{seed: other[seed] - one[seed] for seed in seeds} for one, other in pairwise(gaps)]
    pair = claim.lower or claim.equal or claim.at_most
    assert pair is not None
    return [difference(*pair)]


def slices_interval(
    claim: Claim, slices: Sequence[Values], values: Values, shares: Mapping[str, float]
) -> Interval | None:
    """Return the interval of the claim's decisive quantity over slices of the validation rows, for the same models.

    It shows the uncertainty due to the choice of validation rows. None without two slices of each row and seed.
    """
    found = quantities(claim, values, shares)
    parts = [quantities(claim, one, shares) for one in slices]
    if not found or len(parts) < 2 or any(len(part) != len(found) or set(part[0]) != set(found[0]) for part in parts):
        return None
    place = _decisive(claim, [interval_of(list(one.values())) for one in found])
    return interval_of([fmean(part[place].values()) for part in parts])


def _bounds(claim: Claim) -> Interval:
    """Return the bounds of each of the claim's quantities."""
    if claim.at_most is not None:
        return -claim.margin, math.inf
    is_about_size = any(kind is not None for kind in (claim.equal, claim.proportional, claim.inverse_root))
    return (-claim.margin, claim.margin) if is_about_size else (0.0, math.inf)


def _decisive(claim: Claim, intervals: Sequence[Interval]) -> int:
    """Return the index of the interval that is nearest to a bound, or farthest beyond one."""
    lowest, highest = _bounds(claim)
    slack = [min(low - lowest, highest - high) for low, high in intervals]
    return slack.index(min(slack))


def interval_of(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the interval of the mean (95 % by default); one value is both ends."""
    if len(values) == 1:
        return values[0], values[0]
    from scipy.special import stdtrit

    # Rounded to three decimals as in printed tables of Student's t, because committed results were made with those.
    quantile = round(float(stdtrit(len(values) - 1, 1 - level / 2)), 3)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _tail(distance: float, values: Sequence[float]) -> float:
    """Return the two-sided probability that noise alone moves the mean that far."""
    from scipy.special import stdtr

    error = stdev(values) / math.sqrt(len(values))
    return float(distance == 0) if error == 0 else float(2 * stdtr(len(values) - 1, -distance / error))
