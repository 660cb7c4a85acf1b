"""Fixtures that several folders of tests share."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis
import pytest

# A deadline is a timing assertion, which shared machines fail at random.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files that are small and have something to learn in them."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["replica", "stage", "link", "round", "the", "of", "and", "trains", "sends", "waits"]
    for number in range(20):
        order = random.Random(number)
        (folder / f"{number:02d}.txt").write_text(" ".join(order.choice(words) for _ in range(600)))
    return folder
