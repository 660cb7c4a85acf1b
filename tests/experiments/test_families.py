"""Claims judged together: p values as in scipy, Holm's levels, slices of the validation rows, and duplicate claims."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from hetero_pp.research.experiments.claims import claim_results
from hetero_pp.research.experiments.definition import Claim, Experiment, Row
from hetero_pp.research.experiments.overview import distinct_claims
from hetero_pp.research.experiments.verdict import Values, holm, interval_of, judge, p_value

BASE = [4.0, 5.0, 6.0]
"""Losses of a row at three seeds. They differ more than the rows do."""


def _values(**differences: list[float]) -> Values:
    """Return losses of rows that exceed the base by these differences."""
    rows = {"base": [0.0, 0.0, 0.0], **differences}
    return {row: {seed: BASE[seed] + given[seed] for seed in range(3)} for row, given in rows.items()}


def _two_sided(differences: list[float], bound: float = 0.0) -> float:
    from scipy.stats import ttest_1samp  # takes half a second

    return float(ttest_1samp(differences, bound).pvalue)


LESS, MORE, NOISY = [0.1, 0.11, 0.13], [0.3, 0.35, 0.31], [0.2, -0.1, 0.05]
VALUES = _values(less=LESS, more=MORE, noisy=NOISY)
BETWEEN = [b - a for a, b in zip(LESS, MORE, strict=True)]
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
    expected = max(_two_sided(one, bound) for one in differences)
    found = p_value(claim, VALUES, {})
    assert found is not None
    assert found == pytest.approx(expected, rel=1e-9)
    assert judge(claim, VALUES, {}, found * 0.98).verdict == "within noise"
    assert judge(claim, VALUES, {}, found * 1.02).verdict != "within noise"


def test_without_spread_a_difference_beyond_its_bound_is_certain_and_one_at_its_bound_is_never() -> None:
    values = {"base": {1: 0.5, 2: 1.5}, "more": {1: 1.5, 2: 2.5}}
    assert p_value(Claim(text="", lower=("base", "more")), values, {}) == 0.0
    assert p_value(Claim(text="", lower=("base", "base")), values, {}) == 1.0


def test_one_seed_has_no_p() -> None:
    assert p_value(Claim(text="", lower=("a", "b")), {"a": {1: 1.0}, "b": {1: 2.0}}, {}) is None
    assert p_value(Claim(text="", lower=("a", "b")), {"a": {1: 1.0}, "b": {2: 2.0}}, {}) is None


def test_levels_are_holms() -> None:
    """The levels are 0.05 / 4, then 0.05 / 3.

    As 0.03 exceeds 0.05 / 2, all further claims get that level, even if they would pass their own.
    """
    assert holm([0.04, 0.001, None, 0.016, 0.03]) == pytest.approx([0.025, 0.0125, None, 0.05 / 3, 0.025])
    assert holm([0.02, 0.04]) == pytest.approx([0.025, 0.05])
    assert holm([]) == []


def _outcome(key: str, loss: float, slices: list[float] | None = None) -> dict[str, Any]:
    own = {} if slices is None else {"slices": {"own": slices, "uncompressed": slices, "compressed": []}}
    return {"key": key, "validation_loss": [loss], "uncompressed": loss, "compressed": None, "diverged": False, **own}


def _experiment(*claims: Claim) -> Experiment:
    return Experiment(name="t", title="t", baseline="a", rows=[Row(name=name) for name in "abc"], claims=list(claims))


def _outcomes(**losses: list[float]) -> dict[str, dict[int, Any]]:
    return {
        row: {seed: _outcome(f"{row}{seed}", loss) for seed, loss in enumerate(given, start=1)}
        for row, given in losses.items()
    }


def test_a_claim_that_is_barely_sure_is_noise_in_a_family() -> None:
    known = _outcomes(a=[1.0, 2.0, 3.0], b=[1.1, 2.14, 3.2], c=[1.3, 2.31, 3.3])
    barely, sure = Claim(text="barely", lower=("a", "b")), Claim(text="sure", lower=("a", "c"))
    [alone] = claim_results(_experiment(barely), known)
    assert alone["verdict"] == alone["family"]["verdict"] == "holds"
    assert alone["interval"] == alone["family"]["interval"]
    first, second, third = claim_results(_experiment(barely, sure, Claim(text="back", lower=("b", "a"))), known)
    assert (first["verdict"], first["family"]["verdict"]) == ("holds", "within noise")
    assert (second["verdict"], second["family"]["verdict"]) == ("holds", "holds")
    assert (third["verdict"], third["family"]["verdict"]) == ("does not hold", "within noise")
    low, high = first["family"]["interval"]
    assert low < 0 < first["interval"][0] < first["interval"][1] < high


def test_slices_are_of_the_mean_over_seeds() -> None:
    slices = {"a": [[1.0, 3.0], [2.0, 4.0]], "b": [[1.2, 3.1], [2.2, 4.3]]}
    known = {
        row: {seed: _outcome(row, 0.5 * sum(own), own) for seed, own in enumerate(by_seed, 1)}
        for row, by_seed in slices.items()
    }
    [claim] = claim_results(_experiment(Claim(text="", lower=("a", "b"))), known)
    assert claim["slices"] == pytest.approx(interval_of([fmean([0.2, 0.2]), fmean([0.1, 0.3])]))
    del known["b"][2]["slices"]
    [claim] = claim_results(_experiment(Claim(text="", lower=("a", "b"))), known)
    assert claim["slices"] is None


def test_what_is_said_twice_of_the_same_rows_counts_once() -> None:
    known = _outcomes(a=[1.0, 2.0], b=[1.1, 2.1])
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
    one = {"claims": claim_results(_experiment(*claims), known)}
    other = {"claims": claim_results(_experiment(*claims[:1]), known)}
    texts = [claim["text"] for claim in distinct_claims({"s/one": one, "s/other": other})]
    assert texts == [claim.text for claim in claims if claim.text != "in other words"]
