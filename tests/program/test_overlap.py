"""Overlapping rounds in a run: one by one in a notebook, with changed settings, and settings that exclude overlap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mixed_run import MIXED, train

from hetero_pp import Run
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Share
from hetero_pp.model.learning_rates import BySteps, LearningRates
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.research.settings import ResearchConfig
from replica_groups.member.inner_loops import StepsTaken

ROUNDS = 4
CELLS = ["outer.overlap=1", f"outer.rounds={ROUNDS}", "checkpoints.every=1"]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(corpus, tmp_path_factory.mktemp("undisturbed"), *CELLS)


def test_a_round_at_a_time_in_a_notebook(undisturbed: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    """A round counts as done although the next one is already trained. `parameters` returns those of that round."""
    outer = {"overlap": 1, "rounds": ROUNDS}
    with Run.from_yaml(MIXED, runs=tmp_path, data={"corpus": corpus}, outer=outer, checkpoints={"every": 1}) as run:
        losses = [run.round().validation_loss for _ in range(ROUNDS)]
        sha256 = parameters_sha256({name: parameter_sha256(one) for name, one in run.parameters().items()}).hex()
    assert losses == undisturbed["validation_loss"]
    assert set(undisturbed["parameters_sha256"].values()) == {sha256}


def test_what_was_trained_ahead_with_other_settings_is_trained_again(
    undisturbed: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate changes from round 3 on, after round 3 was trained ahead.

    Each replica then undoes the round and starts it from theta after round 2, with the optimizer moments of that time.
    """
    asked: dict[tuple[int, int], int] = {}
    inputs_of = StepsTaken.inputs

    def inputs(taken: StepsTaken, round_: int, spec: RunSpec) -> tuple[LearningRates, Share]:
        rates, share = inputs_of(taken, round_, spec)
        key = id(taken), round_
        asked[key] = asked.get(key, 0) + 1
        assert isinstance(rates, BySteps)
        return (replace(rates, peak=rates.peak / 2) if round_ == 3 and asked[key] > 1 else rates), share

    monkeypatch.setattr(StepsTaken, "inputs", inputs)
    summary = train(corpus, tmp_path, *CELLS)
    steps = [json.loads(line) for line in (tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()]
    rates = [
        (one["step"], one["learning_rate"])
        for one in steps
        if one.get("event") == "inner_step" and one["round"] == 3 and one["replica"] == "dc"
    ]
    assert [step for step, _ in rates] == [0, 1, 2, 0, 1, 2]
    assert [rate for _, rate in rates[3:]] == [rate / 2 for _, rate in rates[:3]]
    assert summary["validation_loss"][:2] == undisturbed["validation_loss"][:2]
    assert summary["validation_loss"][2:] != undisturbed["validation_loss"][2:]
    assert len(set(summary["parameters_sha256"].values())) == 1


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"inner": {"seconds": 5}}, r"outer\.overlap: found 1 with `inner\.seconds`"),
        (
            {"research": {"ablations": {"adaptation": "discarded"}}},
            r"research\.ablations\.adaptation: found this key with `outer\.overlap: 1`, expected only one",
        ),
    ],
)
def test_parts_that_a_round_has_to_be_over_for(cells: dict[str, Any], told: str) -> None:
    home: dict[str, Any] = {"name": "home", "kind": "participants", "stages": 2, "boundary": {"rank": "1/4"}}
    values = {"name": "a", "outer": {"rounds": 2, "overlap": 1}, "replicas": [home], **cells}
    config = ResearchConfig.model_validate(values)
    with pytest.raises(ConfigError, match=told):
        config.check()
