"""Verdicts, families of claims, slices, claims about time and outer gradients, and laws over widths, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED, student_interval

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.simulate import Outputs, simulate
from hetero_pp.research.experiments.claims import (
    claim_results,
    deployments_of,
    fit,
    holm,
    hours_until,
    interval_of,
    judge,
    loss_at,
    p_value,
    predicted_hours,
)
from hetero_pp.research.experiments.definition import Claim, ClockSettings, Experiment, Row, Trend
from hetero_pp.research.experiments.pages import distinct_claims, markdown
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.result import result_of
from hetero_pp.research.experiments.rows import Setting

Known = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]

# ---- one claim ----


def _losses(**rows: Sequence[float]) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(values)) for name, values in rows.items()}


@pytest.mark.parametrize("count", [2, 11, 100])
def test_intervals_are_those_of_scipy(count: int) -> None:
    values = [float((7 * index) % 11) for index in range(count)]
    assert interval_of(values) == pytest.approx(student_interval(values), abs=2e-3)


LOWER, SHARES = ("a", "b"), {"a": 1.0, "b": 0.5, "c": 0.25}
PROPORTIONAL = {"of": "bias", "proportional": ["a", "b", "c"]}
GROWS = {"grows": [("zero", "a"), ("zero", "b"), ("zero", "c")]}
MARGIN = {"a": [2.3, 2.29, 2.31], "b": [2.0, 2.0, 2.0]}
JUDGED: dict[str, tuple[dict[str, Any], dict[str, list[float]], str]] = {
    "lower": ({"lower": LOWER}, {"a": [4.0, 4.1, 4.2], "b": [4.2, 4.3, 4.4]}, "holds"),
    "lower, the other way": ({"lower": LOWER}, {"a": [4.2, 4.3, 4.4], "b": [4.0, 4.1, 4.2]}, "does not hold"),
    "lower, or not": ({"lower": LOWER}, {"a": [4.0, 4.1, 4.2], "b": [4.1, 4.0, 4.3]}, "within noise"),
    "pairs of seeds count, not their spread": (
        {"lower": LOWER},
        {"a": [1.0, 2.0, 3.0], "b": [1.01, 2.011, 3.01]},
        "holds",
    ),
    "one seed": ({"lower": LOWER}, {"a": [4.0], "b": [5.0]}, "one seed"),
    "no row": ({"lower": LOWER}, {"a": [4.0]}, "not run"),
    "at most, within": ({"at_most": LOWER, "margin": 0.5}, MARGIN, "holds"),
    "at most, at the margin": ({"at_most": LOWER, "margin": 0.3}, MARGIN, "within noise"),
    "at most, beyond": ({"at_most": LOWER, "margin": 0.1}, MARGIN, "does not hold"),
    "at most has a margin on one side": ({"at_most": ("b", "a"), "margin": 0.1}, MARGIN, "holds"),
    "grows": (GROWS, {"zero": [4, 4.1], "a": [4.1, 4.2], "b": [4.3, 4.4], "c": [4.6, 4.7]}, "holds"),
    "falls": (GROWS, {"zero": [4, 4.1], "a": [4.1, 4.2], "b": [4.6, 4.7], "c": [4.3, 4.4]}, "does not hold"),
    "as its share": (PROPORTIONAL, {"a": [0.4, 0.42], "b": [0.2, 0.21], "c": [0.1, 0.105]}, "holds"),
    "as large as all": (PROPORTIONAL, {"a": [0.4, 0.42], "b": [0.39, 0.41], "c": [0.1, 0.105]}, "does not hold"),
    "one of them is not": (PROPORTIONAL, {"a": [0.4, 0.42], "b": [0.2, 0.21], "c": [0.19, 0.2]}, "does not hold"),
    "not known": (PROPORTIONAL, {"a": [0.4, 0.42], "b": [0.1, 0.3], "c": [0.1, 0.105]}, "within noise"),
}


@pytest.mark.parametrize(("stated", "losses", "verdict"), JUDGED.values(), ids=JUDGED)
def test_verdicts(stated: dict[str, Any], losses: dict[str, list[float]], verdict: str) -> None:
    assert judge(Claim(text="", **stated), _losses(**losses), SHARES).verdict == verdict


EQUALITIES = {
    "equal at every seed": ([0.001, -0.001, 0.0], "holds"),
    "equal in the mean, by chance": ([-0.2, 0.2, 0.0], "within noise"),
    "the mean is within the margin, its interval is not": ([0.02, 0.028, 0.024], "within noise"),
    "the mean is beyond the margin, its interval is not": ([0.04, 0.1, 0.07], "within noise"),
    "beyond the margin": ([0.2, 0.21, 0.22], "does not hold"),
    "as far below": ([-0.2, -0.21, -0.22], "does not hold"),
    "one seed, much more than the margin": ([-0.07], "one seed"),
}


@pytest.mark.parametrize(("differences", "verdict"), EQUALITIES.values(), ids=EQUALITIES)
def test_equality_is_judged_with_its_interval(differences: list[float], verdict: str) -> None:
    """Seeds differ far more than the rows do, and are in another order. The margin is 0.03."""
    a = {seed: 4.0 + seed for seed in range(len(differences))}
    b = {seed: a[seed] + differences[seed] for seed in reversed(range(len(differences)))}
    found = judge(Claim(text="same", equal=LOWER), {"a": a | {99: 1.0}, "b": {98: 7.0} | b}, {})
    assert (found.verdict, found.seeds) == (verdict, len(differences))
    assert found.difference == pytest.approx(sum(differences) / len(differences))
    assert found.interval == (pytest.approx(student_interval(differences), abs=1e-3) if len(differences) > 1 else None)


# ---- several claims of a table ----

LESS, MORE, NOISY = [0.1, 0.11, 0.13], [0.3, 0.35, 0.31], [0.2, -0.1, 0.05]
BETWEEN = [b - a for a, b in zip(LESS, MORE, strict=True)]
BASES = [4.0, 5.0, 6.0]
VALUES = _losses(
    base=BASES,
    **{
        name: [base + more for base, more in zip(BASES, differences, strict=True)]
        for name, differences in (("less", LESS), ("more", MORE), ("noisy", NOISY))
    },
)
P_VALUES: dict[str, tuple[Claim, list[list[float]], float]] = {
    "lower": (Claim(text="", lower=("base", "noisy")), [NOISY], 0.0),
    "lower, the other way": (Claim(text="", lower=("noisy", "base")), [NOISY], 0.0),
    "equal, within": (Claim(text="", equal=("base", "noisy"), margin=0.06), [NOISY], 0.06),
    "equal, beyond": (Claim(text="", equal=("base", "less"), margin=0.06), [LESS], 0.06),
    "grows: as sure as the least sure": (
        Claim(text="", grows=[("base", "base"), ("base", "less"), ("base", "more")]),
        [LESS, BETWEEN],
        0.0,
    ),
    "grows: one step down": (
        Claim(text="", grows=[("base", "base"), ("base", "more"), ("base", "less")]),
        [BETWEEN],
        0.0,
    ),
}
"""Claims, the differences that decide them, and the bound that a t test compares these with."""


@pytest.mark.parametrize(("claim", "differences", "bound"), P_VALUES.values(), ids=P_VALUES)
def test_p_is_that_of_a_t_test_and_the_level_at_which_there_is_a_verdict(
    claim: Claim, differences: list[list[float]], bound: float
) -> None:
    from scipy.stats import ttest_1samp  # takes half a second

    found = p_value(claim, VALUES, {})
    assert found is not None
    assert found == pytest.approx(max(float(ttest_1samp(one, bound).pvalue) for one in differences), rel=1e-9)
    assert judge(claim, VALUES, {}, found * 0.98).verdict == "within noise"
    assert judge(claim, VALUES, {}, found * 1.02).verdict != "within noise"


def test_levels_are_holms() -> None:
    """The levels are 0.05 / 4, then 0.05 / 3.

    As 0.03 exceeds 0.05 / 2, all further claims get that level, even if they would pass their own.
    """
    assert holm([0.04, 0.001, None, 0.016, 0.03]) == pytest.approx([0.025, 0.0125, None, 0.05 / 3, 0.025])
    assert holm([0.02, 0.04]) == pytest.approx([0.025, 0.05])
    assert holm([]) == []


def _table(*claims: Claim) -> Experiment:
    return Experiment(name="t", title="t", baseline="a", rows=[Row(name=name) for name in "abc"], claims=list(claims))


def test_a_claim_that_is_barely_sure_is_noise_in_a_family(known: Known) -> None:
    losses = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.14, 3.2], "c": [1.3, 2.31, 3.3]}
    outcomes = {
        row: {seed: known(loss, key=f"{row}{seed}") for seed, loss in enumerate(given)} for row, given in losses.items()
    }
    barely, sure = Claim(text="barely", lower=("a", "b")), Claim(text="sure", lower=("a", "c"))
    [alone] = claim_results(_table(barely), outcomes)
    assert alone["verdict"] == alone["family"]["verdict"] == "holds"
    assert alone["interval"] == alone["family"]["interval"]
    first, second, third = claim_results(_table(barely, sure, Claim(text="back", lower=("b", "a"))), outcomes)
    assert (first["verdict"], first["family"]["verdict"]) == ("holds", "within noise")
    assert (second["verdict"], second["family"]["verdict"]) == ("holds", "holds")
    assert (third["verdict"], third["family"]["verdict"]) == ("does not hold", "within noise")
    low, high = first["family"]["interval"]
    assert low < 0 < first["interval"][0] < first["interval"][1] < high


def test_what_is_said_twice_of_the_same_rows_counts_once(known: Known) -> None:
    outcomes = {row: {seed: known(seed + 0.1, key=f"{row}{seed}") for seed in (1, 2)} for row in "ab"}
    claims = [
        Claim(text="it costs", lower=("a", "b")),
        Claim(text="in other words", lower=("a", "b")),
        Claim(text="the other way", lower=("b", "a")),
        Claim(text="another forward", of="uncompressed", lower=("a", "b")),
        Claim(text="equal", equal=("a", "b")),
        Claim(text="equal with a margin", equal=("a", "b"), margin=0.2),
        Claim(text="not trained", lower=("a", "c")),
        Claim(text="not trained either", lower=("a", "c")),
    ]
    one = {"claims": claim_results(_table(*claims), outcomes)}
    other = {"claims": claim_results(_table(*claims[:1]), outcomes)}
    texts = [claim["text"] for claim in distinct_claims({"s/one": one, "s/other": other})]
    assert texts == [claim.text for claim in claims if claim.text != "in other words"]


# ---- claims about time and outer gradients ----

DEPLOYED = ClockSettings(
    run=str(ROOT / "configs" / "paper" / "het_pp_figure3.yaml"), cells={"simulate.machine": "h100"}
)


def _timed(*claims: Claim) -> Experiment:
    rows = [Row(name=name, timed=timed) for name, timed in (("slow", "SparseLoCo 10B, loss 2.73"), ("fast", "fast"))]
    return Experiment(name="t", title="t", baseline="slow", clock=DEPLOYED, rows=rows, claims=list(claims))


def test_hours_are_those_that_simulate_predicts(tmp_path: Path) -> None:
    """Both rows have the deployment's tokens and rounds, so the hours of a compressed one are those of its links."""
    shipped = SHIPPED.experiment("het-pp/figure3")
    [(at, hours)] = predicted_hours(shipped).items()
    assert at == ""
    simulate(Path(DEPLOYED.run), [], None, "simulate.machine=rtx-4090", Outputs(json=tmp_path / "found.json"))
    points = json.loads((tmp_path / "found.json").read_text())["curves"]["rtx-4090"]
    predicted = {point["value"]: 24 * point["days"] for point in points}
    assert hours == {row.name: pytest.approx(predicted[row.timed]) for row in shipped.rows if row.timed}
    assert hours["PP-Compress"] < 0.5 * hours["SparseLoCo"]
    with pytest.raises(ConfigError, match=r"found `fast`, expected a row of `simulate.rows` in .*figure3.yaml: Sparse"):
        deployments_of(_timed())


