"""Power law of the gap between a row and its baseline over several widths of the model.

Gaps are of paired seeds, in percent of the baseline's loss. The law is fitted to their logarithms by least squares over
widths and seeds. Its intervals (95 %, Student's t) are of the mean and assume that the law keeps holding. Predictions
far beyond the trained widths are extrapolations, not measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetero_pp.research.experiments.claims import known_values
from hetero_pp.research.experiments.definition import Trend
from hetero_pp.research.experiments.outcomes import Outcomes
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.verdict import LEVEL, Interval

Point = tuple[float, float]
"""Width, gap in percent."""


class PowerLaw:
    """gap = factor * width ^ exponent, for gaps in percent."""

    def __init__(self, logs: Sequence[Point]) -> None:
        """Fit the law to the logarithms of widths and gaps."""
        from scipy.special import stdtrit

        self._widths, self._gaps = np.array(logs).T
        self._quantile = stdtrit(len(logs) - 2, 1 - LEVEL / 2)
        line = self._line(1.0)
        self.exponent = float(line.slope)
        self.exponent_interval = self._around(line.slope, line.stderr)

    def at(self, width: float) -> float:
        """Return the gap at a width."""
        return math.exp(self._line(width).intercept)

    def interval(self, width: float) -> Interval:
        """Return the interval of the mean gap at a width."""
        line = self._line(width)
        low, high = self._around(line.intercept, line.intercept_stderr)
        return math.exp(low), math.exp(high)

    def _line(self, width: float) -> Any:
        """Return the regression of the logarithms, with its intercept at a width."""
        from scipy.stats import linregress

        return linregress(self._widths - math.log(width), self._gaps)

    def _around(self, mean: float, error: float) -> Interval:
        return float(mean - self._quantile * error), float(mean + self._quantile * error)


def fit(points: Sequence[Point]) -> PowerLaw | None:
    """Fit the law to the points with a gap above zero; None with fewer than three of them, or at a single width."""
    logs = [(math.log(width), math.log(gap)) for width, gap in points if gap > 0]
    return PowerLaw(logs) if len(logs) > 2 and len({x for x, _ in logs}) > 1 else None


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
    return {"exponent": {"value": law.exponent, "interval": law.exponent_interval}, "law": said}
