"""The Python that pages show runs: the blocks of a page one after the other, beside the YAMLs that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if _blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in _blocks(page, "yaml"):
        content = YAML(typ="safe").load(text)
        (tmp_path / f"{content['name']}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    shown: dict[str, object] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page.name, "exec"), shown)


def test_there_are_such_pages() -> None:
    assert "notebooks.md" in {page.name for page in PAGES}
