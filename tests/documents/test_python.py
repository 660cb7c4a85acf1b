"""The Python of the pages runs: the blocks of a page one after another, beside the YAMLs that it shows.

If a page applies patches of docs/patches, it runs in a patched copy of the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.outer.methods import METHODS

ROOT = Path(__file__).parents[2]
PACKAGES = ("hetero_pp", "stages", "replica_groups")


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


PYTHON = [page for page in sorted((ROOT / "docs").glob("*.md")) if _blocks(page, "python")]
PATCHED = [page for page in PYTHON if "git apply" in "".join(_blocks(page, "bash"))]
NO_RENDERING = """
from rendering import draw_placeholder
from hetero_pp.program.report import recorder

recorder.draw_losses = draw_placeholder
"""
TABLES = ROOT / "docs" / "experiments.md"


def test_there_are_such_pages() -> None:
    shown = "\n".join(block for page in PATCHED for block in _blocks(page, "bash"))
    applied = set(re.findall(r"^git apply (\S+)", shown, re.MULTILINE))
    assert applied == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "patches").iterdir()}
    assert {"notebooks.md", "extending.md"} <= {page.name for page in PYTHON}
    assert "extending.md" in {page.name for page in PATCHED}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a reader's working folder: the repository's root, with the YAMLs saved under their names."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PYTHON if page not in PATCHED], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    for text in _blocks(page, "yaml"):
        (folder / f"{YAML(typ='safe').load(text)['name']}.yaml").write_text(text)
    shown: dict[str, object] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page.name, "exec"), shown)


@pytest.mark.starts_processes
@pytest.mark.parametrize("page", PATCHED, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_once_its_patches_are_applied(page: Path, folder: Path, corpus: Path) -> None:
    """They train on a small corpus."""
    quickstart = (ROOT / "configs" / "quickstart.yaml").read_text()
    (folder / "configs").unlink()
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.yaml").write_text(quickstart.replace("standard-library", str(corpus)))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)  # with bytecode, which Python compiles again where patched
    path = os.pathsep.join(map(str, (folder, ROOT / "tests")))
    elsewhere = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PYTHONPATH": path}
    shown = [line for block in _blocks(page, "bash") for line in block.splitlines()]
    commands = [line for line in shown if line.split()[:2] == ["git", "apply"]]
    shutil.copytree(ROOT / "docs" / "patches", folder / "docs" / "patches")
    for command in commands:
        back = re.findall(r"`(git apply -R .*?)`", command)  # git silently skips what is outside its folder
        for line in (command, f"{back[0]} --check"):
            done = subprocess.run(line, shell=True, cwd=folder, env=elsewhere, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
    (folder / "page.py").write_text("\n".join([NO_RENDERING, *_blocks(page, "python")]))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=folder, env=elsewhere, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_the_page_about_tables_names_the_embedding_of_the_papers_rows_and_that_of_its_own() -> None:
    [table] = [content for text in _blocks(TABLES, "yaml") if "rows" in (content := YAML(typ="safe").load(text))]
    own = [row for row in table["rows"] if "rank" in row]
    papers = YAML(typ="safe").load((ROOT / "configs/experiments/het-pp/table1.yaml").read_text())["rows"]
    scale = YAML(typ="safe").load((ROOT / "configs/experiments/scales/micro.yaml").read_text())
    default = METHODS[scale["base"]["outer"]["method"]].embedding
    embeddings = {row.get("embedding", default) for row in papers if "paper" in row and "rank" in row}
    text = " ".join(TABLES.read_text().split())
    assert embeddings == {"coefficients"} and "For the paper's row, write `embedding: coefficients`" in text
    assert own and not any("embedding" in row for row in own)
    assert (
        BoundarySettings(rank=8).embedding == "free" and "train the whole token embedding, which is our default" in text
    )
