"""The table of boundaries that were tried says what the benchmark found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
NAMES = {"30 x 4 bits": "as it is"}


def test_ideas_have_the_figures_of_the_benchmark() -> None:
    section = PAGE.read_text().partition("## What was tried at the boundary")[2].partition("\n## ")[0]
    [path] = re.findall(r"benchmarks/results/[\w./-]+\.json", section)
    runs = {run["idea"]: run for run in json.loads((ROOT / path).read_text())["runs"]}
    lines = re.findall(r"^\| (.+?) \| (.+?) \| ([-+][.\d]+) \| ([-+][.\d]+) \|", section, re.MULTILINE)
    assert len(lines) == len(runs) - 4  # what the others stand beside, and where the loss comes from
    for idea, beside, own, plain in lines:
        other = runs[NAMES.get(beside, beside)]
        assert float(own) == pytest.approx(runs[idea]["own"] - other["own"], abs=6e-4), idea
        assert float(plain) == pytest.approx(runs[idea]["plain"] - other["plain"], abs=6e-4), idea
    told = [float(number) for number in re.findall(r"0\.\d{3}\b", section.partition("The loss is that")[2])]
    gradients, activations = runs["only gradients are compressed"], runs["only activations are compressed"]
    both = runs["as it is"]
    expected = [both[of] - gradients[of] for of in ("own", "plain")] + [
        activations[of] - both[of] for of in ("own", "plain")
    ]
    assert told == pytest.approx(expected, abs=6e-4)
