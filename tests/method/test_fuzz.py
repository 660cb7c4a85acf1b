"""A short run of the fuzz target on mutated honest blobs, without a guide; benchmarks/fuzz_contribution.py has one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

INPUTS = 6000


def _mutated(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """A few changes of the kinds that fuzzers make, behind the two bytes that say what the input is."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randint(2, len(found)), dice.choice((1, 1, 2, 4, 8, 40))
        match dice.randrange(5):
            case 0:
                found[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = dice.randbytes(length)
            case 3:
                found[at : at + length] = dice.choice((b"\x00", b"\xff")) * length
            case 4:
                start = dice.randrange(len(other))
                found[at : at + length] = other[start : start + length]
    return bytes(found)


def test_mutated_blobs_decode_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    from contribution_target import Count, seeds, try_one

    dice, honest, count = random.Random(0), list(seeds()), Count()
    for seed in honest:
        try_one(seed, count)
    assert (count.decoded, count.refused) == (len(honest), 0)
    for _ in range(INPUTS):
        try_one(_mutated(dice.choice(honest), dice.choice(honest), dice), count)
    assert count.refused > INPUTS / 2
    assert count.decoded > len(honest) + INPUTS / 100
    assert count.inputs == count.decoded + count.refused
