"""Claims about time and outer gradients: losses at equal predicted hours, hours, bounds, and inverse roots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED
from matplotlib.figure import Figure

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.simulate import Outputs, simulate
from hetero_pp.research.experiments.claims import claim_results
from hetero_pp.research.experiments.clock import deployments_of, loss_at, predicted_hours
from hetero_pp.research.experiments.definition import Claim, ClockSettings, Experiment, Row
from hetero_pp.research.experiments.markdown import markdown
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.report import result_of
from hetero_pp.research.experiments.rows import Setting

Known = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[2]
MICRO = SHIPPED.scale("micro")
DEPLOYED = ClockSettings(
    run=str(ROOT / "configs" / "paper" / "het_pp_figure3.yaml"), cells={"simulate.machine": "h100"}
)


def _experiment(*claims: Claim, **more: Any) -> Experiment:
    rows = [Row(name=name, timed=timed) for name, timed in (("slow", "SparseLoCo 10B, loss 2.73"), ("fast", "fast"))]
    return Experiment(name="t", title="t", baseline="slow", clock=DEPLOYED, rows=rows, claims=list(claims), **more)


def test_hours_are_those_that_simulate_predicts(tmp_path: Path) -> None:
    """Both rows have the deployment's tokens and rounds, so the hours of a compressed one are those of its links."""
    shipped = SHIPPED.experiment("het-pp/figure3")
    hours = predicted_hours(shipped)
    simulate(Path(DEPLOYED.run), [], None, "simulate.machine=rtx-4090", Outputs(json=tmp_path / "found.json"))
    points = json.loads((tmp_path / "found.json").read_text())["curves"]["rtx-4090"]
    predicted = {point["value"]: 24 * point["days"] for point in points}
    assert hours == {row.name: pytest.approx(predicted[row.timed]) for row in shipped.rows if row.timed}
    assert hours["PP-Compress"] < 0.5 * hours["SparseLoCo"]


def test_an_unknown_deployment_is_named() -> None:
    with pytest.raises(ConfigError, match=r"found `fast`, expected a row of `simulate.rows` in .*figure3.yaml: Sparse"):
        deployments_of(_experiment())


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
    found = claim_results(_experiment(by, end, sooner), outcomes, {"slow": 12.0, "fast": 4.0})
    assert [claim["difference"] for claim in found] == pytest.approx([6.0, 1.0 - 3.015, 8.0])
    assert [claim["verdict"] for claim in found] == ["holds", "does not hold", "holds"]
    assert [claim["p"] is None for claim in found] == [False, False, True]  # predictions are in no family
    assert found[0]["about"] != found[1]["about"]
    [unpredicted] = claim_results(_experiment(sooner), outcomes)
    assert unpredicted["verdict"] == "not run"


def _gradients(norm: float, cosine: float) -> list[tuple[int, float, float, float, float]]:
    """Return measurements of 22 rounds; the last two are no part of cosines, which are of the first 20."""
    return [(round_, norm, norm / 2, cosine if round_ <= 20 else -1.0, cosine / 2) for round_ in range(1, 23)]


def test_claims_about_outer_gradients(known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"one": 1, "four": 4, "sixteen": 16}
    lengths = {"one": 2.0, "four": 1.1, "sixteen": 0.5}
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
    result = result_of(Setting(MICRO, experiment), None, outcomes)
    verdicts = [claim["verdict"] for claim in result["claims"]]
    assert verdicts == ["holds", "does not hold", "holds", "does not hold", "does not hold"]
    assert result["claims"][0]["difference"] == pytest.approx(1.12 - 2.02 / 2)
    assert result["claims"][2]["difference"] == pytest.approx(0.05)
    assert len({claim["about"] for claim in result["claims"]}) == 5
    assert {row["name"]: row["momentum"]["mean"] for row in result["rows"]} == dict.fromkeys(counts, pytest.approx(0.8))
    text = "\n".join(markdown(result))
    assert "| norm | uncorrelated | momentum | kept momentum | state |" in text
    assert "| 1.120 | 0.560 | 0.800 | 0.400 | done |" in text
    assert "| follows | momentum | **holds** | +0.050 to +0.050 | 3 |" in text
    pictures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: pictures.append(figure))
    draw(result, outcomes, tmp_path / "toy.png")
    _, momenta, norms = pictures[0].axes[:3]
    bounds = {float(np.asarray(line.get_ydata())[0]) for line in momenta.get_lines() if line.get_linestyle() == ":"}
    assert bounds == {0.75, 0.9}
    [formula] = [line for line in norms.get_lines() if line.get_label() == "the baseline's / sqrt(k)"]
    assert np.asarray(formula.get_xydata()).tolist() == [
        [1, 2.02],
        [4, pytest.approx(1.01)],
        [16, pytest.approx(0.505)],
    ]
