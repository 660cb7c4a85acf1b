"""What a run has decided about its rounds before it begins: who takes part, and when a round closes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

MOST_STEPS = 2**32
"""Largest number of steps of a contribution: its tokens have to be a number that a record holds."""

MOST_TIMES_THE_STEPS = 16
"""How many times the steps of others a contribution's own count: where a round is a time, its member tells them."""


@dataclass(frozen=True)
class Window:
    """Seconds, learnt from what was seen: `factor` times that, never less than `least` nor more than `most`."""

    factor: float
    least: float
    most: float

    def of(self, seen: float | None) -> float:
        """The window after `seen` seconds; the longest while nothing was seen."""
        return self.most if seen is None else min(max(self.factor * seen, self.least), self.most)


@dataclass(frozen=True)
class Rules:
    """Constant over a run; all times in seconds."""

    places: Mapping[str, str]
    """place -> replica"""
    blocks: Mapping[str, frozenset[str]]
    """place -> blocks that it contributes"""
    quorum: float = 0.5
    """Share of the replicas without which no round closes."""
    grace: Window = field(default_factory=lambda: Window(3.0, 10.0, 600.0))
    """How long those that are late are waited for once a quorum has contributed."""
    limit: float = 6 * 3600.0
    """After which a round closes as soon as a quorum has contributed."""
    lease: Window = field(default_factory=lambda: Window(5.0, 15.0, 300.0))
    """How long a member may be silent."""
    hang: Window = field(default_factory=lambda: Window(20.0, 300.0, 3600.0))
    """How long a member may compute without a sign of progress."""
    joins_at_once: bool = False
    """Whether who comes in the middle of a round takes part in it: where rounds are so much time and not so many
    steps."""
    overlap: bool = False
    """Whether replicas train the next round while what they have contributed is on its way."""
    tokens_a_step: Mapping[str, int] | None = None
    """replica -> tokens, where contributions weigh by tokens; None: they do not."""

    steps: range = range(MOST_STEPS + 1)
    """The inner steps that a contribution may come from."""

    examples_since: tuple[tuple[int, Mapping[str, int]], ...] = ()
    """First round -> (replica -> sequences in its shard) from there on, in order, where contributions weigh by those;
    empty: they do not. Known once the run begins, as who takes part is.
    """

    optional: frozenset[str] = frozenset()
    """Replicas that come and go: a quorum is a share of the others, and of those that are there."""

    due_since: tuple[tuple[int, frozenset[str]], ...] = ()
    """First round -> the replicas that are to take part from there on, in order; empty: all of them, in every round."""

    @cached_property
    def replicas(self) -> list[str]:
        return sorted(set(self.places.values()))

    @cached_property
    def needed(self) -> int:
        """How many replicas a quorum is at least, where all are to take part."""
        return self.needed_of(())

    def due(self, round_: int) -> frozenset[str]:
        """The replicas that are to take part in a round."""
        found = [names for since, names in self.due_since if since <= round_]
        return found[-1] if found else frozenset(self.replicas)

    def expected(self, there: Iterable[str], round_: int | None = None) -> int:
        """How many replicas a share is of, while these are there; of those that are due in a round, if it is told."""
        due = self.replicas if round_ is None else self.due(round_)
        return len(set(due) - self.optional.difference(there))

    def needed_of(self, there: Iterable[str], round_: int | None = None) -> int:
        """How many replicas a quorum is, while these are there; see `expected`."""
        return max(1, math.ceil(self.quorum * self.expected(there, round_) - 1e-9))

    def is_lost_without(self, replicas: Iterable[str]) -> bool:
        """Whether there are rounds that no quorum is left for."""
        lost, rounds = set(replicas) - self.optional, [since for since, _ in self.due_since] or [1]
        return any(
            self.expected((), since) - len(lost & self.due(since)) < self.needed_of((), since) for since in rounds
        )

    def places_of(self, replica: str) -> list[str]:
        """In the order of the stages."""
        return [place for place, owner in self.places.items() if owner == replica]

    def blocks_of(self, replica: str) -> frozenset[str]:
        """All that a whole contribution has."""
        return frozenset().union(*(self.blocks[place] for place in self.places_of(replica)))

    def complaint_of_steps(self, steps: int) -> str | None:
        """Return why a contribution cannot come from so many inner steps; None if it can."""
        least = max(self.steps.start, 0 if self.tokens_a_step is None else 1)
        if least <= steps < self.steps.stop:
            return None
        expected = f"{least}" if least + 1 == self.steps.stop else f"{least} to {self.steps.stop - 1}"
        return f"found {steps} inner steps, expected {expected}"

    def weight(self, replica: str, steps: int, round_: int) -> float:
        """Of a contribution to a round that so many inner steps came to."""
        if self.examples_since:
            examples = [sizes for since, sizes in self.examples_since if since <= round_][-1]
            return float(examples[replica])
        return 1.0 if self.tokens_a_step is None else float(steps * self.tokens_a_step[replica])
