"""`check`: what it prints about a run, and about a machine that would train it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero_pp.program.cli import app

YAML = """\
name: t
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
outer: {rounds: 3, compression: {density: 1/24}}
replicas:
  - {name: dc, kind: datacenter, engine: torchtitan, ranks: 4}
  - {name: home, kind: participants, stages: [{layers: 1}, {layers: 3}]}
"""


@pytest.fixture
def yaml(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)))
    return path


def _check(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["check", str(path), "--runs", str(path.parent / "runs"), *arguments])
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def test_it_speaks_as_the_yaml_does(yaml: Path) -> None:
    said = _check(yaml)
    assert "density 1/24, signs" in said
    assert "Engine of dc: torchtitan, 4 ranks." in said
    assert "embedding, layer 0 " in said
    assert " layers 1-3, head " in said
    assert "1 outer round of 1 inner step," in _check(yaml, "--set", "outer.rounds=1", "--set", "inner.steps=1")
    with_anchors = ("--set", "replicas.1.boundary={rank: 8, bits: 4, anchors: {rank: 16}}")
    learned = f"anchors of rank 16 ({16 * (256 + 64):,} numbers at each later stage, never sent)"
    assert f"Boundaries of home: rank 8 of 64, 4 bits, {learned}." in _check(yaml, *with_anchors)
    fading = _check(yaml, *with_anchors, "--set", "replicas.1.boundary.anchors.fade=[0.5, 0.9]")
    assert "never sent, fading from 50% to 90% of the run)" in fading
    timed = _check(yaml, "--set", "outer.rounds=4", "--set", "inner={seconds: 5 min}")
    assert "4 outer rounds of as many inner steps as fit into 5:00, " in timed
    assert "per step over all replicas. " in timed
    assert "`a round` and `takes` are without them." in timed


def test_a_warm_up_beyond_the_run_and_a_rounded_rank_are_told(yaml: Path) -> None:
    said = _check(yaml, "--set", "inner.warmup_steps=1000", "--set", "replicas.1.boundary.rank=1/3")
    assert "inner.warmup_steps: found 1,000, but the run has 30 steps, so the learning rate never reaches" in said
    assert "rank 21 of 64 (1/3 of it is 21.33, rounded)" in said
    assert "never reaches" not in _check(
        yaml, "--set", "inner.warmup_steps=10", "--set", "replicas.1.boundary.rank=1/4"
    )
