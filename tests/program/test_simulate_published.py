"""Published numbers beside predicted ones, and rows of changed keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asking import ask, sets

from hetero_pp.config.predictions import PublishedNumber
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.prediction import predict

CONFIGS = Path(__file__).parents[2] / "configs"
YAML = """\
name: t
model: {preset: micro, vocabulary: 512}
data: {sequence_length: 32, validation_sequences: 8}
inner: {steps: 5}
outer: {rounds: 4}
links:
  home: {bandwidth: 1 Mbit/s}
replicas:
  - {name: one, kind: datacenter, batch_size: 8, uplink: home}
  - {name: two, kind: datacenter, batch_size: 8, uplink: home}
simulate:
  published:
    - {what: rounds, value: 8, where: somewhere}
    - {what: replicas.two.sent_bytes, value: 1 kB, where: Table 2, when: {outer.compression.density: 1/64}}
    - {what: utilization.relative, value: 99.9 %, bound: at least, where: text,
       when: {links.home.bandwidth: 1000 kbit/s}}
    - {what: days, value: 1e6, bound: at most, where: text, when: {links.home.bandwidth: 1 Gbit/s}}
"""
ROWS = """\
  rows:
    as it is: {}
    sparser, faster: {outer.compression.density: 1/64, links.home.bandwidth: 1 Gbit/s}
"""


USE = "utilization.relative"


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(YAML)
    return path


def test_numbers_are_compared_where_the_configuration_is_theirs(yaml: Path) -> None:
    found = predict(spec_of(ConfigFile(yaml)))
    rounds, use = found.published
    assert (rounds.what, rounds.published, rounds.ratio, rounds.holds) == ("rounds", 8, 0.5, None)
    assert (use.published, use.predicted, use.holds) == (0.999, found.utilization["relative"], False)
    faster = predict(spec_of(ConfigFile(yaml, ["links.home.bandwidth=1 Gbit/s", "outer.compression.density=1/64"])))
    rounds, sent, days = faster.published
    assert sent.published == 1000
    assert sent.predicted == faster.replicas[1].sent_bytes
    assert days.holds is True


def test_screen_and_json_show_them(yaml: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, out, errors = ask("simulate", yaml, "--json", str(path))
    assert code == 0, errors
    [line] = [line for line in out.splitlines() if line.strip().startswith("rounds")]
    assert line.split()[-3:] == ["8", "4", "0.5"]
    [line] = [line for line in out.splitlines() if line.strip().startswith(USE)]
    assert "≥ 99.9%" in line
    assert line.split()[-1] == "no"
    content: dict[str, Any] = json.loads(path.read_text())
    assert [(one["what"], one["holds"]) for one in content["published"]] == [("rounds", None), (USE, False)]
    assert content["published"][0]["ratio"] == 0.5


def test_rows_change_several_keys_at_once(yaml: Path, tmp_path: Path) -> None:
    yaml.write_text(YAML + ROWS)
    path, chart = tmp_path / "out.json", tmp_path / "out.png"
    code, out, errors = ask("simulate", yaml, "--json", str(path), "--chart", str(chart))
    assert code == 0, errors
    assert "sparser, faster" in out
    [points] = json.loads(path.read_text())["curves"].values()
    assert [point["value"] for point in points] == ["as it is", "sparser, faster"]
    assert points[0]["sent_bytes"] > points[1]["sent_bytes"]
    assert [len(point["published"]) for point in points] == [2, 3]
    assert chart.stat().st_size > 10_000
    overrides = ["links.home.bandwidth=1 Gbit/s", "outer.compression.density=1/64"]
    alone = predict(spec_of(ConfigFile(yaml, overrides)))
    assert points[1]["round_seconds"] == alone.round_seconds


@pytest.mark.parametrize(("value", "number"), [("94.5 %", 0.945), ("70 s", 70), ("5.5 MB", 5.5e6), (163, 163)])
def test_values_are_written_as_papers_write_them(value: str | int, number: float) -> None:
    entry = PublishedNumber.model_validate({"what": "x", "value": value, "where": "y"})
    assert entry.value == pytest.approx(number)
    assert PublishedNumber.model_validate(entry.model_dump(mode="json")) == entry


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("published=[{what: loss, value: 2.73, where: x}]", "found `loss`, expected a number of `--json`"),
        (
            "published=[{what: utilization, value: 1, where: x}]",
            "found `utilization`, expected the path of a number in",
        ),
        ("published=[{what: days, value: long, where: x}]", "found `long`, expected a number, a ratio such as"),
        ("published=[{what: days, value: 1, where: x, when: {inner.stops: 1}}]", "expected a key of this file"),
        ("rows={a: {inner.stops: 3}}", "simulate.rows.a: inner.stops=3: found an unknown key"),
        ("rows={a: {}}; sweep=inner.steps=1", "simulate: found `rows` and `sweep`, expected only one"),
    ],
)
def test_mistakes_are_one_line(yaml: Path, changes: str, words: str) -> None:
    code, _, errors = ask("simulate", yaml, *sets(*(f"simulate.{change}" for change in changes.split("; "))))
    assert (code, errors.count("\n")) == (2, 1)
    assert words in errors


@pytest.mark.parametrize("bandwidth", ["100 Mbit/s", "1 Gbit/s"])
def test_the_claim_of_97_percent_holds_as_it_is_assumed(bandwidth: str) -> None:
    """Het-PP, section 3.1, at the ends of Figure 2: utilization relative to that of free links."""
    overrides = [f"links.hop.bandwidth={bandwidth}", "replicas.1.boundary.rank=1/8"]
    [claim] = predict(spec_of(ConfigFile(CONFIGS / "paper" / "het_pp_figure2.yaml", overrides))).published
    assert claim.holds
