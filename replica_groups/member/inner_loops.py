"""Inner loops of a member: their length, the steps that its replica has taken, and the loop trained ahead of a round.

The saved state has the number of steps, and the inputs with which the loop was trained, but not the loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.data.batches import Share
from hetero_pp.messages.messages_pb2 import MemberRound, RoundRecord
from hetero_pp.model.learning_rates import LearningRates
from replica_groups.engines.ranks import ALONE, Ranks
from stages.worker import Timing

_STEPS_FILE, _INPUTS_FILE = "steps.json", "inputs.json"


class StepsTaken:
    """Number of inner steps that a replica has taken, as known to each of its members.

    If rounds have a fixed number of steps, it follows from the round. If rounds have a fixed time, it is part of the
    saved state. It determines the next batch and the expected number of steps of the next round. That expectation
    is the step count of the last record that includes the replica. Thus all stages of a group agree on it, as does a
    member that takes over a slot.
    """

    def __init__(self, replica: str, of_each_round: int | None, overlaps: bool = False) -> None:
        """`of_each_round`: the replica's steps in every round; None if rounds have a fixed time.

        With `overlaps` a round is trained before the record of the one before is known.
        """
        self.replica = replica
        self._of_each_round = of_each_round
        self._lag = 1 + overlaps  # rounds from the newest record that is known to the round that is trained
        self._tokens: dict[int, int] = {}  # round -> tokens of the run after it, of the newest records
        self._round = 0
        self._total = 0
        self.last: int | None = None  # steps of the last round that included the replica; None before the first

    def before(self, round_: int) -> int:
        """Return the number of a round's first step, counted over the run."""
        return self._total if self._of_each_round is None else (round_ - 1) * self._of_each_round

    def end_round(self, steps: int | None, record: RoundRecord) -> None:
        """Add this member's `steps` of a finished round, included or not; None: those that the record includes."""
        counted = next((one.steps for one in record.contributions if one.replica == self.replica), None)
        self._round = record.round
        self._tokens = {before: one for before, one in self._tokens.items() if before == record.round - 1}
        self._tokens[record.round] = record.tokens
        self._total += steps if steps is not None else counted or 0
        self.last = self.last if counted is None else counted

    def catch_up(self, round_: int, record_of: Callable[[int], RoundRecord], by_tokens: bool = False) -> None:
        """Add the steps of rounds up to this one that the member missed, according to their records.

        `by_tokens`: the run ends after a number of tokens, so the newest records are needed in any case.
        """
        for missed in range(self._round + 1, round_ + 1) if self._of_each_round is None else ():
            self.end_round(None, record_of(missed))
        for known in range(max(1, round_ + 1 - self._lag), round_ + 1) if by_tokens else ():
            if known not in self._tokens:
                self._tokens[known] = record_of(known).tokens

    def inputs(self, round_: int, spec: RunSpec) -> RoundInputs:
        """Return the learning rates and the share of a round, as far as they are known."""
        known = max(0, round_ - self._lag)
        trained = known, self._tokens.get(known, 0)
        rates = spec.rates_in(round_, self.before(round_), self.last, self._of_each_round, trained)
        return rates, spec.share_of(self.replica, round_)

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
    timing: Timing = field(default_factory=Timing)

    def report(self, round_: int, device_bytes: int | None) -> MemberRound:
        """Return a report of a round with the times of its inner loop. Other times are to be filled in."""
        spent = self.timing
        return MemberRound(
            round=round_,
            compute_seconds=spent.compute,
            wait_seconds=spent.waited_previous + spent.waited_next,
            wait_previous_seconds=spent.waited_previous,
            wait_next_seconds=spent.waited_next,
            device_bytes=device_bytes,
        )


class RoundPosition(Enum):
    """Where a member is between the round that it holds and the next one."""

    CATCHING_UP = auto()  # theta, moments and error feedback may belong to different rounds
    AT_START = auto()  # theta, moments and error feedback are those after the round that it holds
    IN_ROUND = auto()  # the next round has begun; `undo` returns to its start


class OverlappedRound:
    """The inner loop of the next round, if this process trained it and can undo it (`loop`)."""

    def __init__(self) -> None:
        self.loop: InnerLoop | None = None
        self._inputs: dict[int, str] = {}  # inputs with which the last two rounds were trained

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


StepsOf = Callable[[str, int], int]
"""Function (replica, round) -> number of inner steps that the replica took in the round."""


class RoundLength:
    """Decides the end of an inner loop. A member asks before and after every inner step.

    With `steps`, every round has so many (H, or the replica's own), which all members know. With `steps_of`, a function
    of the round, it has as many as the replica took before, so that a repeated run reproduces the same bits. With
    `seconds`, it has as many as fit into this time since the round opened, including the time to contribute; at least
    one. All replicas thus contribute at about the same time, however slow their lines are, and none waits for the
    others.

    A step is the last if it and one more would not fit. Both are assumed to take the average step time of this round,
    or at the first step that of the previous round. In its first round a replica takes at least two steps, because it
    cannot estimate the step time before the second.

    Without any of these, as for later stages, the previous stage announces the last step.
    """

    def __init__(
        self,
        steps: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        steps_of: Callable[[int], int] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """With `ranks`, the first rank decides for all."""
        self._steps, self._seconds, self._steps_of = steps, seconds, steps_of
        self._clock, self._ranks = clock, ranks
        self._opened = self._began = clock()
        self._first = 0
        self._a_step: float | None = None
        self._to_contribute = 0.0

    def begin(self, elapsed: float, first: int = 0) -> None:
        """Note that the member starts a round, or step `first` of one, `elapsed` seconds after it was opened."""
        self._opened, self._first = self._clock() - elapsed, first

    def contributed(self, seconds: float) -> None:
        """Note that a contribution was handed in, `seconds` after the last step of its round."""
        self._to_contribute = seconds

    def is_last(self, round_: int, step: int) -> bool | None:
        """Return whether the step that begins now, counted from 0 in its round, is the last; None if unannounced."""
        if self._steps is not None or (self._seconds is None and self._steps_of is None):
            return None
        if self._ranks.world == 1:
            return self._decide(round_, step)
        decided = bytes([self._decide(round_, step)]) if self._ranks.is_first else None
        return self._ranks.broadcast_bytes(decided) != b"\0"

    def _decide(self, round_: int, step: int) -> bool:
        if self._steps_of is not None:
            return step + 1 >= self._steps_of(round_)
        now = self._clock()
        if step == self._first:
            self._began = now
        else:
            self._a_step = (now - self._began) / (step - self._first)
        assert self._seconds is not None
        left = self._seconds - (now - self._opened) - self._to_contribute
        return self._a_step is not None and 2 * self._a_step > left

    def is_over(self, step: int, told: bool) -> bool:
        """Return whether the inner loop ends with a step. `told`: whether the step was announced as the last."""
        return told if self._steps is None else step + 1 == self._steps


def round_length(spec: RunSpec, member: MemberSpec, ranks: Ranks, steps_of: StepsOf | None = None) -> RoundLength:
    """Return the round length of one member. `steps_of`, if set, gives the number of steps and overrides the clock."""
    inner, name = spec.config.inner, member.replica.name
    if inner.steps is not None:
        return RoundLength(spec.steps_of(name))
    if member.stage is not None and not member.stage.is_first:
        return RoundLength()
    of_round = None if steps_of is None else partial(steps_of, name)
    return RoundLength(seconds=inner.seconds, steps_of=of_round, ranks=ranks)
