"""What is known of one replica from what it tells of its inner steps: of rounds that are long over, only the losses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hetero_pp.messages.messages_pb2 import InnerStep

STILL_TOLD = 8
"""Rounds after which nobody tells more of one."""


@dataclass
class Step:
    """One inner step of a replica, merged from what its first and its last stage tell."""

    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    tokens: int = 0
    told_at: float | None = None
    """When its tokens were: a step that is trained again is told at another time, one that is told twice is not."""


@dataclass(frozen=True)
class SettledRound:
    """A round of which nothing more is told: four bytes a step, so that a run may take millions."""

    losses: array[float]
    """Of the steps that were told of, in order; nan where it is not known."""
    mean: float | None


@dataclass
class ReplicaState:
    """What is known of one replica."""

    name: str
    kind: str
    inner_steps: int | None
    """Of every round, where they are known beforehand."""
    rounds: dict[int, dict[int, Step]] = field(default_factory=dict)
    """By round, its steps by number, from 0: of the last rounds."""
    settled: dict[int, SettledRound] = field(default_factory=dict)
    """Those before."""
    tokens: int = 0
    """Of all steps, each once."""
    trained: dict[int, int] = field(default_factory=dict)
    """By round, the tokens of all steps that were trained for it, however often."""
    steps_done: int = 0
    """Over the whole run."""
    loss: float | None = None
    """Of the latest step."""
    _latest: tuple[int, int] = (0, 0)
    """Its round and number."""
    _settled_steps: int = 0
    validation_loss: dict[int, float] = field(default_factory=dict)
    """By round: of the synced model, in this replica's own forward."""
    sha256: dict[int, str] = field(default_factory=dict)

    def apply(self, time: float, report: InnerStep) -> None:
        """Merge one part of an inner step; a part that is told again replaces itself."""
        if report.round in self.settled:
            return
        step = self.rounds.setdefault(report.round, {}).setdefault(report.step, Step())
        for name in ("loss", "gradient_norm", "learning_rate"):
            if report.HasField(name):
                setattr(step, name, getattr(report, name))
        if report.tokens:
            self.tokens += report.tokens - step.tokens
            if time != step.told_at:
                self.trained[report.round] = self.trained.get(report.round, 0) + report.tokens
            step.tokens, step.told_at = report.tokens, time
        if report.HasField("loss") and (report.round, report.step) >= self._latest:
            self._latest = report.round, report.step
            self.steps_done, self.loss = self.index(report.round, report.step) + 1, report.loss

    def keep(self, round_: int, steps: int) -> None:
        """A round counted so many steps of it: what was told of more is of a try that was given up."""
        told = self.rounds.get(round_, {})
        for number in [number for number in told if number >= steps]:
            self.tokens -= told.pop(number).tokens
        if self._latest[0] == round_ and self._latest[1] >= steps and told:
            self._latest = round_, steps - 1
            self.steps_done = self.index(*self._latest) + 1

    def settle(self, closed: int) -> None:
        """A round is closed: of those long before it nothing more will be told."""
        for round_ in [one for one in self.rounds if one <= closed - STILL_TOLD]:
            told = self.rounds.pop(round_)
            self.settled[round_] = SettledRound(array("f", _losses(told)), _mean(told))
            self._settled_steps += _length(told)

    def index(self, round_: int, step: int) -> int:
        """Of a step of a round that is told of still, over the whole run, from 0."""
        if self.inner_steps is not None:
            return (round_ - 1) * self.inner_steps + step
        before = sum(_length(steps) for other, steps in self.rounds.items() if other < round_)
        return self._settled_steps + before + step

    def tokens_until(self, round_: int) -> int:
        """Return the tokens of all steps up to a round that has just ended, without those of a later round."""
        later = (steps for other, steps in self.rounds.items() if other > round_)
        return self.tokens - sum(step.tokens for steps in later for step in steps.values())

    def steps(self, round_: int) -> int:
        """How many steps of a round were told of."""
        return len(self.settled[round_].losses) if round_ in self.settled else len(self.rounds.get(round_, ()))

    @property
    def last_round(self) -> int:
        """The last of which there is a step, 0 if there is none."""
        return max([*self.rounds, *self.settled], default=0)

    def losses(self) -> Iterator[tuple[int, Sequence[float]]]:
        """Each round, and the training loss of its steps, in order; nan where it is not known."""
        for round_ in sorted([*self.rounds, *self.settled]):
            yield round_, self.settled[round_].losses if round_ in self.settled else _losses(self.rounds[round_])

    def round_loss(self, round_: int) -> float | None:
        """Mean training loss over the inner steps of a round."""
        return self.settled[round_].mean if round_ in self.settled else _mean(self.rounds.get(round_, {}))

    def last_round_loss(self) -> float | None:
        """The same of the last round that has any."""
        return self.round_loss(self._latest[0])


def _length(steps: dict[int, Step]) -> int:
    return max(steps, default=-1) + 1


def _losses(steps: dict[int, Step]) -> list[float]:
    return [math.nan if step.loss is None else step.loss for _, step in sorted(steps.items())]


def _mean(steps: dict[int, Step]) -> float | None:
    known = [step.loss for step in steps.values() if step.loss is not None]
    return fmean(known) if known else None
