"""The file of outcomes: none is lost if several processes add at once, and damage is reported by line."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.outcomes import ROWS, add_outcome, read_outcomes


def _outcome(row: str, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "row": row,
        "seed": seed,
        "key": f"{row}/{seed}",
        "validation_loss": [2.0 + 1 / 3, 0.1 + 0.2],
        "diverged": False,
        "uncompressed": 1e-17,
        "compressed": None,
        "tokens": 10,
        "boundary_bytes_per_token": 16.0,
        **more,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "tiny" / ROWS


def test_what_is_added_is_read_and_the_first_outcome_of_a_row_stays(path: Path) -> None:
    assert read_outcomes(path) == {}
    one, other = _outcome("a", 1), _outcome("a", 2, diverged=True)
    add_outcome(path, other)
    add_outcome(path, one)
    add_outcome(path, _outcome("a", 1, tokens=20))
    assert read_outcomes(path) == {"a/1": one, "a/2": other}
    assert json.dumps(read_outcomes(path)["a/1"]) == json.dumps(one)


def test_lines_are_sorted_and_others_stay_as_they_are(path: Path) -> None:
    """Only the added line differs, and the lines of one row are neighbours."""
    for row, seed in (("b", 2), ("a", 10), ("c", 1), ("b", 1), ("a", 9)):
        before = path.read_text().splitlines() if path.exists() else []
        add_outcome(path, _outcome(row, seed))
        after = path.read_text().splitlines()
        assert [line for line in after if line in before] == before
    assert [json.loads(line)["key"] for line in after] == ["a/9", "a/10", "b/1", "b/2", "c/1"]


def _add_many(path: Path, row: str, start: Any) -> None:
    start.wait()
    for seed in range(25):
        add_outcome(path, _outcome(row, seed))


@pytest.mark.starts_processes
def test_none_is_lost_if_many_add_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    workers = [context.Process(target=_add_many, args=(path, row, start)) for row in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert read_outcomes(path).keys() == {f"{row}/{seed}" for row in "abcd" for seed in range(25)}


DAMAGES = {
    "half a line": (lambda text: text[:-30], ":2: found `{"),
    "two halves": (lambda text: text.replace("\n", "", 1), ":1: found `{"),
    "no text": (lambda text: text + "\udc80\n", ":3: found `"),
    "a merge that is not done": (lambda text: f"<<<<<<< HEAD\n{text}", ":1: found `<<<<<<< HEAD"),
    "a number": (lambda text: f"{text}\n\n7\n", ":5: found no `row`"),
    "no outcome": (lambda text: text.replace('"diverged"', '"merged"', 1), ":1: found no `diverged`"),
    "a row twice": (lambda text: text + text.splitlines()[0], ":3: found the row a/1 twice, expected it once: line 1"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_told_by_its_line_and_costs_no_outcome(damage: Any, words: str, path: Path) -> None:
    add_outcome(path, _outcome("a", 1))
    add_outcome(path, _outcome("b", 1))
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    damaged = path.read_bytes()
    for attempt in (lambda: read_outcomes(path), lambda: add_outcome(path, _outcome("c", 1))):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value).startswith(f"{path}{words}")
        assert "\n" not in str(error.value)
    assert path.read_bytes().startswith(damaged)
    assert json.loads(path.read_bytes().splitlines()[-1]) == _outcome("c", 1)


def test_a_file_that_cannot_be_read_is_one_line(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"rows\.jsonl: cannot be read"):
        read_outcomes(path)