@pytest.mark.parametrize(("share", "loss"), [(0.0, 9.0), (0.34, 9.0), (0.5, 8.0), (0.999, 7.0), (1.0, 6.0), (2.5, 6.0)])
def test_a_loss_at_a_time_is_that_of_the_last_complete_round(share: float, loss: float) -> None:
    assert loss_at([9.0, 8.0, 7.0, 6.0], share) == loss


def test_claims_about_time(known: Known) -> None:
    outcomes = {
        "slow": {
            seed: known(1.0, key=f"slow{seed}", validation_loss=[9.0 + seed / 100, 5.0, 2.0, 1.0]) for seed in (1, 2)
        },
        "fast": {seed: known(3.0, key=f"fast{seed}", validation_loss=[4.0, 3.0 + seed / 100]) for seed in (1, 2)},
    }
    by, end = Claim(text="", by="fast", lower=("fast", "slow")), Claim(text="", lower=("fast", "slow"))
    sooner = Claim(text="", of="hours", lower=("fast", "slow"))
    found = claim_results(_timed(by, end, sooner), outcomes, {"": {"slow": 12.0, "fast": 4.0}})
    assert [claim["difference"] for claim in found] == pytest.approx([6.0, 1.0 - 3.015, 8.0])
    assert [claim["verdict"] for claim in found] == ["holds", "does not hold", "holds"]
    assert [claim["p"] is None for claim in found] == [False, False, True]  # predictions are in no family
    assert found[0]["about"] != found[1]["about"]
    [unpredicted] = claim_results(_timed(sooner), outcomes)
    assert unpredicted["verdict"] == "not run"


