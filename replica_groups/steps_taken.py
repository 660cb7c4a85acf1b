"""How many inner steps a replica has taken, as each of its members knows it.

Where a round is so many steps, that follows from the round. Where it is so much time, it is part of a member's state:
which batch comes next, and how many steps the next round probably has.
"""

from __future__ import annotations

import json
from pathlib import Path

_FILE = "steps.json"


class StepsTaken:
    """Steps of a replica until now."""

    def __init__(self, of_each_round: int | None) -> None:
        """`of_each_round`: H, where all rounds have as many; else None."""
        self._of_each_round = of_each_round
        self._total = 0
        self.last: int | None = None
        """In its last round; None before its first."""

    def before(self, round_: int) -> int:
        """The number of a round's first step, over the run."""
        return self._total if self._of_each_round is None else (round_ - 1) * self._of_each_round

    def end_round(self, steps: int) -> None:
        """A round of so many steps is over."""
        self._total += steps
        self.last = steps

    def save(self, folder: Path) -> None:
        """Write what does not follow from the round."""
        if self._of_each_round is None:
            (folder / _FILE).write_text(json.dumps({"total": self._total, "last": self.last}))

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        if self._of_each_round is None:
            saved = json.loads((folder / _FILE).read_text())
            self._total, self.last = saved["total"], saved["last"]
