"""Inner loops that a member has trained: the steps that its replica has taken, and the loop trained ahead of a round.

The saved state has the number of steps, and the inputs with which the loop was trained, but not the loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_pp.data.shares import Share
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.learning_rates import LearningRates
from stages.activity import Timing

_STEPS_FILE, _INPUTS_FILE = "steps.json", "inputs.json"


class StepsTaken:
    """Number of inner steps that a replica has taken, as known to each of its members.

    If rounds have a fixed number of steps, it follows from the round. If rounds have a fixed time, it is part of the
    saved state. It determines the next batch and the expected number of steps of the next round. That expectation
    is the step count of the last record that includes the replica. Thus all stages of a group agree on it, as does a
    member that takes over a slot.
    """

    def __init__(self, replica: str, of_each_round: int | None) -> None:
        """`of_each_round`: H if all rounds have a fixed number of steps, else None."""
        self._replica = replica
        self._of_each_round = of_each_round
        self._round = 0
        self._total = 0
        self.last: int | None = None
        """Steps of the last round that included the replica; None before the first."""

    def before(self, round_: int) -> int:
        """Return the number of a round's first step, counted over the run."""
        return self._total if self._of_each_round is None else (round_ - 1) * self._of_each_round

    def end_round(self, steps: int | None, record: RoundRecord) -> None:
        """Add this member's `steps` of a finished round, included or not; None: the round is undone."""
        self._follow(record, steps)

    def catch_up(self, round_: int, record_of: Callable[[int], RoundRecord]) -> None:
        """Add the steps of rounds up to this one that the member missed, according to their records."""
        for missed in range(self._round + 1, round_ + 1) if self._of_each_round is None else ():
            self._follow(record_of(missed), None)

    def _follow(self, record: RoundRecord, own: int | None) -> None:
        counted = next((one.steps for one in record.contributions if one.replica == self._replica), None)
        self._round = record.round
        self._total += own if own is not None else counted or 0
        self.last = self.last if counted is None else counted

    def known(self, round_: int) -> dict[str, Any] | None:
        """Return what is known before a round, to commit to it; None if it follows from the round."""
        return None if self._of_each_round is not None else {"first": self.before(round_), "last": self.last}

    def known_after(self, round_: int, steps: int) -> dict[str, Any] | None:
        """Return what is known after a round of this many steps, if its record includes them."""
        known = self.known(round_)
        return None if known is None else {"first": known["first"] + steps, "last": steps}

    def save(self, folder: Path, ahead: tuple[int, int] | None = None) -> None:
        """Write the counts, if they do not follow from the round.

        `ahead`: an undecided round and its steps, to write the counts after it if its record includes them.
        """
        if self._of_each_round is None:
            known = {"round": self._round, "total": self._total, "last": self.last}
            if ahead is not None:
                known = {"round": ahead[0], "total": self._total + ahead[1], "last": ahead[1]}
            (folder / _STEPS_FILE).write_text(json.dumps(known), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore the counts that `save` wrote."""
        if self._of_each_round is None:
            saved = json.loads((folder / _STEPS_FILE).read_text(encoding="utf-8"))
            self._round, self._total, self.last = saved["round"], saved["total"], saved["last"]


RoundInputs = tuple[LearningRates, Share]
"""Learning rates and share of the text with which a round is trained. They may change until it is decided."""


@dataclass(frozen=True)
class InnerLoop:
    """An inner loop that has been trained."""

    steps: int
    timing: Timing


class OverlappedRound:
    """The inner loop of the next round, if this process trained it and can undo it (`loop`)."""

    def __init__(self) -> None:
        self.loop: InnerLoop | None = None
        self._inputs: dict[int, str] = {}
        """Inputs with which the last two rounds were trained."""

    def trained(self, round_: int, inputs: RoundInputs) -> None:
        """Note with what a round was trained."""
        self._inputs = {before: one for before, one in self._inputs.items() if before == round_ - 1}
        self._inputs[round_] = repr(inputs)

    def is_valid(self, round_: int, inputs: RoundInputs) -> bool:
        """Return whether a round was trained with these inputs."""
        return self._inputs.get(round_) == repr(inputs)

    def save(self, folder: Path) -> None:
        """Write the inputs to a saved state."""
        (folder / _INPUTS_FILE).write_text(json.dumps(self._inputs), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore the inputs from a saved state, if it has some. The loop is not in it."""
        if (folder / _INPUTS_FILE).exists():
            inputs = json.loads((folder / _INPUTS_FILE).read_text(encoding="utf-8"))
            self._inputs = {int(number): one for number, one in inputs.items()}
