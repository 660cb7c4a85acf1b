"""Power law of the gap between a row and its baseline over several widths of the model.

Gaps are of paired seeds, in percent of the baseline's loss. The law is fitted to their logarithms by least squares over
widths and seeds. Its intervals (95 %, Student's t) are of the mean and assume that the law keeps holding. Predictions
far beyond the trained widths are extrapolations, not measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hetero_pp.research.experiments.claims import known_values
from hetero_pp.research.experiments.definition import Trend
from hetero_pp.research.experiments.outcomes import Outcomes
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.verdict import LEVEL, Interval

Point = tuple[float, float]
"""Width, gap in percent."""


@dataclass(frozen=True)
class PowerLaw:
    """gap = factor * width ^ exponent, with the quantities that intervals need."""

    exponent: float
    intercept: float
    """Logarithm of the gap at a width of 1."""
    error: float
    """Standard deviation of the logarithms of gaps around the law."""
    count: int
    mean: float
    """Mean of the logarithms of widths."""
    squares: float
    """Sum of the squared distances of the logarithms of widths to their mean."""

    def at(self, width: float) -> float:
        """Return the gap at a width, in percent."""
        return math.exp(self.intercept + self.exponent * math.log(width))

    def interval(self, width: float) -> Interval:
        """Return the interval of the mean gap at a width, in percent."""
        distance = (math.log(width) - self.mean) ** 2 / self.squares
        half = self._quantile() * self.error * math.sqrt(1 / self.count + distance)
        return self.at(width) * math.exp(-half), self.at(width) * math.exp(half)

    def exponent_interval(self) -> Interval:
        """Return the interval of the exponent."""
        half = self._quantile() * self.error / math.sqrt(self.squares)
        return self.exponent - half, self.exponent + half

    def _quantile(self) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.count - 2, 1 - LEVEL / 2))


def fit(points: Sequence[Point]) -> PowerLaw | None:
    """Fit the law to the points with a gap above zero; None with fewer than three of them, or at a single width."""
    logs = [(math.log(width), math.log(gap)) for width, gap in points if gap > 0]
    if len(logs) < 3 or len({x for x, _ in logs}) < 2:
        return None
    mean, level = fmean(x for x, _ in logs), fmean(y for _, y in logs)
    squares = sum((x - mean) ** 2 for x, _ in logs)
    exponent = sum((x - mean) * (y - level) for x, y in logs) / squares
    intercept = level - exponent * mean
    rest = sum((y - intercept - exponent * x) ** 2 for x, y in logs)
    return PowerLaw(exponent, intercept, math.sqrt(rest / (len(logs) - 2)), len(logs), mean, squares)


def trend_results(setting: Setting, outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return for each trend, ready for JSON: its points, its law, and the law's predictions at the paper's widths."""
    return [_result(setting, trend, outcomes) for trend in setting.experiment.trends]


def _result(setting: Setting, trend: Trend, outcomes: Outcomes) -> dict[str, Any]:
    values = known_values(outcomes)[trend.of]
    rows = {row.name: row for row in setting.experiment.rows}
    points: list[dict[str, Any]] = []
    for name in trend.rows:
        width = setting.config(rows[name]).model.resolve(setting.scale.vocabulary).width
        own, base = values.get(name, {}), values.get(setting.experiment.baseline_of(rows[name]), {})
        gaps = {str(seed): 100 * (own[seed] / base[seed] - 1) for seed in sorted(own) if seed in base}
        if gaps:
            points.append({"row": name, "width": width, "percent": gaps})
    flat = [(float(point["width"]), gap) for point in points for gap in point["percent"].values()]
    law = fit(flat)
    result = {"name": trend.name, "of": trend.of, "points": points, "left_out": sum(gap <= 0 for _, gap in flat)}
    return result | {
        "exponent": None,
        "paper": trend.paper,
        "law": [],
        **({} if law is None else _of(law, trend, flat)),
    }


def _of(law: PowerLaw, trend: Trend, points: Sequence[Point]) -> Mapping[str, Any]:
    widths = sorted({round(width) for width, _ in points} | set(trend.paper))
    said = [{"width": width, "percent": law.at(width), "interval": law.interval(width)} for width in widths]
    return {"exponent": {"value": law.exponent, "interval": law.exponent_interval()}, "law": said}
