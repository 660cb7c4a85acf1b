"""The table of tried boundaries has the results of the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
NO_IDEAS = {
    "as it is",
    "4 bytes, full anchors",
    "only activations are compressed",
    "only gradients are compressed",
}
"""Baselines of the ideas, and runs that show where the loss comes from."""


def test_ideas_have_the_figures_of_the_benchmark() -> None:
    section = PAGE.read_text().partition("## What was tried at the boundary")[2].partition("\n## ")[0]
    [path] = re.findall(r"benchmarks/results/[\w./-]+\.json", section)
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for run in json.loads((ROOT / path).read_text())["runs"]:
        runs.setdefault(run["idea"], {})[run["seed"]] = run

    def above(idea: str, other: str) -> list[float]:
        """Return the mean difference at the seeds of both, for the losses `own` and `plain`."""
        seeds = runs[idea].keys() & runs[other].keys()
        return [fmean(runs[idea][seed][of] - runs[other][seed][of] for seed in seeds) for of in ("own", "plain")]

    lines = re.findall(r"^\| (.+?) \| (.+?) \| (\d) \| ([-+][.\d]+) \| ([-+][.\d]+) \|", section, re.MULTILINE)
    assert {idea for idea, *_ in lines} == runs.keys() - NO_IDEAS
    for idea, beside, seeds, own, plain in lines:
        other = "as it is" if beside == "30 x 4 bits" else beside
        assert int(seeds) == len(runs[idea].keys() & runs[other].keys())
        assert [float(own), float(plain)] == pytest.approx(above(idea, other), abs=6e-4), idea
    told = [float(number) for number in re.findall(r"0\.\d{3}\b", section.partition("Compressed activations")[2])]
    gradients, activations = "only gradients are compressed", "only activations are compressed"
    assert told == pytest.approx([*above("as it is", gradients), *above(activations, "as it is")], abs=6e-4)
