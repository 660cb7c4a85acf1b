"""All output fits 80 columns, in a terminal and in a pipe, and no quantity is cut or broken across lines."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from catalogs import compute_once
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from hetero_pp.program import plan, simulate
from hetero_pp.program.cli import app
from hetero_pp.program.report.output import fold, fold_names, tell
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.research.experiments.result import print_result

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results" / "micro"
WIDE = 400
"""Columns in which no line has to be wrapped."""

Environment = Mapping[str, str | None]
PIPED: Environment = {"FORCE_COLOR": None, "COLUMNS": None}
TERMINAL: Environment = {"FORCE_COLOR": "1", "COLUMNS": "80"}
WITH_ROOM: Environment = {"FORCE_COLOR": None, "COLUMNS": str(WIDE)}

NUMBER, UNIT = r"[+-]?\d[\d,.:]*(?:e[+-]\d+)?", r"%|m?s|[kMGT]?B|[kMG]?bit/s|nats"
QUANTITY = re.compile(rf"(?<![\w./-]){NUMBER}(?: ?(?:{UNIT}))?(?![\w./-])")


def _printed(environment: Environment, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.stderr
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.stdout)


def _widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def _require_fit(*arguments: str, before: str = "\0") -> None:
    """Raise AssertionError if a command's output is cut, or breaks a quantity across lines.

    `before`: text up to which this is so; what follows is measured anew each time.
    """
    told = Counter(QUANTITY.findall(_printed(WITH_ROOM, *arguments).partition(before)[0]))
    assert told
    for environment in (PIPED, TERMINAL):
        printed = _printed(environment, *arguments).partition(before)[0]
        assert _widest(printed) <= 80
        assert "…" not in printed
        assert not told - Counter(QUANTITY.findall(printed))


@pytest.fixture
def computed_once(estimated_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute predictions, plans and estimates once for all widths."""
    compute_once(monkeypatch, (simulate, "predict"), (plan, "search_all"))


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize(
    "name",
    ["unequal_groups", "paper/sparseloco_figure2"],
)
def test_simulate(name: str) -> None:
    _require_fit("simulate", str(CONFIGS / f"{name}.yaml"))


@pytest.mark.usefixtures("computed_once")
def test_a_sweep_with_curves() -> None:
    varied = ["--sweep", "lines.dsl.up=1Mbit/s,1Gbit/s", "--curves", "replicas.1.boundary.rank=full,1/8"]
    _require_fit("simulate", str(CONFIGS / "quickstart.yaml"), *varied)


def test_check(corpus: Path, tmp_path: Path) -> None:
    data = ["--set", f"data.corpus={corpus}", "--set", "data.sequence_length=16"]
    _require_fit("check", str(CONFIGS / "mixed_engines.yaml"), *data, "--runs", str(tmp_path), before="OK    python")


