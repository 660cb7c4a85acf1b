"""Every run in configs/ loads, round-trips and builds; the schema for editors is up to date.

Experiments and scales are validated row by row in tests/experiments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.model.transformer import Transformer, build_part

CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = {
    "178m": 177_622_016,
    "512m": 512_398_848,
    "1b": 1_204_881_408,
    "sparseloco_512m": 512_398_848,
    "diloco_150m": 178_466_176,
}
YAMLS = sorted(path for path in CONFIGS.rglob("*.yaml") if "experiments" not in path.relative_to(CONFIGS).parts)


def test_there_are_configs() -> None:
    assert {path.stem for path in YAMLS} >= {"quickstart", "unequal_groups", *PARAMETERS}


def test_the_quickstart_says_what_our_parts_gain() -> None:
    """Figures of its comment are those of committed tables."""
    text = " ".join((CONFIGS / "quickstart.yaml").read_text().replace("#", "").split())

    def row(table: str, name: str) -> dict[str, Any]:
        rows = json.loads((CONFIGS.parent / "benchmarks" / "results" / f"{table}.json").read_text())["rows"]
        return next(one for one in rows if one["name"] == name)

    signs, whole, codes = (
        row("micro/beyond/sign_codes", f"{name}, 1/32") for name in ("signs", "as they are", "2-bit codes")
    )
    free, inside = (row("micro/het-pp/table1", name) for name in ("PP-Compress, free embedding (ours)", "PP-Compress"))
    bits, anchors, bf16 = (
        row("ladder/beyond/ladder", f"64, {name}, half") for name in ("4 bits", "4 bits, fading anchors", "1/8")
    )
    assert abs(signs["delta_percent"]) < 0.05
    small, large = (one["contribution_bytes"] / 1e6 for one in (signs, whole))
    assert f"sends {small:.2f} MB a replica instead of {large:.2f} MB, at the same loss" in text
    cost = [f"{one['delta_percent']:.1f} %" for one in (codes, free, inside, bits, anchors, bf16)]
    assert f"2 bits cost {cost[0]}." in text
    assert (
        f"costs {cost[1]} with all replicas compressed to 1/8. The paper's, in the subspace, costs {cost[2]}." in text
    )
    assert f"cost {cost[3]} with half of the replicas compressed, and with anchors that fade {cost[4]}." in text
    assert f"bytes in bf16 cost {cost[5]}." in text


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_it_loads_and_builds(path: Path, tmp_path: Path) -> None:
    config = ConfigFile(path).config
    spec = RunSpec(config, config.model.vocabulary or 256)
    with torch.device("meta"):
        whole = Transformer(spec.shape)
        for replica in config.replicas:
            members = [member for member in spec.members.values() if member.replica is replica]
            owned = [name for member in members for name in member.owned]
            assert sorted(owned) == sorted(dict(whole.named_parameters()))
            for member in members:
                if member.stage is not None:
                    part = dict(build_part(spec.shape, member.stage).named_parameters())
                    assert sorted(part) == list(member.owned)
    if path.stem in PARAMETERS:
        assert sum(parameter.numel() for parameter in whole.parameters()) == PARAMETERS[path.stem]
    save_config(config, tmp_path / "config.yaml")
    assert ConfigFile(tmp_path / "config.yaml").config == config


def test_the_schema_is_up_to_date() -> None:
    assert json.loads((CONFIGS / "schema.json").read_text()) == RunConfig.model_json_schema()


def test_another_method_leaves_the_files_own_cells_behind(tmp_path: Path) -> None:
    """Cells of the file belong to the method that it names. Other changes are kept, in any order."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: a\nouter: {rounds: 3, learning_rate: 0.9, compression: {density: 1/32}}\n"
        "replicas: [{name: dc, kind: datacenter}]\n"
    )
    for changes in (["outer.method=diloco"], ["outer.momentum=0.5", "outer.method=diloco"]):
        outer = ConfigFile(path, changes).config.outer
        assert (outer.rounds, outer.learning_rate, outer.compression.density) == (3, 0.7, 1.0)
        assert outer.momentum == (0.5 if len(changes) > 1 else 0.9)
