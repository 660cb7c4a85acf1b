"""A folder with one toy table at a scale of seconds, and `hetero-pp reproduce` of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from hetero_pp.config.run_config import RunConfig
from hetero_pp.program.cli import app
from hetero_pp.research.experiments.outcomes import Outcomes
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.training import Job
from hetero_pp.research.settings import UNMEASURED

TINY = """\
name: tiny
about: a few seconds
replicas: 2
stages: 2
batch_size: 2
vocabulary: 300
hardware: cpu
base:
  model: {preset: micro, width: 16, heads: 2, feed_forward: 16, layers: 2}
  data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
  inner: {steps: 2, learning_rate: 1.0e-2, warmup_steps: 2}
  outer: {rounds: 2, compression: {density: 1/32, value_bits: 32}}
"""
EXPERIMENT = """\
name: toy/one
title: Toy
paper: nowhere
baseline: none
rows:
  - {name: none, paper: 2.0}
  - {name: all, compressed: all, rank: 1/4, paper: 2.2}
  - {name: the same, compressed: all, rank: 4}
  - {name: too small, compressed: all, rank: 1/64}
  - {name: explodes, cells: {outer.learning_rate: 1.0e+6, inner.learning_rate: 1.0e+6}}
claims:
  - {text: costs, lower: [none, all]}
  - {text: never trained, lower: [none, too small]}
"""

Reproduce = Callable[..., tuple[int, str, str]]
"""A function that runs `hetero-pp reproduce` with these arguments and returns exit code, stdout and stderr."""


@pytest.fixture(scope="session")
def reproduce_in(corpus: Path) -> Callable[[Path], Reproduce]:
    """Return a function that writes the toy's table to a folder.

    It returns a function that runs `reproduce` at the toy's scale, with results and runs beside the experiments.
    """

    def write(folder: Path) -> Reproduce:
        experiments = folder / "experiments"
        (experiments / "scales").mkdir(parents=True)
        (experiments / "toy").mkdir()
        (experiments / "scales" / "tiny.yaml").write_text(TINY.replace("CORPUS", str(corpus)))
        (experiments / "toy" / "one.yaml").write_text(EXPERIMENT)
        options = ["--experiments", experiments, "--runs", folder / "runs", "--results", folder / "results"]

        def invoke(*arguments: str) -> tuple[int, str, str]:
            command = ["reproduce", "--scale", "tiny", "--no-compile", *map(str, options), *arguments]
            result = CliRunner().invoke(app, command)
            return result.exit_code, result.stdout, result.stderr

        return invoke

    return write


@pytest.fixture
def reproduce(tmp_path: Path, reproduce_in: Callable[[Path], Reproduce]) -> Reproduce:
    """Return a function that runs `reproduce` of the toy's table in the test's folder."""
    return reproduce_in(tmp_path)


@pytest.fixture
def toys(tmp_path: Path, reproduce: Reproduce) -> Path:
    """Return the folder of the toy's table and scale."""
    return tmp_path / "experiments"


@pytest.fixture
def known() -> Callable[..., dict[str, Any]]:
    """Return a function that makes the outcome of a row with a loss and other given fields."""

    def outcome(loss: float, **more: Any) -> dict[str, Any]:
        losses = {"validation_loss": [loss + 1, loss], "uncompressed": loss, "compressed": None, "diverged": False}
        return {**losses, "tokens": 10, "boundary_bytes_per_token": 16.0, "seconds": 1.0, **more}

    return outcome


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """Return a function that draws a result and its outcomes, and returns the picture."""
    pictures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: pictures.append(figure))

    def figure(result: Mapping[str, Any], outcomes: Outcomes) -> Figure:
        draw(result, outcomes, tmp_path / "toy.png")
        return pictures[-1]

    return figure


@pytest.fixture
def job(tmp_path: Path, corpus: Path) -> Job:
    """Return a row that trains for a second."""
    config = RunConfig.model_validate(
        {
            "name": "row",
            "model": {"preset": "micro", "width": 16, "heads": 2, "feed_forward": 16, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 16, "validation_share": 0.2, "validation_sequences": 4},
            "inner": {"steps": 1, "warmup_steps": 1},
            "outer": {"rounds": 3},
            "replicas": [{"name": "dc", "kind": "datacenter", "batch_size": 2}],
        }
    )
    return Job("toy/one", "all", 2, config, UNMEASURED, tmp_path / "cache", tmp_path / "rows.jsonl", {"version": 1})
