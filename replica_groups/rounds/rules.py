"""Constant rules of a run: the members that take part, and when a round closes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low

from hetero_pp.outer.fragments import WHOLE, Fragments

MOST_STEPS = 2**32  # largest number of steps of a contribution, so that its tokens fit into a record's field

MOST_TIMES_THE_STEPS = 16
"""Limit of a contribution's weight in steps, as a multiple of the median.

In rounds of a fixed time, members report their own steps.
"""


def most_steps(steps: Sequence[int]) -> int:
    """Return how many steps of a contribution count at most, given those of all contributions to its round."""
    return MOST_TIMES_THE_STEPS * median_low(steps) if steps else 0


@dataclass(frozen=True)
class Window:
    """A time limit learned from observations: `factor` times the observed seconds, between `least` and `most`."""

    factor: float
    least: float
    most: float

    def of(self, seen: float | None) -> float:
        """Return the limit in seconds after an observation; `most` if there was none."""
        return self.most if seen is None else min(max(self.factor * seen, self.least), self.most)


@dataclass(frozen=True)
class Rules:
    """Rules of a run; all times in seconds."""

    slots: Mapping[str, str]  # slot -> replica
    blocks: Mapping[str, frozenset[str]]  # slot -> blocks that it contributes
    quorum: float = 0.5  # share of the replicas without which no round closes
    grace: Window = field(default_factory=lambda: Window(3.0, 10.0, 600.0))
    """Time to wait for late replicas once a quorum has contributed."""
    limit: float = 6 * 3600.0  # time after which a round closes as soon as a quorum has contributed
    lease: Window = field(default_factory=lambda: Window(5.0, 15.0, 300.0))
    """Time without a heartbeat after which an incarnation ends."""
    hang: Window = field(default_factory=lambda: Window(20.0, 300.0, 3600.0))
    """Time of computing without progress after which an incarnation ends (stall monitor)."""
    joins_at_once: bool = False
    """Whether a replica that comes in the middle of a round takes part in it: in rounds of a fixed time."""
    overlap: bool = False  # whether replicas train the next round while their contribution is in transit
    resumes: bool = True  # whether a replica that lost a stage within a round resumes at the inner step
    tokens_a_step: Mapping[str, int] | None = None
    """Replica -> tokens per step, if contributions are weighted by tokens; else None."""

    steps: range = range(MOST_STEPS + 1)  # allowed numbers of inner steps of a contribution
    own_steps: Mapping[str, int] = field(default_factory=dict)  # of replicas that take another number than `steps`

    fragments: Fragments = WHOLE  # that rounds synchronise

    optional: frozenset[str] = frozenset()
    """Optional replicas. A quorum is a share of the required replicas and the present optional ones."""

    @cached_property
    def replicas(self) -> list[str]:
        return sorted(set(self.slots.values()))

    @cached_property
    def needed(self) -> int:
        """Smallest quorum."""
        return self.needed_of(())

    def expected(self, there: Iterable[str]) -> int:
        """Return the number of replicas of which a quorum is a share; `there` are the present replicas."""
        return len(set(self.replicas) - self.optional.difference(there))

    def needed_of(self, there: Iterable[str]) -> int:
        """Return the quorum while the replicas `there` are present."""
        return self._share_of(self.expected(there))

    def needed_with(self, optional: int) -> int:
        """Return the quorum while so many optional replicas are present."""
        return self._share_of(self._required + optional)

    @cached_property
    def _required(self) -> int:
        return self.expected(())

    def _share_of(self, expected: int) -> int:
        return max(1, math.ceil(self.quorum * expected - 1e-9))

    def is_lost_without(self, replicas: Iterable[str]) -> bool:
        """Return whether without these replicas rounds would have no quorum."""
        lost = set(replicas) - self.optional
        return self.expected(()) - len(lost.intersection(self.replicas)) < self.needed

    @cached_property
    def _slots_of(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for slot, replica in self.slots.items():
            found.setdefault(replica, []).append(slot)
        return found

    @cached_property
    def _blocks_of(self) -> Mapping[str, frozenset[str]]:
        blocks = self.blocks
        return {name: frozenset().union(*map(blocks.__getitem__, own)) for name, own in self._slots_of.items()}

    def slots_of(self, replica: str) -> list[str]:
        """Return a replica's slots in the order of the stages."""
        return self._slots_of.get(replica, [])

    def blocks_of(self, replica: str, round_: int) -> frozenset[str]:
        """Return all blocks of a complete contribution to a round."""
        return self.fragments.among(self._blocks_of[replica], round_)

    def contributes(self, slot: str, round_: int) -> bool:
        """Return whether a slot has blocks of the fragment of a round."""
        return bool(self.fragments.among(self.blocks[slot], round_))

    def steps_of(self, replica: str) -> range:
        """Return how many inner steps a replica's contribution may come from."""
        own = self.own_steps.get(replica)
        return self.steps if own is None else range(own, own + 1)

    def complaint_of_steps(self, replica: str, steps: int) -> str | None:
        """Return why a contribution cannot come from this number of inner steps; None if it can."""
        allowed = self.steps_of(replica)
        least = max(allowed.start, 0 if self.tokens_a_step is None else 1)
        if least <= steps < allowed.stop:
            return None
        expected = f"{least}" if least + 1 == allowed.stop else f"{least} to {allowed.stop - 1}"
        return f"found {steps} inner steps, expected {expected}"

    def weight(self, replica: str, steps: int) -> float:
        """Return the weight of a contribution from this number of inner steps."""
        return 1.0 if self.tokens_a_step is None else float(steps * self.tokens_a_step[replica])