def test_a_claim_about_time_is_about_its_own_deployment(known: Known) -> None:
    """On the slow line `fast` ends when `slow` has its second round of four; on the quick line both end at once."""
    table = _timed()
    clock = DEPLOYED.model_copy(update={"at": {"slow line": {}, "quick line": {}}})
    claims = [Claim(text="", by="fast", lower=("fast", "slow"), at=at) for at in clock.at]
    table = Experiment.model_validate(table.model_dump() | {"clock": clock, "claims": claims})
    outcomes = {
        "slow": {seed: known(1.0, key=f"slow{seed}", validation_loss=[9.0, 5.0 + seed, 2.0, 1.0]) for seed in (1, 2)},
        "fast": {seed: known(3.0, key=f"fast{seed}", validation_loss=[4.0, 3.0]) for seed in (1, 2)},
    }
    hours = {"slow line": {"slow": 12.0, "fast": 6.0}, "quick line": {"slow": 3.0, "fast": 3.0}}
    found = claim_results(table, outcomes, hours)
    assert [claim["difference"] for claim in found] == pytest.approx([6.5 - 3.0, 1.0 - 3.0])
    assert found[0]["about"] != found[1]["about"]
    claims[0] = claims[0].model_copy(update={"at": "no line"})
    with pytest.raises(ValueError, match=r"found `at: no line` .* expected one of \['slow line', 'quick line'\]"):
        Experiment.model_validate(table.model_dump() | {"claims": claims})


