"""Fixtures that several test folders share."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import flushing  # noqa: F401 (it replaces `os.fsync`)
import hypothesis
import pytest
from preloading import preload, start_shared_server, use_shared_server
from rendering import DRAWS, RECORDER, draw_placeholder

# A deadline is a timing assertion, which fails at random on shared machines.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

SLOW = (
    "fixtures/",
    "program/test_standby",
    "program/test_groups_form",
    "equivalence/test_resumption",
    "faults/",
    "program/test_join",
    "engines/",
    "exchange/test_kill_windows",
    "exchange/test_lies",
    "exchange/test_admission",
    "benchmarks/",
    "replicas/test_whole",
    "replicas/test_fast",
    "method/test_selection",
    "equivalence/test_tokens",
    "audit/test_shown_text",
    "package/",
    "documents/",
    "program/test_encoding",
    "experiments/test_brought",
    "program/test_fork_server",
    "program/test_only",
    "program/test_hosts_return",
    "link/",
    "store/",
    "audit/test_attacks",
    "devices/",
    "program/test_columns",
    "exchange/test_tls",
    "replicas/",
    "equivalence/",
    "architecture/",
    "simulator/test_predicted",
    "program/test_rehearse",
    "program/test_membership",
    "audit/",
    "stages/",
    "simulation/",
    "program/test_ended_early",
    "program/test_working_folder",
    "program/",
    "experiments/",
)
"""Parts of the paths of slow files, the slowest first. Other files start last: each takes a few seconds."""


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt, and let PyTorch compute with one thread in this process and in those that tests start.

    A shell's background job, such as `nohup make test &`, ignores SIGINT, which tests send. Tensors of tests are small
    and tests run beside each other, so that more threads mostly wait for each other, and burn CPU time meanwhile.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch reads it as it is imported
    # torch.compile trusts the processor's list of instructions, instead of compiling a program for each: 9 s of CPU.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (server := getattr(config, "workerinput", {}).get("fork server")) is not None:
        use_shared_server(*server)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a new worker of pytest-xdist use the fork server of this process, which controls the workers."""
    if "not starts_processes" not in node.config.option.markexpr:
        node.workerinput["fork server"] = _shared_server()


@functools.cache
def _shared_server() -> tuple[str, int] | None:
    return start_shared_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that no core waits for them at the end. A worker runs whole files."""
    items.sort(key=_when)


def _when(item: pytest.Item) -> int:
    path = item.nodeid.partition("::")[0]  # the rest may contain paths, too
    return next((n for n, part in enumerate(SLOW) if part in path), len(SLOW))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while tests are collected and imported, nor later among what is then in memory.

    Otherwise garbage collections would scan ever more objects: two seconds of CPU in each worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Collect garbage once at the end. pytest collects it five times, and each time scans what all tests have left."""
    gc.collect()
    gc.freeze()


# ---- make quick: tests that start no process ----

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events of process starts. multiprocessing emits none for its own starts."""

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
    """Fail a test without the mark `starts_processes` if the test or its fixtures start a process."""
    _started.clear()
    result = yield
    if _started and item.get_closest_marker("starts_processes") is None:
        pytest.fail(f"starts a process without the mark `starts_processes`: {_started[0]}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check the fixtures of a test."""
    return (yield from _require_mark(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check a test."""
    return (yield from _require_mark(item))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small text files with learnable content."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["replica", "stage", "link", "round", "the", "of", "and", "trains", "sends", "waits"]
    for number in range(20):
        order = random.Random(number)
        (folder / f"{number:02d}.txt").write_text(" ".join(order.choice(words) for _ in range(600)))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _preloading() -> None:
    """Let the fork server import what the processes of all tests need."""
    preload()


@pytest.fixture(scope="session", autouse=True)
def _no_rendering() -> Iterator[None]:
    """Write placeholders in place of the pictures of runs, also of runs that fixtures of modules train."""
    with pytest.MonkeyPatch.context() as patch:
        for name in DRAWS:
            patch.setattr(f"{RECORDER}.{name}", draw_placeholder)
        yield


@pytest.fixture(autouse=True)
def _rendering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render the pictures of runs in a test with the mark `renders`."""
    if request.node.get_closest_marker("renders") is not None:
        from hetero_pp.program.report import pictures

        for name in DRAWS:
            monkeypatch.setattr(f"{RECORDER}.{name}", getattr(pictures, name))


@pytest.fixture
def estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `reproduce` estimate each contribution once in all tests of this process."""
    from catalogs import estimate_once  # takes a second

    estimate_once(monkeypatch)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close at the end of a test what it leaves open."""
    with ExitStack() as stack:
        yield stack
