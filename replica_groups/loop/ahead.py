"""Inner loops that were trained before the round before them was decided, and whether they are still valid."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.data.shares import Share
from hetero_pp.model.learning_rates import LearningRates
from stages.activity import Timing

_FILE = "terms.json"

Terms = tuple[LearningRates, Share]
"""Learning rates and share of the text with which a round is trained. They may change until it is decided."""


@dataclass(frozen=True)
class InnerLoop:
    """An inner loop that has been trained."""

    steps: int
    timing: Timing


class Ahead:
    """The inner loop of the next round, if this process trained it and can undo it (`loop`)."""

    def __init__(self) -> None:
        self.loop: InnerLoop | None = None
        self._terms: dict[int, str] = {}
        """Terms with which the last two rounds were trained."""

    def trained(self, round_: int, terms: Terms) -> None:
        """Note with what a round was trained."""
        self._terms = {before: one for before, one in self._terms.items() if before == round_ - 1}
        self._terms[round_] = repr(terms)

    def is_valid(self, round_: int, terms: Terms) -> bool:
        """Return whether a round was trained with these terms."""
        return self._terms.get(round_) == repr(terms)

    def save(self, folder: Path) -> None:
        """Write the terms to a member checkpoint."""
        (folder / _FILE).write_text(json.dumps(self._terms), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore the terms from a member checkpoint, if it has some. The loop is not in it."""
        if (folder / _FILE).exists():
            terms = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            self._terms = {int(number): one for number, one in terms.items()}
