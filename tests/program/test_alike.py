"""Groups with equal settings: predicted once, shown in one row, and in pictures and output of bounded size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from typer.testing import CliRunner

from hetero_pp.config import alike as alike_module
from hetero_pp.config.alike import alike, label_of, range_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.program.cli import app
from hetero_pp.simulator.charts import MOST_ROWS
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.rounds import fleets_of

YAML = """\
name: t
model: {preset: micro, vocabulary: 512}
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
inner: {steps: 3}
outer: {rounds: 2}
lines: {dsl: {up: 2 Mbit/s, down: 10 Mbit/s, latency: 5 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 8}
  - {name: home, kind: participants, count: COUNT, stages: {count: 2, line: dsl}, batch_size: 8, micro_batches: 4,
     boundary: {rank: 1/8}}
"""
UNEQUAL = """\
name: t
model: {preset: micro, vocabulary: 512}
outer: {rounds: 2}
replicas:
"""


def _written(folder: Path, corpus: Path, count: int) -> Path:
    path = folder / f"{count}.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)).replace("COUNT", str(count)))
    return path


def _unequal(folder: Path, count: int) -> Path:
    path = folder / "unequal.yaml"
    entry = "  - {{name: g{0}, kind: participants, stages: 2, batch_size: {0}}}\n"
    path.write_text(UNEQUAL + "".join(entry.format(number) for number in range(1, count + 1)))
    return path


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def _each_alone(spec: RunSpec) -> Sequence[Sequence[ReplicaSettings]]:
    return [[replica] for replica in spec.config.replicas]


def test_one_for_all_predicts_what_each_alone_does(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are equal to the bit, with names of one and two digits, and beside a replica of another kind."""
    spec = spec_of(ConfigFile(_written(tmp_path, corpus, 12)))
    together = predict(spec)
    fleets = [fleet.count for fleet in fleets_of(spec)]
    assert fleets == [1, 9, 3]  # however many groups there are
    monkeypatch.setattr(alike_module, "alike", _each_alone)
    monkeypatch.setattr("hetero_pp.simulator.rounds.alike", _each_alone)
    assert len(list(fleets_of(spec))) == 13
    apart = predict(spec)
    assert apart.utilization == pytest.approx(together.utilization)  # sums of the same numbers, in another order
    assert replace(apart, utilization=together.utilization) == together
    assert [replica.name for replica in together.replicas] == ["dc", *(f"home-{number}" for number in range(1, 13))]


def test_what_makes_a_group_another_one(tmp_path: Path, corpus: Path) -> None:
    path = _written(tmp_path, corpus, 4)

    def classes(*overrides: str) -> list[str]:
        return [label_of(replicas) for replicas in alike(spec_of(ConfigFile(path, overrides)))]

    assert classes() == ["dc", "home-1 .. home-4 (4 groups x 2 stages)"]
    shed = "sites={shed: {line: dsl, members: [home-2.0, home-2.1]}}"
    assert classes(shed) == ["dc", "home-1, home-3, home-4 (3 groups x 2 stages)", "home-2"]
    assert classes("replicas.1.name=anna", "replicas.1.count=2") == ["dc", "anna-1, anna-2 (2 groups x 2 stages)"]
    fleet = "simulate.fleets={home-3: {count: 5}}"
    assert classes(fleet) == ["dc", "home-1, home-2, home-4 (3 groups x 2 stages)", "home-3"]


@pytest.mark.parametrize(
    ("names", "range_"),
    [
        (["home"], "home"),
        (["home-1.0", "home-2.0"], "home-1.0, home-2.0"),
        (["home-9.0-1", "home-10.0-1", "home-11.0-1"], "home-9.0-1 .. home-11.0-1"),
        (["a-1", "a-3", "a-4"], "a-1, a-3, a-4"),
        (["anna", "ben", "carla", "dora", "emil"], "anna, ben, carla and 2 more"),
    ],
)
def test_names_in_a_row_are_a_range(names: list[str], range_: str) -> None:
    assert range_of(names) == range_


@pytest.mark.parametrize("command", ["simulate", "check", "plan"])
def test_output_does_not_grow_with_the_number_of_equal_groups(
    command: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--target-utilization", "0.01", "--write", tmp_path / "plan.yaml"] if command == "plan" else []
    few, many = (_run(command, _written(tmp_path, corpus, count), *options) for count in (12, 60))
    assert abs(len(many.splitlines()) - len(few.splitlines())) <= 10  # few groups make others wait, many do not
    assert not re.search(r"home-[3-8]\b", many)  # each row names the first and the last
    if command == "check":
        assert "home-1.1 .. home-60.1 " in many
        assert "home-1.0-1 .. home-60.0-1 " in many
    elif command == "simulate":
        assert "home-1 .. home-60 (60 groups x 2 stages)" in many
        assert many.count("home-1.1 .. home-60.1 ") == 3  # members, memory, lines
    else:
        assert many.count("home-1 .. home-60 (60 groups x 2 stages)") == 1


def _texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives every text of the pictures that are saved from now on."""
    said: list[str] = []
    save = Figure.savefig

    def read_and_save(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        said.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", read_and_save)
    return said


def test_a_chart_is_bounded_and_says_what_it_leaves_out(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, chart = _texts(monkeypatch), tmp_path / "chart.png"
    _run("simulate", _unequal(tmp_path, 40), "--chart", chart)
    assert imread(chart).shape[0] < 1500
    assert f"and {80 - MOST_ROWS} more" in said  # members
    assert f"and {40 + 80 - MOST_ROWS} more" in said  # links
    said.clear()
    _run("simulate", _written(tmp_path, corpus, 40), "--chart", chart)
    assert "line of home-1.0 .. home-40.0" in said
    assert not any("more" in text for text in said)
    assert any(re.fullmatch(r"→ .* kB  ← .* kB \(limited by its access lines\)", text) for text in said)