@pytest.mark.parametrize(("loss", "hours"), [(9.5, 2.0), (9.0, 2.0), (8.0, 3.0), (5.5, 5.0), (4.0, 6.0), (3.9, None)])
def test_hours_until_a_loss_are_interpolated_between_rounds_of_the_mean_curve(
    loss: float, hours: float | None, known: Known
) -> None:
    curves = {1: [10.0, 6.0, 4.0, 4.5], 2: [8.0, 8.0, 4.0, 4.5]}  # the mean is 9, 7, 4, 4.5, a round in two hours
    seeds = {seed: known(4.5, validation_loss=losses) for seed, losses in curves.items()}
    seeds[3] = known(1.0, diverged=True)
    assert hours_until(loss, seeds, 8.0) == (None if hours is None else pytest.approx(hours))
    assert hours_until(loss, {}, 8.0) is None


def _gradients(norm: float, cosine: float) -> list[tuple[int, float, float, float, float]]:
    """Return measurements of 22 rounds; the last two are no part of cosines, which are of the first 20."""
    return [(round_, norm, norm / 2, cosine if round_ <= 20 else -1.0, cosine / 2) for round_ in range(1, 23)]


def test_claims_about_outer_gradients(known: Known) -> None:
    counts, lengths = {"one": 1, "four": 4, "sixteen": 16}, {"one": 2.0, "four": 1.1, "sixteen": 0.5}
    outcomes: dict[str, dict[int, Any]] = {
        row: {
            seed: known(4.0, key=f"{row}{seed}", outer_gradients=_gradients(length + 0.01 * seed, 0.8))
            for seed in (1, 2, 3)
        }
        for row, length in lengths.items()
    }
    claims = [
        Claim(text="falls", of="norm", inverse_root=list(counts), margin=0.15),
        Claim(text="no more than that", of="norm", inverse_root=list(counts), margin=0.05),
        Claim(text="follows", of="momentum", at_least=("four", 0.75)),
        Claim(text="follows more", of="momentum", at_least=("four", 0.9)),
        Claim(text="what is kept follows", of="kept_momentum", at_least=("four", 0.75)),
    ]
    rows = [Row(name=name, replicas=count) for name, count in counts.items()]
    experiment = Experiment(name="t", title="", paper="6.2", baseline="one", outer_every=1, rows=rows, claims=claims)
    result = result_of(Setting(SHIPPED.scale("micro"), experiment), None, outcomes)
    verdicts = [claim["verdict"] for claim in result["claims"]]
    assert verdicts == ["holds", "does not hold", "holds", "does not hold", "does not hold"]
    assert result["claims"][0]["difference"] == pytest.approx(1.12 - 2.02 / 2)
    assert result["claims"][2]["difference"] == pytest.approx(0.05)
    assert len({claim["about"] for claim in result["claims"]}) == 5
    text = "\n".join(markdown(result))
    assert "| norm | uncorrelated | momentum | kept momentum | state |" in text
    assert "| 1.120 | 0.560 | 0.800 | 0.400 | done |" in text
    assert "| follows | momentum | **holds** | +0.050 to +0.050 | 3 |" in text


