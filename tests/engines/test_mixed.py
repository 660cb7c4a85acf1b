"""configs/mixed_engines.yaml: torchtitan and DeepSpeed on two ranks each, beside a group of four stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "mixed_engines.yaml"
SHORT = [
    "outer.rounds=2",
    "inner.steps=3",
    "data.validation_sequences=8",
    "data.validation_share=0.2",
    "data.repeat=true",
]
PLAIN = [f"replicas.{index}.{key}" for index in (0, 1) for key in ("engine=torch", "ranks=1")]


def _launch(runs: Path, corpus: Path, *more: str) -> dict[str, Any]:
    settings = [*SHORT, f"data.corpus={corpus}", "replicas.0.device=cpu", "replicas.1.device=cpu"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "hetero_pp", "launch", str(CONFIG), "--runs", str(runs), *sets, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((runs / "mixed-engines" / "summary.json").read_text())


def test_engines_and_stages_are_one_run(corpus: Path, tmp_path: Path) -> None:
    """Equal to the bit after every round, and with the losses of the same topology in plain PyTorch."""
    mixed = _launch(tmp_path / "mixed", corpus)
    plain = _launch(
        tmp_path / "plain", corpus, "--in-process", *(part for setting in PLAIN for part in ("--set", setting))
    )
    assert len(set(mixed["parameters_sha256"].values())) == 1
    assert mixed["parameters_sha256"].keys() == {"titan", "zero", "home"}
    assert mixed["initial_validation_loss"] == pytest.approx(plain["initial_validation_loss"], rel=1e-5)
    assert mixed["validation_loss"] == pytest.approx(plain["validation_loss"], rel=2e-3)
    for ours, theirs in zip(mixed["replicas"], plain["replicas"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
    assert [link["payload_bytes"] for link in mixed["links"]] == [link["payload_bytes"] for link in plain["links"]]
