"""Replicas spread over ranks in separate processes: the results of one process, with the same bits in all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from started import run_on_ranks

from hetero_pp.core.errors import ConfigError
from replica_groups.engines.ranks import ALONE, Ranks

SCRIPT = Path(__file__).with_name("rank.py")


def _run(world: int, corpus: Path, folder: Path, *methods: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each rank by method. All methods run in one start, because starting takes long."""
    for method in methods:
        (folder / method).mkdir(parents=True)
    run_on_ranks(world, SCRIPT, str(corpus), str(folder), *methods)
    return {
        method: [json.loads((folder / method / f"{rank}-of-{world}.json").read_text()) for rank in range(world)]
        for method in methods
    }


@pytest.mark.starts_processes
def test_ranks_train_what_one_process_trains(corpus: Path, tmp_path: Path) -> None:
    """Results agree up to rounding, because sums over replicas are grouped differently.

    Four replicas are on three ranks, and on two.
    """
    alone = _run(1, corpus, tmp_path / "one", "sparseloco", "adamw_ddp", "grassmann")
    several = _run(3, corpus, tmp_path / "three", "sparseloco")
    several |= _run(2, corpus, tmp_path / "two", "adamw_ddp", "grassmann")
    for method, found in several.items():
        _compare(alone[method][0], found)
    assert not list(tmp_path.glob("*/*/checkpoint*"))


def _compare(one: dict[str, Any], found: list[dict[str, Any]]) -> None:
    for key in ("validation_loss", "compressed", "tokens", "contribution_bytes", "stops", "resumed"):
        assert all(rank[key] == found[0][key] for rank in found), key
    for rank in found:
        assert rank["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
        assert rank["compressed"] == pytest.approx(one["compressed"], rel=1e-4)
        assert rank["uncompressed"] == pytest.approx(one["uncompressed"], rel=1e-4)
        assert rank["bias"][0] == pytest.approx(one["bias"][0], rel=1e-2)
        assert rank["tokens"] == one["tokens"]
        assert rank["stops"]
        assert rank["resumed"] == rank["validation_loss"]
        assert rank["threads"] == []
        for ours, expected in zip(rank["embedding"], one["embedding"], strict=True):
            assert ours == pytest.approx(expected, abs=1e-6)
    for round_ in range(3):
        assert len({sha for rank in found for sha in rank["hashes"][round_]}) == 1


def test_replicas_are_split_evenly() -> None:
    assert [list(Ranks(rank, 3).mine(8)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [Ranks(0, 3).owner(index, 8) for index in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert list(ALONE.mine(2)) == [0, 1]


def test_more_ranks_than_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="found 2 replicas for 3 ranks"):
        Ranks(0, 3).mine(2)
