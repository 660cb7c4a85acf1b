"""The smallest run with replicas of both kinds, a datacenter and a group of three stages, trained in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_pp.program.launch.command import Invocation, run_topology

MIXED = Path(__file__).parent / "equivalence" / "mixed.yaml"
QUICK = ("inner.steps=2", "replicas.0.micro_batches=1", "replicas.1.micro_batches=2", "data.validation_sequences=4")
"""Settings of shorter rounds."""
RESULTS = ("parameters_sha256", "validation_loss", "initial_validation_loss", "rounds", "contributions")
"""Parts of a summary that depend on what was trained alone."""


def train(
    corpus: Path,
    runs: Path,
    *settings: str,
    config: Path = MIXED,
    resume: bool = False,
    new: bool = False,
    typed: Sequence[str] = (),
) -> dict[str, Any]:
    """Train the run in this process. Return its summary."""
    given, invocation = [f"data.corpus={corpus}", *settings], Invocation(typed=typed)
    run_topology(config, given, runs, in_process=True, resume=resume, new=new, invocation=invocation)
    return summary_in(runs / "mixed")


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the summary in a run's folder."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def is_same(summary: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two runs trained the same, to the bit."""
    return all(summary[key] == other[key] for key in RESULTS)
