"""Defences that a run has by default: which, of what size, and the line that names them or their price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_pp.config.audit import AuditSizes, GauntletSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.defences import PRICE, defence_lines, defended

GUESTS = {"name": "home", "kind": "participants", "count": "0..3", "stages": 2}
GRADIENTS = {"outer": {"rounds": 2, "method": "adamw_ddp"}, "inner": {"steps": 1}}


def _spec(corpus: Path, *replicas: dict[str, Any], **changes: Any) -> RunSpec:
    config = {
        "name": "t",
        "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 2},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 1},
        "outer": {"rounds": 2},
        "replicas": [{"name": "dc", "kind": "datacenter"}, *replicas],
    }
    found = RunConfig.model_validate(config | changes)
    found.check()
    return RunSpec(found, 256)


def _told(spec: RunSpec, is_served: bool = False) -> list[str]:
    return list(defence_lines(defended(spec, is_served)))


def test_a_run_that_only_this_host_carries_has_none(corpus: Path) -> None:
    required = [{"name": name, "kind": "datacenter"} for name in "ab"]
    assert defended(_spec(corpus, *required), is_served=False).config.audit.gauntlet is None
    assert defended(_spec(corpus, *required), is_served=True).config.audit.gauntlet is not None
    assert _told(_spec(corpus, *required, exchange={"listen": "0.0.0.0:0"}))[0].startswith("Signs")
    assert defended(_spec(corpus, required[0]), is_served=True).config.audit.gauntlet is None


def test_off_is_one_line_and_its_price_is_told(corpus: Path) -> None:
    for value in ("off", False):
        [line] = _told(_spec(corpus, GUESTS, audit={"gauntlet": value}), is_served=True)
        assert line.startswith("Defences: off (`audit.gauntlet`). One hostile replica of four")


def test_the_price_is_that_of_the_committed_table() -> None:
    table = Path(__file__).parents[2] / "benchmarks" / "results" / "micro" / "audit" / "one_of_four.md"
    cells = [line.split("|") for line in table.read_text(encoding="utf-8").splitlines()]
    loss = {cell[1].strip(): float(cell[2]) for cell in cells if len(cell) > 10 and cell[1].strip().startswith("flip")}
    assert f" {loss['flip by 4, off']:.2f} instead of {loss['flip by 4, on']:.2f} " in PRICE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (GRADIENTS, "with method adamw_ddp the gradient of one step tells too little"),
        ({"data": {"corpus": "hf:somebody/somewhere", "sequence_length": 16}}, "this host does not have the corpus"),
        ({"data": {"corpus": "gone.txt", "sequence_length": 16}}, "this host does not have the corpus"),
        (
            {"model": {"width": 4096, "heads": 2, "feed_forward": 16384, "layers": 8}},
            "the trials of a round would take",
        ),
    ],
)
def test_what_cannot_work_is_left_out_and_signs_stay(corpus: Path, changes: dict[str, Any], why: str) -> None:
    found = defended(_spec(corpus, GUESTS, **changes), is_served=False)
    assert found.config.audit.gauntlet == GauntletSettings(evaluated=0), found
    signs, scores = defence_lines(found)
    assert signs.startswith("Signs") and scores.startswith(f"Scores: none, because {why}")


def test_scores_that_cannot_work_are_refused_if_the_yaml_asks_for_them(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="expected `evaluated: 0`, with which only signs are compared"):
        _spec(corpus, GUESTS, **GRADIENTS, audit={"gauntlet": {}})


def test_the_cost_of_scores_is_unknown_in_rounds_of_time(corpus: Path) -> None:
    [_, scores] = _told(_spec(corpus, GUESTS, inner={"seconds": 5}))
    assert (
        "2 contributions of each round tried beside the exchange, on 2 x 8 sequences: " in scores and "%" not in scores
    )


def test_sizes_follow_the_replicas_and_their_text() -> None:
    sizes = GauntletSettings().sizes
    assert [sizes(replicas, 0).evaluated for replicas in (1, 2, 4, 8, 20, 50)] == [1, 2, 2, 2, 5, 13]
    assert [sizes(4, texts).sequences for texts in (80, 1_920, 10_000)] == [8, 36, 64]
    assert GauntletSettings(evaluated=3, sequences=5).sizes(8, 10_000) == AuditSizes(3, 5)
    assert GauntletSettings(evaluated=3).sizes(2, 0).evaluated == 2