@pytest.mark.usefixtures("computed_once")
def test_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that is written can be simulated."""
    monkeypatch.chdir(tmp_path)
    target = ["--target-utilization", "0.97"]
    _require_fit("plan", str(CONFIGS / "plan" / "unequal.yaml"), *target, "--write", "plan.yaml")
    _require_fit("simulate", "plan.yaml")


@pytest.mark.usefixtures("computed_once")
def test_the_list_of_experiments() -> None:
    _require_fit("reproduce", "--list", "--experiments", str(CONFIGS / "experiments"))


@pytest.mark.usefixtures("computed_once")
def test_what_an_experiment_would_cost() -> None:
    _require_fit("reproduce", "het-pp/table1", "--dry-run", "--experiments", str(CONFIGS / "experiments"))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: path.stem)
def test_the_table_of_an_experiment(path: Path) -> None:
    result = json.loads(path.read_text())

    def show(console: Console) -> None:
        print_result(console, result, path.relative_to(ROOT))

    narrow, wide = _shown(show, 80), _shown(show, WIDE)
    assert _widest(narrow) <= 80
    assert not Counter(QUANTITY.findall(wide)) - Counter(QUANTITY.findall(narrow))


@pytest.mark.parametrize("command", ["", *get_command(app).commands])  # type: ignore[attr-defined]
@pytest.mark.parametrize("environment", [PIPED, TERMINAL], ids=["piped", "terminal"])
def test_help(command: str, environment: Environment) -> None:
    printed = _printed(environment, *command.split(), "--help")
    assert _widest(printed) <= 80
    assert "…" not in printed


# ---- tables and sentences ----


def _shown(show: Callable[[Console], None], width: int, is_terminal: bool = False) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=is_terminal, color_system=None))
    return out.getvalue()


def _table(spare: tuple[str, ...] = ()) -> PlainTable:
    table = PlainTable(["name", "kind"], [f"number {one}" for one in range(5)], ["remark"], spare)
    numbers = [f"{one},234,567.89 Mbit/s" for one in range(5)]
    table.add_row(
        "replicas.home.boundary.rank", "participants", *numbers, "not representable: k = 0.67 of 64 dimensions"
    )
    table.add_row("[b]dc[/b]", "datacenter", *numbers)
    return table


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_columns_that_do_not_fit_follow_below(width: int) -> None:
    text = _shown(lambda console: console.print(_table()), width)
    assert _widest(text) <= width
    assert all(text.count(f"{one},234,567.89 Mbit/s") == 2 for one in range(5))
    assert text.count("remark") == 1
    assert text.count("[b]dc[/b]") == text.count("name")
    assert (text.count("name") == 1) == (width == 200)


def test_a_column_goes_before_a_text_is_folded() -> None:
    table = PlainTable(["link", "bandwidth"], ["now"], spare=["bandwidth"])
    table.add_row("neighbours.0 → exchange", "50 Mbit/s / 1 Gbit/s", "12.3 kB/s")
    assert "50 Mbit/s / 1 Gbit/s" in _shown(lambda console: console.print(table), 60)
    assert "bandwidth" not in _shown(lambda console: console.print(table), 50)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("of which the outer round 133.2 ms", 31, ["of which the outer round", "133.2 ms"]),
        ("home.0 carries 20 / 100 Mbit/s", 20, ["home.0 carries", "20 / 100 Mbit/s"]),
        ("row: k = 0.67 of 64", 9, ["row:", "k = 0.67 of", "64"]),
        ("written to /a/long/path/of/a/run", 12, ["written to", "/a/long/path/of/a/run"]),
        ("", 10, [""]),
    ],
)
def test_a_quantity_and_a_path_stay_whole(text: str, width: int, lines: list[str]) -> None:
    assert fold(text, width) == lines


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("replicas.replica.sent_bytes", 17, ["replicas.replica.", "sent_bytes"]),
        ("beyond/rank_for_bits", 12, ["beyond/rank_", "for_bits"]),
        ("Het-PP-Compress (1/2)*", 12, ["Het-PP-", "Compress", "(1/2)*"]),
        ("replicas.1.boundary", 12, ["replicas.", "1.boundary"]),
        ("0.125/0.25", 4, ["0.125/0.25"]),
    ],
)
def test_a_name_is_broken_between_its_parts(name: str, width: int, lines: list[str]) -> None:
    assert fold_names(name, width) == lines


def test_an_event_is_one_line_unless_a_terminal_shows_it() -> None:
    line = "round 3/16: home.1: training loss 4.2000, 12 s (waiting for neighbours 3 s), sent 1.2 MB"
    assert _shown(lambda console: tell(console, line), 40) == f"{line}\n"
    assert _shown(lambda console: tell(console, line), 40, is_terminal=True).splitlines() == [
        "round 3/16: home.1: training loss",
        "  4.2000, 12 s (waiting for neighbours",
        "  3 s), sent 1.2 MB",
    ]
