"""Gaps by width of the model: the fitted law and its intervals, compared with the closed formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import Experiment, Row, Trend
from hetero_pp.research.experiments.markdown import markdown
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.report import result_of
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.trends import PowerLaw, fit

POINTS = [(64.0, 9.1), (64.0, 8.8), (128.0, 7.2), (128.0, 7.9), (192.0, 6.9), (256.0, 5.1)]


def _law(points: list[tuple[float, float]]) -> PowerLaw:
    found = fit(points)
    assert found is not None
    return found


def test_the_law_is_a_regression_of_logarithms() -> None:
    law, (widths, gaps) = _law(POINTS), np.log(np.array(POINTS)).T
    slope, level = np.polyfit(widths - widths.mean(), gaps, 1)
    assert law.exponent == pytest.approx(slope)
    assert law.at(64) == pytest.approx(math.exp(level + slope * (math.log(64) - widths.mean())))
    squares = ((widths - widths.mean()) ** 2).sum()
    rest = gaps - level - slope * (widths - widths.mean())
    from scipy.stats import t as students_t  # takes half a second

    error = students_t.ppf(0.975, len(POINTS) - 2) * math.sqrt(rest @ rest / (len(POINTS) - 2))
    half = error / math.sqrt(squares)
    assert law.exponent_interval == pytest.approx((slope - half, slope + half))
    for width in (1, 96, 512):
        half = error * math.sqrt(1 / len(POINTS) + (math.log(width) - widths.mean()) ** 2 / squares)
        assert law.interval(width) == pytest.approx((law.at(width) * math.exp(-half), law.at(width) * math.exp(half)))


def test_the_interval_is_narrowest_where_it_was_measured() -> None:
    law = _law(POINTS)
    widths = [math.log(high / low) for low, high in (law.interval(width) for width in (32, 64, 120, 512, 2048))]
    assert min(widths) == widths[2]
    assert widths[0] > widths[1] > widths[2] < widths[3] < widths[4]


def test_an_exact_law_is_found() -> None:
    law = _law([(width, 3.0 * width**-0.5) for width in (64.0, 128.0, 256.0)])
    assert law.exponent == pytest.approx(-0.5)
    assert law.interval(1024) == pytest.approx((3 / 32, 3 / 32))


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(64.0, 1.0), (128.0, 2.0)],
        [(64.0, 1.0), (64.0, 2.0), (64.0, 3.0)],
        [(64.0, 1.0), (128.0, -2.0), (256.0, 3.0)],
    ],
)
def test_too_few_points_have_no_law(points: list[tuple[float, float]]) -> None:
    assert fit(points) is None


TREND = Trend(name="half", rows=["64, half", "128, half"], paper={1024: 1.6})


def _ladder(trend: Trend) -> Setting:
    rows = [
        Row(
            name=f"{width}, {kind}",
            size=width,
            compressed=kind,
            rank="full" if kind == "none" else 8,
            baseline=f"{width}, none",
        )
        for width in ("64", "128")
        for kind in ("none", "half")
    ]
    experiment = Experiment(name="t", title="t", baseline="64, none", rows=rows, trends=[trend])
    return Setting(SHIPPED.scale("ladder"), experiment)


def _outcome(loss: float) -> dict[str, Any]:
    losses = {"validation_loss": [loss + 1, loss], "uncompressed": loss, "compressed": loss, "diverged": False}
    return {**losses, "key": str(loss), "tokens": 10, "boundary_bytes_per_token": 16.0, "seconds": 1.0}


def _outcomes(losses: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, Any]]:
    return {row: {seed: _outcome(loss) for seed, loss in seeds.items()} for row, seeds in losses.items()}


KNOWN = {
    "64, none": {1: 4.0, 2: 5.0},
    "64, half": {1: 4.2, 2: 5.2, 3: 9.0},
    "128, none": {1: 3.0, 2: 4.0},
    "128, half": {1: 3.06, 2: 3.9},
}


def test_gaps_are_to_the_baseline_of_the_same_width_and_seed(tmp_path: Path) -> None:
    result = result_of(_ladder(TREND), None, _outcomes(KNOWN))
    [trend] = result["trends"]
    assert [(point["width"], point["row"]) for point in trend["points"]] == [(64, "64, half"), (128, "128, half")]
    assert trend["points"][0]["percent"] == pytest.approx({"1": 5.0, "2": 4.0})
    assert trend["points"][1]["percent"] == pytest.approx({"1": 2.0, "2": -2.5})
    assert trend["left_out"] == 1
    assert [one["width"] for one in trend["law"]] == [64, 128, 1024]
    lines = [line for line in markdown(result) if line.startswith("|")]
    assert any(line.startswith("| half: width to the power of -1.") and "| 64 | +4.5 |" in line for line in lines)
    assert any(line.startswith("|  |  | 1024 |  |") and line.endswith("| +1.6 |") for line in lines)
    assert any("1 without a gap are left out" in line for line in lines)
    draw(result, _outcomes(KNOWN), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_ladder_of_which_nothing_was_trained_has_a_table(tmp_path: Path) -> None:
    result = result_of(_ladder(TREND), None, {})
    assert (result["trends"][0]["points"], result["trends"][0]["exponent"]) == ([], None)
    assert "| half | own | 1024 |  |  |  | +1.6 |" in list(markdown(result))
    draw(result, {}, tmp_path / "a.png")


def test_a_size_that_the_scale_does_not_have_is_told() -> None:
    row = Row(name="a", size="65")
    setting = Setting(SHIPPED.scale("ladder"), Experiment(name="t", title="t", baseline="a", rows=[row]))
    with pytest.raises(ConfigError, match="found `65`, expected one of ladder's: 64, 128, 192, 256"):
        setting.config(row)


def test_a_trend_of_a_row_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="found no row `b`, expected one of `a`"):
        Experiment(name="t", title="t", baseline="a", rows=[Row(name="a")], trends=[Trend(name="t", rows=["a", "b"])])


def test_the_ladder_has_tokens_in_proportion_to_parameters() -> None:
    setting = Setting(SHIPPED.scale("ladder"), SHIPPED.experiment("beyond/ladder"))
    ratios = []
    for row in setting.experiment.rows:
        config = setting.config(row)
        shape = config.model.resolve(setting.scale.vocabulary)
        width, hidden = shape.width, shape.feed_forward
        count = 2 * shape.vocabulary * width + shape.layers * (4 * width**2 + 3 * width * hidden)
        ratios.append(config.outer.rounds * 10 * 4 * 4 * 128 / count)
        if row.bits is not None:
            assert isinstance(row.rank, int)
            assert 4 * row.rank + 8 == 16 * (width // 8)  # as many bits as an eighth of the dimensions in bf16
    assert max(ratios) / min(ratios) < 1.02
