"""Sizes of the packages and of the whole product stay within `budgets.yaml`, and its limits only fall.

Lines are all lines of a file. Generated files and uPlot are left out. A line of code is no blank line, no comment, no
import, and no part of a docstring. WRITE_FIXTURES=1 lowers limits to today's size, and never raises them.
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("budgets.yaml")
BUDGETS: dict[str, dict[str, Any]] = yaml.safe_load(TABLE.read_text())
SUFFIXES = {".py", ".proto", ".js", ".css", ".html"}
SLACK = 100
"""Lines that a limit may be above the size; in the ratios of the whole product, 5 %."""


@cache
def _files() -> dict[Path, int]:
    """Return the lines of each file by hand."""
    found = chain.from_iterable((ROOT / folder).rglob("*") for folder in ("hetero_pp", "stages", "replica_groups"))
    return {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in sorted(found)
        if path.suffix in SUFFIXES and "_pb2" not in path.name and path.stem != "uplot"
    }


def _room(path: Path) -> str:
    """Return the package whose budget a file uses: the longest of the table's paths that leads to it."""
    places = [(part, name) for name, budget in BUDGETS.items() for part in budget.get("paths", ())]
    parts = [one for one in places if path == Path(one[0]) or Path(one[0]) in path.parents]
    assert parts, f"{path} is in no package of {TABLE.name}"
    return max(parts, key=lambda one: len(one[0]))[1]


def _of_the_whole() -> dict[str, float]:
    """Return the measures of all Python, by their names in the table."""
    functions: list[int] = []
    lines = code = imports = 0
    for path, length in _files().items():
        if path.suffix != ".py":
            continue
        text = (ROOT / path).read_text()
        tree, other = ast.parse(text), set[int]()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or 0) - node.lineno + 1
                other.update(range(node.lineno, (node.end_lineno or 0) + 1))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                other.update(range(node.lineno, (node.end_lineno or 0) + 1))
        lines += length
        each = enumerate(text.splitlines(), 1)
        code += sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in other for n, line in each)
    return {
        "files": len(_files()),
        "functions per 1,000 lines of code": 1000 * len(functions) / code,
        "median lines of a function": median(functions),
        "import lines in percent": 100 * imports / lines,
    }


@cache
def _sizes() -> dict[str, float]:
    rooms = dict.fromkeys((name for name, budget in BUDGETS.items() if "paths" in budget), 0)
    for path, length in _files().items():
        rooms[_room(path)] += length
    return {**rooms, "all Python": sum(n for path, n in _files().items() if path.suffix == ".py"), **_of_the_whole()}


def _largest(name: str) -> Iterator[str]:
    own = {path: n for path, n in _files().items() if "paths" not in BUDGETS[name] or _room(path) == name}
    for path in sorted(own, key=lambda path: -own[path])[:5]:
        yield f"{own[path]:6} {path}"


def _complaint(name: str, size: float) -> str:
    """Return what is wrong with a size; empty if it is as the table says."""
    budget = BUDGETS[name]
    if "at_least" in budget:
        is_over, is_under = size < budget["at_least"], False
        limit = budget["at_least"]
    else:
        limit = budget["limit"]
        slack = SLACK if "paths" in budget or name == "all Python" else 0.05 * limit
        is_over, is_under = size > limit, limit - size > slack
    if is_over:
        return "\n".join([f"{name}: {size:g}, limit {limit}. Remove, or raise it in {TABLE.name}.", *_largest(name)])
    return f"{name}: {size:g}, limit {limit}. WRITE_FIXTURES=1 lowers it." if is_under else ""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_package_stays_within_its_budget(name: str) -> None:
    if os.environ.get("WRITE_FIXTURES") == "1" and "limit" in BUDGETS[name]:
        _lower(name, _sizes()[name])
    assert not (complaint := _complaint(name, _sizes()[name])), complaint


def _lower(name: str, size: float) -> None:
    """Lower a limit to today's size: lines rounded up to 50, other measures to a tenth."""
    in_lines = "paths" in BUDGETS[name] or name == "all Python"
    lowered = 50 * math.ceil(size / 50) if in_lines else math.ceil(10 * size) / 10
    if lowered < BUDGETS[name]["limit"]:
        line = re.compile(rf"^({re.escape(name)}:\n(?:  .*\n)*?  limit: )[\d.]+", re.MULTILINE)
        TABLE.write_text(line.sub(rf"\g<1>{lowered:g}", TABLE.read_text()))
        BUDGETS[name]["limit"] = lowered
