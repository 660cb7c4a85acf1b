"""Every test that pages of claims name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("failures.md", "security.md", "methods.md", "papers.md")]
NAMED = sorted({name for page in PAGES for name in re.findall(r"`(tests/[^`]+)`", page.read_text())})


def _tests_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    found = _tests_of(ROOT / path)
    assert found if not function else function in found


def test_some_are_named() -> None:
    assert all(page.read_text().count("`tests/") > 5 for page in PAGES)
