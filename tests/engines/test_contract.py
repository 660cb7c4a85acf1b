"""One contract for every engine of a datacenter replica, on real ranks, beside a plain PyTorch loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from started import run_on_ranks

pytestmark = pytest.mark.starts_processes

SCRIPT = Path(__file__).with_name("rank.py")

CASES: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "torch": (1, [{}]),
    "torchtitan": (
        2,
        [{}, {"tensor_parallel": 2, "activation_checkpointing": "full"}, {"data_parallel_replicate": 2}],
    ),
    "deepspeed": (
        2,
        [{"zero_optimization": {"stage": stage}} for stage in (0, 2, 3)]  # stage 2 does what stage 1 does
        + [{"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}],
    ),
}
"""Number of ranks, and settings to try one after another, because the start of Python takes longer than a contract."""


APART = {"torch": 1e-6, "torchtitan": 1e-4, "deepspeed": 1e-4}
"""Allowed difference from the loop's weights after three steps.

Adam amplifies rounding in sums over ranks that are nearly 0.
"""


def _is_exact(settings: dict[str, Any]) -> bool:
    return "bf16" not in settings


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of an engine's results. Each engine goes through the contract once."""
    done: dict[str, Path] = {}

    def folder_of(engine: str) -> Path:
        if engine not in done:
            ranks, cases = CASES[engine]
            folder = tmp_path_factory.mktemp(engine)
            run_on_ranks(ranks, SCRIPT, engine, json.dumps(cases), str(folder))
            done[engine] = folder
        return done[engine]

    return folder_of


@pytest.mark.parametrize("engine", CASES)
def test_an_engine_is_plain_pytorch_on_ranks(engine: str, contracts: Callable[[str], Path]) -> None:
    (ranks, cases), folder = CASES[engine], contracts(engine)
    for index, settings in enumerate(cases):
        everyone = [json.loads((folder / f"{index}-{rank}.json").read_text()) for rank in range(ranks)]
        _check_training(everyone, 1e-5 if _is_exact(settings) else 1e-2)
        if _is_exact(settings):  # with bf16, weights may differ by whole steps
            assert max(found[when] for found in everyone for when in ("trained", "changed")) < APART[engine]
        _check_outer_rounds(everyone, 1e-5 if _is_exact(settings) else 1e-2)


def _check_training(everyone: list[dict[str, Any]], tolerance: float) -> None:
    for found in everyone:
        assert found["names"]
        assert found["start"] == 0.0  # fp32 start weights are equal to the bit
        assert found["done"] == 3 * 2  # micro-batches of three steps
        assert found["gradients"] < tolerance
        for ours, theirs in [*found["steps"], *zip(*found["following"], strict=True), found["step after"]]:
            assert ours == pytest.approx(theirs, rel=tolerance)  # loss, norm, learning rate
        assert found["evaluation"][0] == pytest.approx(found["evaluation"][1], rel=tolerance)
        for fewer, again in found["undone"]:  # undone to the state before the first step, and to one midway
            assert fewer == again[:-1]
        assert found["undone"][1][1] == found["resumed"][0]  # after the second undo from the same copy
        following, resumed = found["resumed"]
        assert following == resumed
        assert found["steps"] == everyone[0]["steps"]  # every rank reports the whole replica's loss and norm


def _check_outer_rounds(everyone: list[dict[str, Any]], tolerance: float) -> None:
    """Check that positions are those of one process, values agree to 1e-6, and results are equal to the bit."""
    for same_positions, apart in everyone[0]["outer"]["contributions"]:
        assert same_positions
        assert apart < 1e-6
    for found in everyone:
        assert found["outer"]["equal"]
        assert found["evaluation after"][0] == pytest.approx(found["evaluation after"][1], rel=tolerance)
    kept = [found["outer"]["kept"] for found in everyone]
    assert sum(kept) == 111936  # error feedback is split without overlap: one value per parameter


def test_torchtitan_goes_on_with_another_number_of_ranks(contracts: Callable[[str], Path], tmp_path: Path) -> None:
    folder, told = contracts("torchtitan"), tmp_path / "told.json"
    following, _ = json.loads((folder / "0-0.json").read_text())["resumed"]
    run_on_ranks(1, SCRIPT.with_name("other_ranks.py"), str(folder / "0" / "saved"), str(told))
    for ours, theirs in zip(json.loads(told.read_text()), following, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
