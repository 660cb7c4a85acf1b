"""Tables from known losses: baselines other than the first row, and seeds that not every row has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from catalogs import SHIPPED, student_interval
from matplotlib.figure import Figure
from rich.console import Console

from hetero_pp.research.experiments import command
from hetero_pp.research.experiments.claims import times_tokens
from hetero_pp.research.experiments.command import RESULTS
from hetero_pp.research.experiments.definition import FORWARDS, Claim, Experiment, Row
from hetero_pp.research.experiments.outcomes import ROWS, add_outcome
from hetero_pp.research.experiments.pages import markdown, number
from hetero_pp.research.experiments.result import result_of, write_result
from hetero_pp.research.experiments.rows import Setting

MICRO = SHIPPED.scale("micro")

LOSSES: dict[str, dict[int, float]] = {
    "few": {9: 9.0, 2: 3.3, 1: 2.5},
    "base": {5: 4.0, 1: 2.0, 2: 3.0},
    "all": {2: 3.3, 5: 4.8, 1: 2.1},
    "alone": {7: 3.0},
}
"""Last loss by row and seed, in the order of training. Means of rows say the opposite of pairs of seeds."""

Outcomes = dict[str, dict[int, dict[str, Any]]]


def _outcome(seed: int, loss: float, diverged: bool = False, **more: Any) -> dict[str, Any]:
    """Return an outcome whose loss rose at the end, and whose two other forwards lose 1 and 2 more."""
    return {
        "key": "",
        "seed": seed,
        "validation_loss": [loss + 3, loss - 1, loss],
        "uncompressed": None if diverged else loss + 1,
        "compressed": None if diverged else loss + 2,
        "tokens": 10,
        "boundary_bytes_per_token": 16.0,
        "diverged": diverged,
        "seconds": 1.0,
        **more,
    }


@pytest.fixture
def outcomes() -> Outcomes:
    known = {row: {seed: _outcome(seed, loss) for seed, loss in seeds.items()} for row, seeds in LOSSES.items()}
    known["few"][3] = _outcome(3, 50.0, diverged=True)
    return known


def _experiment(*claims: Claim) -> Experiment:
    return Experiment(
        name="toy/seeds",
        title="Toy",
        paper="nowhere",
        baseline="base",
        bias_every=5 if any(claim.of == "bias" for claim in claims) else None,
        rows=[
            Row(name="few", compressed="all", rank=4, paper=3.0),
            Row(name="base", paper=2.0),
            Row(name="all", compressed="all", rank=16, paper=2.2),
            Row(name="alone"),
        ],
        claims=list(claims),
    )


def _result(outcomes: Outcomes, *claims: Claim) -> dict[str, Any]:
    return result_of(Setting(MICRO, _experiment(*claims)), None, outcomes)


def _rows(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


# ---- the result of a row ----


def test_a_loss_is_the_last_one_at_every_seed_that_did_not_diverge(outcomes: Outcomes) -> None:
    for name, row in _rows(_result(outcomes)).items():
        expected = LOSSES[name]
        assert row["ours"]["seeds"] == {str(seed): loss for seed, loss in expected.items()}
        assert row["ours"]["mean"] == pytest.approx(fmean(expected.values()))
        spread = stdev(expected.values()) if len(expected) > 1 else None
        assert row["ours"]["spread"] == (None if spread is None else pytest.approx(spread))
        assert row["uncompressed"] == pytest.approx(fmean(expected.values()) + 1)
        assert row["compressed"] == pytest.approx(fmean(expected.values()) + 2)


def test_percentages_are_paired_with_the_declared_baseline_by_seed(outcomes: Outcomes) -> None:
    """By hand: few at seeds 1 and 2 (+25 %, +10 %); all at seeds 1, 2 and 5 (+5 %, +10 %, +20 %)."""
    rows = _rows(_result(outcomes))
    assert rows["few"]["delta_percent"] == pytest.approx((25 + 10) / 2)
    assert rows["all"]["delta_percent"] == pytest.approx((5 + 10 + 20) / 3)
    assert rows["base"]["delta_percent"] == 0
    assert rows["alone"]["delta_percent"] is None


def test_the_papers_percentages_are_to_its_baseline(outcomes: Outcomes) -> None:
    text = "\n".join(markdown(_result(outcomes)))
    assert "| few | 3.000 | +50.0 | 4.933 |" in text
    assert "| base | 2.000 | +0.0 | 3.000 |" in text
    assert "| all | 2.200 | +10.0 | 3.400 |" in text


def test_what_rows_send_and_take_is_shown_where_it_is_known(outcomes: Outcomes) -> None:
    """The numbers are per replica, of which a row here has four. Columns that are equal in all rows are left out."""
    assert "| sent, MB |" not in (text := "\n".join(markdown(_result(outcomes))))
    assert "| CPU, s |" not in text
    for number_, (row, seeds) in enumerate(outcomes.items(), start=1):
        for seed, one in seeds.items():
            one["contribution_bytes"] = 4_000_000 * number_
            if row == "few":
                one["cpu_seconds"] = 10.0 * seed
    result = _result(outcomes)
    names = [row["name"] for row in result["rows"]]
    sent, cpu = [1.0 + list(outcomes).index(name) for name in names], ["", "", "", ""]
    cpu[names.index("few")] = number(10 * fmean(outcomes["few"]), 0)
    header, _, *rows = [line for line in markdown(result) if line.startswith("|")][:6]
    columns = [cell.strip() for cell in header.split("|")]
    found = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert [row[columns.index("sent, MB")] for row in found] == [f"{one:.2f}" for one in sent]
    assert [row[columns.index("CPU, s")] for row in found] == cpu


def test_a_picture_that_is_not_finished_leaves_the_old_one(
    outcomes: Outcomes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(figure: Figure, path: Path, **_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError("no space left")

    write_result(_result(outcomes), outcomes, tmp_path / "toy.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="no space"):
        write_result(_result(outcomes), outcomes, tmp_path / "toy.json")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- claims ----


def test_claims_are_of_the_last_losses_by_seed(outcomes: Outcomes) -> None:
    """At seeds 1, 2 and 5, all loses 0.1, 0.3 and 0.8 more. At seeds 1 and 2, few loses 0.5 and 0.3 more."""
    result = _result(
        outcomes,
        Claim(text="costs", lower=("base", "all")),
        Claim(text="grows", grows=[("base", "all"), ("base", "few")]),
        Claim(text="never at one seed", lower=("alone", "base")),
    )
    lower, grows, apart = result["claims"]
    assert lower["interval"] == pytest.approx(student_interval([0.1, 0.3, 0.8]), abs=1e-3)
    assert (lower["verdict"], lower["seeds"]) == ("within noise", 3)
    assert grows["interval"] == pytest.approx(student_interval([0.5 - 0.1, 0.3 - 0.3]), abs=1e-3)
    assert (grows["verdict"], grows["seeds"]) == ("within noise", 2)
    assert (apart["verdict"], apart["seeds"], apart["interval"]) == ("not run", 0, None)


def test_a_claim_has_a_verdict_in_every_forward_that_its_rows_have(outcomes: Outcomes) -> None:
    """Its own verdict is that of the forward that it names."""
    for row, shift in (("base", 0.0), ("all", -0.2)):
        for seed, one in outcomes[row].items():
            one["uncompressed"] = 3.0 + seed + shift
            one["compressed"] = None if row == "base" else 3.0
    claims = [Claim(text="costs", of=of, lower=("base", "all")) for of in FORWARDS]
    own, compressed, plain = _result(outcomes, *claims)["claims"]
    assert (own["of"], own["verdict"], own["interval"][0] > -0.5) == ("own", "within noise", True)
    assert [(one["of"], one["verdict"], one["seeds"]) for one in own["others"]] == [
        ("uncompressed", "does not hold", 3)
    ]
    assert own["others"][0]["interval"] == pytest.approx((-0.2, -0.2))
    assert (compressed["of"], compressed["verdict"]) == ("compressed", "not run")  # base has no such forward
    assert [one["of"] for one in compressed["others"]] == ["own", "uncompressed"]
    assert (plain["of"], plain["verdict"], [one["of"] for one in plain["others"]]) == (
        "uncompressed",
        "does not hold",
        ["own"],
    )
    assert plain["others"][0]["interval"] == own["interval"]


def test_a_claim_about_biases_is_of_their_means_over_rounds(outcomes: Outcomes) -> None:
    for row, shift in (("base", 0.0), ("all", 0.1)):
        for seed in (2, 1):
            outcomes[row][seed]["bias"] = [(5, 0.1 * seed + shift), (10, 0.3 * seed + shift)]
    result = _result(outcomes, Claim(text="bias", of="bias", lower=("base", "all")))
    assert result["claims"][0]["verdict"] == "holds"
    assert result["claims"][0]["interval"] == pytest.approx((0.1, 0.1))
    assert _rows(result)["all"]["bias"]["seeds"] == pytest.approx({"1": 0.3, "2": 0.5})


# ---- from stored outcomes to a table ----


def test_a_row_that_is_trained_again_elsewhere_is_compared_with_the_repositorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "again" / "tiny" / ROWS, tmp_path / "kept" / "tiny" / ROWS
    monkeypatch.setattr(command, "shipped", lambda path: tmp_path / "kept" / Path(path).relative_to(RESULTS))
    add_outcome(there, _outcome(1, 4.1) | {"row": "few", "key": "a"})
    found: Any = {"a": _outcome(1, 4.0), "b": _outcome(2, 3.0)}
    trained: Any = [SimpleNamespace(key=key, name="few", seed=seed) for key, seed in (("a", 1), ("b", 2))]
    for rows in (here, there):
        command._tell_differences(trained, found, rows, Console(width=200))
    told = "few, seed 1: loss 4.0000 here, 4.1000 in the repository's rows, difference -0.1000\n"
    assert capsys.readouterr().out == told


# ---- losses in tokens ----

BUDGETS = (1e5, 2e5, 4e5, 8e5, 3.2e6)


def _after(tokens: float) -> float:
    return 8 - 0.5 * math.log2(tokens / 1e5)


CURVE = {tokens: _after(tokens) for tokens in BUDGETS}


def test_a_loss_in_tokens_is_that_of_a_known_curve() -> None:
    assert times_tokens(CURVE, _after(3e5), 8.1e5) == ("", pytest.approx(2.7))
    assert times_tokens(CURVE, _after(1.6e6), 1.6e6) == ("", pytest.approx(1))
    assert times_tokens(CURVE, _after(6e4), 8e5) == ("> ", pytest.approx(8))
    assert times_tokens(CURVE, _after(6.4e6), 8e5) == ("< ", pytest.approx(0.25))


def test_a_row_with_the_model_of_the_curve_has_its_loss_in_tokens(outcomes: Outcomes) -> None:
    setting = Setting(MICRO, _experiment())
    for one in outcomes["all"].values():
        one["validation_loss"] = [_after(2e5)]
        one["tokens"] = 500_000
    base = setting.config(setting.experiment.rows[1])
    result = result_of(setting, None, outcomes, curve=(base, CURVE))
    text = "\n".join(markdown(result))
    assert _rows(result)["all"]["times_tokens"] == ("", pytest.approx(2.5))
    assert "| x tokens |" in text
    assert "relative to rows of search/budget" in text
    wider = base.model_copy(update={"model": base.model.model_copy(update={"width": 128})})
    other = result_of(setting, None, outcomes, curve=(wider, CURVE))
    assert "x tokens" not in "\n".join(markdown(other))
