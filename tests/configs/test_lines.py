"""Lines of a YAML: their members, the links that pass them, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_pp.config.lines import WAYS
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError

RUN = """\
name: lined
outer: {rounds: 1}
links: {cable: {bandwidth: 50 Mbit/s, latency: 1 ms, jitter: 1 ms}}
lines:
  dsl: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 15 ms, jitter: 2 ms}
  fibre: {bandwidth: 1 Gbit/s, latency: 5 ms, up: 500 Mbit/s}
sites:
  house: {line: dsl, members: [home.1, home.2]}
replicas:
  - {name: dc, kind: datacenter, line: fibre}
  - {name: home, kind: participants, stages: {count: 4, line: dsl}, link: cable}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "lined.yaml"
    file.write_text(RUN)
    return file


def _spec(path: Path, *changes: str) -> RunSpec:
    return RunSpec(ConfigFile(path, changes).config, 256)


def test_a_line_for_each_machine_or_site(path: Path) -> None:
    lines = _spec(path).lines
    assert {name: line.members for name, line in lines.items()} == {
        "house": ("home.1", "home.2"),
        "dc": ("dc",),
        "home.0": ("home.0",),
        "home.3": ("home.3",),
    }
    assert [lines["dc"].bandwidth_of(way) for way in WAYS] == [500e6, 1e9]
    assert [lines["house"].bandwidth_of(way) for way in WAYS] == [20e6, 100e6]


def test_a_link_passes_the_lines_of_both_ends(path: Path) -> None:
    """Its latency and jitter are its own plus those of both lines."""
    link = _spec(path).links["home.0-1"]
    assert [line and line.name for line in link.lines("forward")] == ["home.0", "house"]
    assert [line and line.name for line in link.lines("backward")] == ["house", "home.0"]
    assert link.forward.latency == pytest.approx(0.001 + 2 * 0.015)
    assert link.forward.jitter == pytest.approx(0.001 + 2 * 0.002)
    assert link.bottleneck("forward") == 20e6
    assert link.forward.bandwidth == 50e6


def test_within_a_site_no_line_is_passed(path: Path) -> None:
    link = _spec(path).links["home.1-2"]
    assert not link.has_lines
    assert (link.forward.latency, link.bottleneck("forward")) == (0.001, 50e6)


def test_the_exchange_may_have_one(path: Path) -> None:
    link = _spec(path, "exchange.line=fibre").links["dc-exchange"]
    assert [line and line.name for line in link.lines("forward")] == ["dc", "exchange"]
    assert (link.bottleneck("forward"), link.bottleneck("backward")) == (500e6, 500e6)
    assert _spec(path).links["dc-exchange"].bottleneck("backward") == 1e9


def test_a_stage_may_have_another_line_than_its_group(path: Path) -> None:
    stages = "replicas.1.stages=[{layers: 1}, {layers: 1, line: fibre}, {layers: 2}]"
    lines = _spec(path, "sites={}", stages, "replicas.1.line=dsl").lines
    assert {name: line.kind for name, line in lines.items()} == {
        "dc": "fibre",
        "home.0": "dsl",
        "home.1": "fibre",
        "home.2": "dsl",
    }


def test_a_count_of_stages_is_their_number(path: Path) -> None:
    """With and without a line, the layers are the same."""
    for changes in ([], ["replicas.1.stages=4"]):
        replica = _spec(path, *changes).config.replicas[1]
        assert [len(layers) for layers in replica.layer_ranges(6)] == [2, 2, 1, 1]  # type: ignore[union-attr]


def test_the_run_is_the_same_behind_other_lines(path: Path) -> None:
    """Lines say where a machine is, not what it trains."""
    own = _spec(path).run
    for change in ("lines.dsl.up=1 Mbit/s", "sites={}", "replicas.0.line=dsl", "exchange.line=fibre"):
        assert _spec(path, change).run == own, change


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (
            "replicas.0.line=cable",
            "replicas[0].line",
            "found `cable`, expected one of the kinds under `lines`",
        ),
        ("replicas.1.stages.line=adsl", "replicas[1].stages.line", "found `adsl`, expected one of the kinds"),
        ("replicas.1.stages.kind=dsl", "replicas[1].stages.kind", "expected one of count, device, line"),
        ("exchange.line=adsl", "exchange.line", "found `adsl`"),
        ("sites.house.line=adsl", "sites.house.line", "found `adsl`"),
        ("sites.house.members=[home.7]", "sites.house.members", "found `home.7`, expected members or replicas"),
        (
            "sites.shed={line: dsl, members: [home]}",
            "sites.shed.members",
            "found home.1 at two sites",
        ),
        ("sites={dc: {line: dsl, members: [dc]}}", "sites.dc", "found `dc`, which is a member's name"),
        ("sites={../out: {line: dsl, members: [dc]}}", "sites", "found the site `../out`, expected a name of letters"),
        ("lines.dsl.up=1e400 Mbit/s", "lines.dsl.up", "that a number can hold"),
        ("lines.dsl.up=20", "lines.dsl.up", "expected a number and a unit such as `100 Mbit/s`"),
        ("lines.dsl.latency=-1 ms", "lines.dsl.latency", "expected a number and a unit"),
        ("lines.dsl.upload=1 Mbit/s", "lines.dsl.upload", "found an unknown key, expected one of bandwidth, down"),
    ],
)
def test_what_cannot_be_is_told(path: Path, change: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _spec(path, change)
    told = str(caught.value)
    assert told.startswith(f"--set {change}: ")
    assert key in told.replace("replicas.0", "replicas[0]").replace("replicas.1", "replicas[1]")
    assert message in told
