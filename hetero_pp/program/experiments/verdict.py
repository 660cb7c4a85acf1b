"""From paired seeds to a verdict: holds, does not hold, or within noise, with the interval shown.

A claim is a quantity that should be positive (or, for equality, small). Its values at the seeds that all its rows
share give a mean and a 95 % interval (Student's t). Rows of one seed share initial weights and data order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from hetero_pp.program.experiments.definition import Claim

ONE_SEED_NOISE = 0.03
"""With one seed, differences below this many nats decide nothing (the spread over seeds that was found)."""

Values = Mapping[str, Mapping[int, float]]
"""row -> seed -> final loss (or bias)"""


@dataclass(frozen=True)
class Verdict:
    """What came of a claim. `interval` is of the difference in nats that the claim is about."""

    text: str
    verdict: str
    interval: tuple[float, float] | None
    seeds: int


def judge(claim: Claim, values: Values, shares: Mapping[str, float]) -> Verdict:
    """The verdict on a claim; `not run` if a row of it has no loss. `shares`: of compressed replicas, by row."""
    seeds = sorted(set.intersection(*(set(values.get(row, {})) for row in claim.rows())))
    if not seeds:
        return Verdict(claim.text, "not run", None, 0)
    if claim.equal is not None:
        return _equality(claim, [_differences(values, claim.equal, seeds)])
    if claim.proportional is not None:
        base, *others = claim.proportional
        to_base = {row: shares[row] / shares[base] for row in others}
        return _equality(claim, [[values[row][s] - to_base[row] * values[base][s] for s in seeds] for row in others])
    if claim.lower is not None:
        return _positive(claim, [_differences(values, claim.lower, seeds)])
    gaps = [_differences(values, pair, seeds) for pair in claim.grows or []]
    growth = [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairwise(gaps)]
    return _positive(claim, growth)


def _differences(values: Values, pair: tuple[str, str], seeds: Sequence[int]) -> list[float]:
    """Second minus first, by seed."""
    return [values[pair[1]][seed] - values[pair[0]][seed] for seed in seeds]


def _positive(claim: Claim, steps: Sequence[Sequence[float]]) -> Verdict:
    """All steps should be positive; the least one decides."""
    intervals = [interval_of(values) for values in steps]
    low, high = min(intervals)
    if all(one[0] > 0 for one in intervals):
        verdict = "holds"
    elif any(one[1] < 0 for one in intervals):
        verdict = "does not hold"
    else:
        verdict = "within noise"
    return Verdict(claim.text, verdict, (low, high), len(steps[0]))


def _equality(claim: Claim, differences: Sequence[Sequence[float]]) -> Verdict:
    """All should be small; the one that is farthest from it is shown."""
    intervals = [interval_of(values) for values in differences]
    if all(-claim.margin < low and high < claim.margin for low, high in intervals):
        verdict = "holds"
    elif any(low > claim.margin or high < -claim.margin for low, high in intervals):
        verdict = "does not hold"
    else:
        verdict = "within noise"
    return Verdict(claim.text, verdict, max(intervals, key=lambda one: abs(sum(one))), len(differences[0]))


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean; with one value, plus or minus what one seed cannot tell."""
    if len(values) == 1:
        return values[0] - ONE_SEED_NOISE, values[0] + ONE_SEED_NOISE
    from scipy.special import stdtrit

    # To three decimals, as printed tables of Student's t have it: intervals in committed results were made with those.
    quantile = round(float(stdtrit(len(values) - 1, 0.975)), 3)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
