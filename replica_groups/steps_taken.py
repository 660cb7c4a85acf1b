"""How many inner steps a replica has taken, as each of its members knows it.

Where a round is so many steps, that follows from the round. Where it is so much time, it is part of a member's state:
which batch comes next, and how many steps the next round probably has. The latter is that of the last round that
counted the replica, as its record says: so all stages of a group know the same, and a member that takes the place of
another, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hetero_pp.messages.messages_pb2 import RoundRecord

_FILE = "steps.json"


class StepsTaken:
    """Steps of a replica until now."""

    def __init__(self, replica: str, of_each_round: int | None) -> None:
        """`of_each_round`: H, where all rounds have as many; else None."""
        self._replica = replica
        self._of_each_round = of_each_round
        self._round = 0
        self._total = 0
        self.last: int | None = None
        """In the last round that counted them; None before the first."""

    def before(self, round_: int) -> int:
        """The number of a round's first step, over the run."""
        return self._total if self._of_each_round is None else (round_ - 1) * self._of_each_round

    def end_round(self, steps: int, record: RoundRecord) -> None:
        """A round is over in which this member took so many: they are taken, whether the record counts them or not."""
        self._follow(record, steps)

    def catch_up(self, round_: int, record_of: Callable[[int], RoundRecord]) -> None:
        """Rounds up to this one are over that this member knows nothing of: what their records say of its replica."""
        for missed in range(self._round + 1, round_ + 1) if self._of_each_round is None else ():
            self._follow(record_of(missed), None)

    def _follow(self, record: RoundRecord, own: int | None) -> None:
        counted = next((one.steps for one in record.contributions if one.replica == self._replica), None)
        self._round = record.round
        self._total += own if own is not None else counted or 0
        self.last = self.last if counted is None else counted

    def save(self, folder: Path) -> None:
        """Write what does not follow from the round."""
        if self._of_each_round is None:
            known = {"round": self._round, "total": self._total, "last": self.last}
            (folder / _FILE).write_text(json.dumps(known), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        if self._of_each_round is None:
            saved = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            self._round, self._total, self.last = saved["round"], saved["total"], saved["last"]
