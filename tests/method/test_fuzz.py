"""A short run of the fuzz target on mutated honest blobs. benchmarks/fuzz_contribution.py is the guided one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

INPUTS = 6000


def test_mutated_blobs_decode_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    from contribution_target import Count, mutated, seeds, try_one

    dice, honest, count = random.Random(0), list(seeds()), Count()
    for seed in honest:
        try_one(seed, count)
    assert (count.decoded, count.refused) == (len(honest), 0)
    for _ in range(INPUTS):
        try_one(mutated(dice.choice(honest), dice.choice(honest), dice), count)
    assert count.refused > INPUTS / 2
    assert count.decoded > len(honest) + INPUTS / 100
    assert count.inputs == count.decoded + count.refused
