"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import hypothesis
import pytest

# A deadline is a timing assertion, which shared machines fail at random.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

SLOW = (
    "program/test_only",
    "engines/",
    "equivalence/",
    "replicas/test_replicas_on_ranks",
    "experiments/",
    "data/",
    "benchmarks/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long and has few tests begins first, so that no core waits for it at the end."""
    items.sort(key=lambda item: next((n for n, part in enumerate(SLOW) if part in item.nodeid), len(SLOW)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: a garbage collection need not look at it again during every test."""
    gc.freeze()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files that are small and have something to learn in them."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["replica", "stage", "link", "round", "the", "of", "and", "trains", "sends", "waits"]
    for number in range(20):
        order = random.Random(number)
        (folder / f"{number:02d}.txt").write_text(" ".join(order.choice(words) for _ in range(600)))
    return folder
