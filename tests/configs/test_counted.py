"""An entry of `replicas` that stands for several groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.launch.inputs import prepare
from replica_groups.exchange.host import rules_of

YAML = """
name: grows
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
outer: {rounds: 3}
replicas:
  - {name: home, kind: participants, count: COUNT, stages: 2, batch_size: 4}
  - {name: dc, kind: datacenter, batch_size: 4, optional: DC}
"""


def _file(tmp_path: Path, corpus: Path, count: str, dc: str = "false") -> ConfigFile:
    path = tmp_path / "run.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)).replace("COUNT", count).replace("DC", dc))
    return ConfigFile(path)


def _groups(config: RunConfig) -> list[tuple[str, bool]]:
    return [(replica.name, replica.optional) for replica in config.replicas]


def test_an_entry_is_so_many_groups_of_which_some_are_needed(tmp_path: Path, corpus: Path) -> None:
    file = _file(tmp_path, corpus, "1..3")
    assert _groups(file.config) == [("home-1", False), ("dc", False), ("home-2", True), ("home-3", True)]
    spec = RunSpec(file.config, 256)
    assert list(spec.needed) == ["home-1.0", "home-1.1", "dc"]
    assert rules_of(spec).optional == {"home-2", "home-3"}
    save_config(file.config, tmp_path / "saved.yaml")
    assert ConfigFile(tmp_path / "saved.yaml").config == file.config
    assert _groups(_file(tmp_path, corpus, "2").config) == [("home-1", False), ("dc", False), ("home-2", False)]
    assert [optional for _, optional in _groups(_file(tmp_path, corpus, "0..1").config)] == [True, False]


@pytest.mark.parametrize("count", ["0", "3..2", "-1", "1..5000", "many", "1...2", "[1, 2]"])
def test_a_count_that_is_none(count: str, tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.yaml:.*: replicas: .*found count .*expected a number, or a range such as `0"
    ):
        _file(tmp_path, corpus, count)


def test_a_run_that_needs_nobody_is_not_launched_whole(tmp_path: Path, corpus: Path) -> None:
    file = _file(tmp_path, corpus, "0..2", "true")
    with pytest.raises(ConfigError, match=r"replicas\[0\]: found only optional replicas"):
        prepare(file, tmp_path / "runs")
    assert prepare(file, tmp_path / "runs", "home-2.1").names == ["home-2.1"]
