"""Shards of outer-round state that ranks save, loaded by the same number of ranks and by others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.pseudo_gradient.rows import rows_of
from replica_groups.engines.ranks import Ranks
from replica_groups.member.rank_rows import read_part, write_part

TILE = (8, 8)
SHAPES = {"a": (37, 5), "b": (9,), "c": (16, 3)}


@pytest.mark.parametrize("before", [1, 2, 3, 7])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(before: int, after: int, tmp_path: Path) -> None:
    wholes = {f"{kind}:{name}": torch.randn(shape) for kind in ("error", "m") for name, shape in SHAPES.items()}

    def cut(rank: int, world: int) -> dict[str, torch.Tensor]:
        rows = {name: rows_of(shape, TILE, rank, world) for name, shape in SHAPES.items()}
        return {name: t[rows[name[-1]].start : rows[name[-1]].stop] for name, t in wholes.items()}

    for rank in range(before):
        write_part(tmp_path, Ranks(rank, before), cut(rank, before))
    for rank in range(after):
        found, expected = read_part(tmp_path, Ranks(rank, after), SHAPES, TILE), cut(rank, after)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    write_part(tmp_path, Ranks(1, 2), {"error:a": torch.zeros(3, 5)})
    with pytest.raises(HeteroPPError, match="expected one file per rank"):
        read_part(tmp_path, Ranks(0, 1), SHAPES, TILE)
