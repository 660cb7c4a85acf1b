"""State of one replica from the reports of its inner steps. Only the losses of old rounds are kept."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hetero_pp.messages.messages_pb2 import InnerStep

STILL_TOLD = 8
"""Rounds after which a round is no longer reported on."""


@dataclass
class StepReports:
    """One inner step of a replica, merged from the reports of its first and last stage."""

    loss: float | None = None
    tokens: int = 0
    told_at: float | None = None
    """Time of the report with the tokens. A step that is trained again has another time; a repeated report does not."""


@dataclass(frozen=True)
class SettledRound:
    """A round without further reports. It takes four bytes per step, so that a run may have millions of steps."""

    losses: array[float]
    """Losses of the reported steps, in order; nan where unknown."""
    mean: float | None


@dataclass
class ReplicaState:
    name: str
    kind: str
    inner_steps: int | None
    """Inner steps of every round; None if they are not known beforehand."""
    rounds: dict[int, dict[int, StepReports]] = field(default_factory=dict)
    """Steps of recent rounds, by round and step number from 0."""
    settled: dict[int, SettledRound] = field(default_factory=dict)
    """Earlier rounds."""
    tokens: int = 0
    """Tokens of all steps, each step counted once."""
    trained: dict[int, int] = field(default_factory=dict)
    """Tokens of all steps trained for a round, counted as often as they were trained."""
    steps_done: int = 0
    """Inner steps over the whole run."""
    loss: float | None = None
    """Training loss of the latest step."""
    _latest: tuple[int, int] = (0, 0)
    """Round and number of the latest step."""
    _settled_steps: int = 0
    validation_loss: dict[int, float] = field(default_factory=dict)
    """Validation loss of the synced model by round, in the replica forward."""
    sha256: dict[int, str] = field(default_factory=dict)

    def apply(self, time: float, report: InnerStep) -> None:
        """Merge one report of an inner step. A repeated report replaces itself."""
        if report.round in self.settled:
            return
        step = self.rounds.setdefault(report.round, {}).setdefault(report.step, StepReports())
        if report.HasField("loss"):
            step.loss = report.loss
        if report.tokens:
            self.tokens += report.tokens - step.tokens
            if time != step.told_at:
                self.trained[report.round] = self.trained.get(report.round, 0) + report.tokens
            step.tokens, step.told_at = report.tokens, time
        if report.HasField("loss") and (report.round, report.step) >= self._latest:
            self._latest = report.round, report.step
            self.steps_done, self.loss = self.index(report.round, report.step) + 1, report.loss

    def keep(self, round_: int, steps: int, tokens: int) -> None:
        """Keep this many steps, of `tokens` each, of a round that closed.

        Further reported steps belong to an attempt that was discarded. Steps without a report were trained too: the
        report may still arrive, or it was lost with its process, which then resumed from a state after these steps.
        """
        if round_ in self.settled:
            return
        told = self.rounds.setdefault(round_, {})
        for number in range(steps):
            step = told.setdefault(number, StepReports())
            if not step.tokens:
                step.tokens = tokens
                self.tokens += tokens
        for number in [number for number in told if number >= steps]:
            self.tokens -= told.pop(number).tokens
        if self._latest[0] == round_ and self._latest[1] >= steps and told:
            self._latest = round_, steps - 1
            self.steps_done = self.index(*self._latest) + 1

    def settle(self, closed: int) -> None:
        """Keep only the losses of rounds long before the round that closed, because they get no further report."""
        for round_ in [one for one in self.rounds if one <= closed - STILL_TOLD]:
            told = self.rounds.pop(round_)
            self.settled[round_] = SettledRound(array("f", _losses(told)), _mean(told))
            self._settled_steps += _length(told)

    def index(self, round_: int, step: int) -> int:
        """Return the number of a step over the whole run, from 0, for a step of a recent round."""
        if self.inner_steps is not None:
            return (round_ - 1) * self.inner_steps + step
        before = sum(_length(steps) for other, steps in self.rounds.items() if other < round_)
        return self._settled_steps + before + step

    def tokens_until(self, round_: int) -> int:
        """Return the tokens of all steps up to a round that has just ended, without those of a later round."""
        later = (steps for other, steps in self.rounds.items() if other > round_)
        return self.tokens - sum(step.tokens for steps in later for step in steps.values())

    def steps(self, round_: int) -> int:
        """Return the number of reported steps of a round."""
        return len(self.settled[round_].losses) if round_ in self.settled else len(self.rounds.get(round_, ()))

    @property
    def last_round(self) -> int:
        """Last round with a reported step; 0 if there is none."""
        return max([*self.rounds, *self.settled], default=0)

    @property
    def last_validation_loss(self) -> float | None:
        """Last known validation loss."""
        return self.validation_loss[max(self.validation_loss)] if self.validation_loss else None

    def losses(self) -> Iterator[tuple[int, Sequence[float]]]:
        """Yield each round and the training losses of its steps, in order; nan where unknown."""
        for round_ in sorted([*self.rounds, *self.settled]):
            yield round_, self.settled[round_].losses if round_ in self.settled else _losses(self.rounds[round_])

    def round_loss(self, round_: int) -> float | None:
        """Return the mean training loss over the inner steps of a round."""
        return self.settled[round_].mean if round_ in self.settled else _mean(self.rounds.get(round_, {}))

    def last_round_loss(self) -> float | None:
        """Return the mean training loss of the latest step's round."""
        return self.round_loss(self._latest[0])


def _length(steps: dict[int, StepReports]) -> int:
    return max(steps, default=-1) + 1


def _losses(steps: dict[int, StepReports]) -> list[float]:
    return [math.nan if step.loss is None else step.loss for _, step in sorted(steps.items())]


def _mean(steps: dict[int, StepReports]) -> float | None:
    known = [step.loss for step in steps.values() if step.loss is not None]
    return fmean(known) if known else None
