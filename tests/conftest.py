"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A deadline is a timing assertion, which shared machines fail at random.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

SLOW = (
    "faults/",
    "link/test_cut",
    "documents/",
    "stages/test_undo",
    "program/test_join",
    "engines/",
    "program/test_ended_early",
    "program/test_columns",
    "replicas/test_device",
    "simulation/",
    "data/",
    "experiments/",
    "program/test_only",
    "equivalence/",
    "store/",
    "replicas/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no core waits for it at the end: a worker has whole files."""
    items.sort(key=_when)


def _when(item: pytest.Item) -> int:
    path = item.nodeid.partition("::")[0]  # what follows may name paths, too
    return next((n for n, part in enumerate(SLOW) if part in path), len(SLOW))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a garbage collection need not look at it again during every test."""
    gc.freeze()


# ---- make quick: what starts no process ----

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events; what multiprocessing starts by itself has none."""

_started: list[str] = []


def _note_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(f"{event} {arguments[0] if arguments else ''}")


def _note_start(process: BaseProcess) -> None:
    _started.append(f"multiprocessing, {process.name}")
    _start(process)


sys.addaudithook(_note_event)
_start = BaseProcess.start
BaseProcess.start = _note_start  # type: ignore[method-assign, assignment]


def _require_mark(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that starts a process, or whose fixtures do, unless it is marked so."""
    _started.clear()
    result = yield
    if _started and item.get_closest_marker("starts_processes") is None:
        pytest.fail(f"starts a process without the mark `starts_processes`: {_started[0]}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """See _require_mark."""
    return (yield from _require_mark(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """See _require_mark."""
    return (yield from _require_mark(item))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files that are small and have something to learn in them."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["replica", "stage", "link", "round", "the", "of", "and", "trains", "sends", "waits"]
    for number in range(20):
        order = random.Random(number)
        (folder / f"{number:02d}.txt").write_text(" ".join(order.choice(words) for _ in range(600)))
    return folder
