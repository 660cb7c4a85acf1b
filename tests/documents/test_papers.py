"""docs/papers.md has every item of the papers, tests and files that exist, and today's verdicts.

WRITE_FIXTURES=1 writes the verdicts again.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from rewritten import WRITES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
RESULTS = ROOT / "benchmarks" / "results"
WORDS = {"holds": "hold", "does not hold": "not", "within noise": "within noise", "one seed": "one seed"}
TABLE = re.compile(r"(\]\(\.\./benchmarks/results/([\w/-]+)\.md\)): (\w[\w, ]*\w)")
ITEMS = {
    "Het-PP": ["Eq. 1", "Eq. 2", "Eq. 3", "Eq. 4", "Eq. 5", *(f"Figure {n}" for n in range(1, 4))]
    + [f"Table {n}" for n in (1, 2, 3, 4, "5a", "5b", "5c", "5d", 6, 7, 8, 9)],
    "SparseLoCo": ["Algorithm 1", "Figure 1", "Figure 2", *(f"Table {n}" for n in range(1, 10))],
    "DiLoCo": ["Algorithm 1", *(f"Figure {n}" for n in range(1, 12)), *(f"Table {n}" for n in range(1, 7))],
}
"""Every numbered equation, algorithm, figure and table of each paper."""


def _rows(section: str) -> list[list[str]]:
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("paper", ITEMS)
def test_every_numbered_item_of_a_paper_has_a_row(paper: str) -> None:
    found = set[str]()
    for item, *_ in _rows(paper):
        for kinds, numbers in re.findall(r"(Eq\.|Algorithm|Tables?|Figures?) (\d+[a-d]?(?: and \d+)?)", item):
            found |= {f"{kinds.removesuffix('s')} {number}" for number in numbers.split(" and ")}
    assert found == set(ITEMS[paper])


def test_every_row_names_code_and_tests_that_exist() -> None:
    for paper in ITEMS:
        for item, code, tests, verdict in _rows(paper):
            named = re.findall(r"`([^`]+)`", code)
            assert named and all((ROOT / path).is_file() for path in named), item
            assert verdict, item
            names = re.findall(r"`([^`]+)`", tests)
            assert names or tests == "fixture", item
            for name in names:
                path, _, function = name.partition("::")
                tree = ast.parse((ROOT / path).read_text())
                assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_verdicts_are_those_of_the_papers_claims_today() -> None:
    def said(found: re.Match[str]) -> str:
        claims = json.loads((RESULTS / f"{found[2]}.json").read_text())["claims"]
        verdicts = [claim["verdict"] for claim in claims if not claim["ours"]]
        counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in WORDS.items() if verdict in verdicts]
        return f"{found[1]}: {', '.join(counts) or 'no claims'}"

    text = PAGE.read_text()
    assert len(TABLE.findall(text)) >= 40
    today = TABLE.sub(said, text)
    if WRITES:
        PAGE.write_text(today)
    assert PAGE.read_text() == today, f"{PAGE}: WRITE_FIXTURES=1 writes the verdicts of today"


def test_every_table_of_the_papers_is_there() -> None:
    linked = {found[1] for found in TABLE.findall(PAGE.read_text())}
    for family in ("het-pp", "sparseloco", "diloco"):
        tables = {path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.glob(f"*/{family}/*.json")}
        named = {table.partition("/")[2] for table in linked}
        assert {table.partition("/")[2] for table in tables} <= named, family
