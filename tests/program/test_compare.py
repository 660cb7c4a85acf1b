"""`hetero-pp view --compare`: finished and unfinished runs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mixed_run import MIXED
from typer.testing import CliRunner

from hetero_pp import Run
from hetero_pp.program.cli import app


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Path]:
    """Return the folder of `over`, which is finished, and `open`, which has trained one of three rounds."""
    runs = tmp_path_factory.mktemp("runs")
    data = {"corpus": str(corpus)}
    with Run.from_yaml(MIXED, runs=runs, name="over", data=data, outer={"rounds": 2}) as over:
        over.train()
    boundary = {"boundary": {"rank": "1/2"}}
    with Run.from_yaml(MIXED, runs=runs, name="open", data=data, replicas={"home": boundary}) as membership_event:
        membership_event.round()
        yield runs


def _compare(runs: Path, chart: Path, *named: str) -> tuple[int, str, str]:
    arguments = ["view", *named, "--compare", str(chart), "--runs", str(runs)]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    return done.exit_code, done.stdout, done.stderr


def _rows(printed: str) -> dict[str, list[str]]:
    parts = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.splitlines()]
    return {first: cells for first, *cells in filter(None, parts) if len(cells) == 2}


def _summary(runs: Path) -> Any:
    return json.loads((runs / "over" / "summary.json").read_text())


def test_what_differs_and_what_was_reached(runs: Path, tmp_path: Path) -> None:
    chart = tmp_path / "compare.png"
    code, printed, errors = _compare(runs, chart, "over", str(runs / "open"))
    assert (code, errors) == (0, "")
    rows = _rows(printed)
    summary = _summary(runs)
    losses = [summary["initial_validation_loss"], *summary["validation_loss"]]
    best = min(range(len(losses)), key=losses.__getitem__)
    tokens = sum(one["tokens"] for one in summary["replicas"])
    assert list(rows)[:2] == ["outer.rounds", "replicas.home.boundary.rank"]  # only these and the names differ
    assert rows["outer.rounds"] == ["2", "3"]
    assert rows["rounds"] == ["2 of 2", "1 of 3"]
    assert rows["tokens"] == [f"{tokens:,}", f"{tokens // 2:,}"]
    assert rows["last validation loss"][0] == f"{losses[-1]:.4f}"
    assert rows["best validation loss"][0] == f"{losses[best]:.4f} (round {best})"
    assert rows["sent on the wire"][0] != rows["sent on the wire"][1]
    assert rows["tokens per second"][0] == f"{summary['tokens_per_second']:,.0f}"
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert f"The validation losses are drawn in {chart}." in " ".join(printed.split()).replace(" /", " /")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (["over"], "found one run, `over`, expected at least two"),
        (["over", "nope"], "RUNS: found no run nope that this host started, serves or joined: did you mean open?"),
        (["over", "RUNS/over"], "RUNS/over: found the run RUNS/over twice, expected different runs"),
    ],
)
def test_what_cannot_be_compared_is_one_line(runs: Path, named: list[str], told: str) -> None:
    code, printed, errors = _compare(runs, runs / "c.png", *(one.replace("RUNS", str(runs)) for one in named))
    assert (code, printed) == (2, "")
    assert errors == f"hetero-pp: {told.replace('RUNS', str(runs))}\n"
