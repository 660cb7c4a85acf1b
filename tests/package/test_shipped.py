"""An installed package uses its own files where the user has none, and never instead of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from hetero_pp.core.shipped import shipped
from hetero_pp.program.commands.options import _find
from hetero_pp.research.experiments.command import EXPERIMENTS, RESULTS, experiments_in, results_in
from hetero_pp.research.experiments.definition import Catalog

ROWS = Path("micro") / "rows.jsonl"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data files of an installed package. The current folder is empty."""
    own, here = tmp_path / "shipped", tmp_path / "here"
    for path in (own / EXPERIMENTS / "one.yaml", own / RESULTS / ROWS):
        path.parent.mkdir(parents=True)
        path.write_text("shipped")
    (own / "configs" / "quickstart.yaml").write_text("name: quickstart")
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("hetero_pp.core.shipped._installed", lambda: own)
    return own


def test_results_are_read_where_they_are_and_copied_before_they_change(own: Path) -> None:
    assert results_in(RESULTS, writes=False) == own / RESULTS
    assert not RESULTS.exists()
    assert results_in(RESULTS, writes=True) == RESULTS
    assert (RESULTS / ROWS).read_text() == "shipped"
    (RESULTS / ROWS).write_text("mine")
    assert results_in(RESULTS, writes=True) == results_in(RESULTS, writes=False) == RESULTS
    assert (RESULTS / ROWS).read_text() == "mine"


def test_a_checkout_reads_its_experiments_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert experiments_in(EXPERIMENTS) == shipped(str(EXPERIMENTS))
    assert Catalog(experiments_in(EXPERIMENTS)).experiments


def test_folders_of_the_user_come_first(own: Path) -> None:
    assert experiments_in(EXPERIMENTS) == own / EXPERIMENTS
    assert experiments_in(Path("tables")) == Path("tables")
    assert results_in(Path("tables"), writes=True) == Path("tables")
    assert not Path("tables").exists()
    EXPERIMENTS.mkdir(parents=True)
    assert experiments_in(EXPERIMENTS) == EXPERIMENTS


@pytest.mark.parametrize("name", ["quickstart", "configs/quickstart.yaml"])
def test_a_run_is_named_or_given(own: Path, name: str) -> None:
    assert _find(Path(name)) == own / "configs" / "quickstart.yaml"
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("name: mine")
    assert _find(Path(name)) == Path(name)


def test_an_unknown_name_is_told_the_shipped_ones(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        _find(Path("quickstrat"))
    assert "quickstrat: found no such file, expected a YAML or one of the shipped quickstart" in capsys.readouterr().err
    for path in (Path("quickstart.yaml"), Path("x" * 5000 + ".yaml")):  # a path: the command says why it cannot be read
        assert _find(path) == path


def test_the_repository_uses_its_own_files() -> None:
    assert (shipped("configs") / "quickstart.yaml") == Path(__file__).parents[2] / "configs" / "quickstart.yaml"
