"""The site has every page in its navigation, and its pages of results have the tables, with bars beside the cells."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import conf
import papers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = [
    "| row | paper, % | ours, % |",
    "|---|---|---|",
    "| base | +0.0 | +0.0 |",
    "| better |  | -5.0 |",
    "| worse | +4.0 | +10.0 |",
    "",
    "| claim | verdict | 95 % interval |",
    "|---|---|---|",
    "| it helps | holds | +0.100 to +0.200 nats |",
    "| one more | one seed | -0.014 nats |",
]


def test_bars_of_a_column_have_one_scale_around_zero() -> None:
    shown = [
        [(found[1], float(found[2]), float(found[3])) for found in re.finditer(_RECT, line)]
        for line in papers.with_bars(TABLE)
    ]
    middle = papers._WIDTH / 2
    assert shown[2] == [("theirs", middle, 1.5), ("ours", middle, 1.5)]
    assert shown[3] == [("ours", middle / 2, middle / 2)]
    assert shown[4] == [("theirs", middle, pytest.approx(middle * 0.4, abs=0.1)), ("ours", middle, middle)]
    assert shown[8] == [("ours", middle * 1.5, middle / 2)]
    assert [line for line, bars in zip(papers.with_bars(TABLE), shown, strict=True) if not bars] == [
        line for line, bars in zip(TABLE, shown, strict=True) if not bars
    ]


_RECT = r'<rect class="(\w+)" x="([\d.]+)" width="([\d.]+)"'


def test_pages_of_results_have_all_tables_and_all_their_cells() -> None:
    pages = {name: papers.page(RESULTS, name) for name in papers.PAPERS}
    tables = sorted(path.with_suffix(".md") for path in RESULTS.glob("*/*/*.json"))
    assert len(tables) > 50
    for path in tables:
        name = path.parent.name if path.parent.name in papers.PAPERS else "ours"
        start = f"({papers.anchor(path.relative_to(RESULTS).with_suffix('').as_posix())})="
        part = re.sub(r"<svg.*?</svg> ", "", pages[name].partition(start)[2].partition("\n(")[0])
        rows = [line for line in path.read_text().splitlines() if line.startswith("| ")]
        assert [re.sub(r"\s+", " ", line) for line in part.splitlines() if line.startswith("| ")] == [
            re.sub(r"\s+", " ", line) for line in rows
        ], path


def test_links_to_tables_lead_to_the_pages_of_results() -> None:
    source = [
        "[one](../benchmarks/results/micro/het-pp/table5a.md), [two](../benchmarks/results/ladder/beyond/ladder.md)"
    ]
    conf._change(None, "docs/results", source)  # type: ignore[arg-type]
    assert source == ["[one](results/het-pp.md#micro-het-pp-table5a), [two](results/ours.md#ladder-beyond-ladder)"]


def test_the_navigation_has_every_page() -> None:
    shown = "".join(conf._navigation()).splitlines()
    pages = [path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert {*pages} <= {*shown}
    assert ":caption: Tutorials" in shown