# ---- laws over the width of the model ----

POINTS = [(64.0, 9.1), (64.0, 8.8), (128.0, 7.2), (128.0, 7.9), (192.0, 6.9), (256.0, 5.1)]


def test_the_law_is_a_regression_of_logarithms() -> None:
    law, (widths, gaps) = fit(POINTS), np.log(np.array(POINTS)).T
    slope, level = np.polyfit(widths - widths.mean(), gaps, 1)
    assert law is not None
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


def test_gaps_are_to_the_baseline_of_the_same_width_and_seed(known: Known, tmp_path: Path) -> None:
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
    trend = Trend(name="half", rows=["64, half", "128, half"], paper={1024: 1.6})
    experiment = Experiment(name="t", title="t", baseline="64, none", rows=rows, trends=[trend])
    setting = Setting(SHIPPED.scale("ladder"), experiment)
    losses = {
        "64, none": {1: 4.0, 2: 5.0},
        "64, half": {1: 4.2, 2: 5.2, 3: 9.0},
        "128, none": {1: 3.0, 2: 4.0},
        "128, half": {1: 3.06, 2: 3.9},
    }
    outcomes = {row: {seed: known(loss, key=str(loss)) for seed, loss in own.items()} for row, own in losses.items()}
    result = result_of(setting, None, outcomes)
    [found] = result["trends"]
    assert [(point["width"], point["row"]) for point in found["points"]] == [(64, "64, half"), (128, "128, half")]
    assert found["points"][0]["percent"] == pytest.approx({"1": 5.0, "2": 4.0})
    assert found["points"][1]["percent"] == pytest.approx({"1": 2.0, "2": -2.5})
    assert found["left_out"] == 1
    assert [one["width"] for one in found["law"]] == [64, 128, 1024]
    lines = [line for line in markdown(result) if line.startswith("|")]
    assert any(line.startswith("| half: width to the power of -1.") and "| 64 | +4.5 |" in line for line in lines)
    assert any(line.startswith("|  |  | 1024 |  |") and line.endswith("| +1.6 |") for line in lines)
    assert any("1 without a gap are left out" in line for line in lines)
    draw(result, outcomes, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    untrained = result_of(setting, None, {})
    assert (untrained["trends"][0]["points"], untrained["trends"][0]["exponent"]) == ([], None)
    assert "| half | own | 1024 |  |  |  | +1.6 |" in list(markdown(untrained))
    draw(untrained, {}, tmp_path / "a.png")
