"""The commit of a row: whether the code was as committed, and the commit at the start of training."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from hetero_pp.research.experiments import training
from hetero_pp.research.experiments.outcomes import commit, read_outcomes
from hetero_pp.research.experiments.training import Job, Training, train_job


def _git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("hetero_pp/loss.py", "stages/stage.py", "replica_groups/replica.py", "benchmarks/rows.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("as committed\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "All")
    return tmp_path


@pytest.mark.starts_processes
def test_code_as_it_was_committed(checkout: Path) -> None:
    """Rows are added to a file of the checkout while others are trained."""
    (checkout / "benchmarks" / "rows.jsonl").write_text("a row more\n")
    assert commit(checkout) == _git(checkout, "rev-parse", "--short", "HEAD").strip()


@pytest.mark.starts_processes
@pytest.mark.parametrize("path", ["hetero_pp/loss.py", "stages/stage.py", "replica_groups/new.py"])
def test_code_that_was_changed_since(path: str, checkout: Path) -> None:
    (checkout / path).write_text("another\n")
    assert commit(checkout) == _git(checkout, "rev-parse", "--short", "HEAD").strip() + " with changes"


@pytest.mark.starts_processes
def test_no_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"


@pytest.mark.starts_processes
def test_a_row_says_the_commit_that_it_began_with(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process trains with the code that it has imported, although its checkout may have changed since."""
    commits = iter(["began", "moved on"])
    monkeypatch.setattr(training, "commit", lambda: next(commits))
    training._own_commit.cache_clear()
    try:
        outcomes = [training.train_job(replace(job, seed=seed), training.Training(compiles=False)) for seed in (1, 2)]
    finally:
        training._own_commit.cache_clear()
    assert [outcome["commit"] for outcome in outcomes] == ["began", "began"]


@pytest.mark.starts_processes
def test_a_long_row_tells_how_far_it_is(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock goes on by half a minute at each look: the first line comes after a minute, the next two later."""
    job.rows.parent.mkdir(exist_ok=True)
    seconds = count(step=30)
    train_job(job, Training(compiles=False), clock=lambda: float(next(seconds)))
    [outcome] = read_outcomes(job.rows).values()
    assert len(outcome["validation_loss"]) == 3
    loss = outcome["validation_loss"][1]
    assert capsys.readouterr().err.splitlines() == [f"all, seed 2: loss {loss:.4f}, round 2/3"]
