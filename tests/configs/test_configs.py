"""Every run in configs/ loads, round-trips and builds; the schema for editors is up to date.

Experiments and scales are validated row by row in tests/experiments.
"""

from __future__ import annotations

import json
from pathlib import Path

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
