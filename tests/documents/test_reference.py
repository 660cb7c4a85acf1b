"""The generated pages of docs/reference/ match the program."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_up_to_date() -> None:
    """`make schema` writes it."""
    pages: dict[str, str] = runpy.run_path(str(DOCS / "generate_reference.py"))["pages"]()
    assert pages == {path.name: path.read_text() for path in (DOCS / "reference").iterdir()}
