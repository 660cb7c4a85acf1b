"""Fault injection into a process of a run, to test what the run survives; by default nothing happens.

Code that reaches a phase, dials an address or writes a file asks this object first. It is passed in as an argument, so
tests need not patch anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from torch import Tensor

from hetero_pp.store.store import Store


class FaultPhase(StrEnum):
    """Phases of a member in a round."""

    TRAINING = "training"  # begins with the first inner step
    CONTRIBUTING = "contributing"
    WAITING = "waiting"  # waits for the round record
    EVALUATING = "evaluating"
    SAVING = "saving"  # writes its saved state: before the last deposit, or, with overlap, at the end of the round


class Faults:
    """No faults. A subclass overrides the methods of the faults that it injects."""

    missed: frozenset[int] = frozenset()  # rounds whose record is written before the member's contribution arrives

    def reached(self, phase: FaultPhase, round_: int) -> None:
        """Inject a fault when the member reaches this phase of a round; may block."""

    def computes(self, round_: int, step: int, micro_batch: int, is_forward: bool) -> None:
        """Inject a fault before a stage's forward or backward of a micro-batch in an inner step; may block.

        The step after the last one, counted from 0, is the flush that ends the inner loop. It has no backward.
        """

    def touch(self, theta: Mapping[str, Tensor]) -> None:
        """Inject a fault into the member's parameters at the start of a round."""

    def write(self) -> None:
        """Inject a fault before the member writes to its disk. Raises OSError to simulate a full disk."""

    def disk(self, store: Store) -> Store:
        """Return the store that the exchange writes to."""
        return store

    def route(self, link: str, address: str) -> str:
        """Return the address to dial for a link whose other end listens at HOST:PORT."""
        return address


class Missed(Faults):
    """Makes contributions to some rounds arrive after their round record; injects nothing else."""

    def __init__(self, rounds: Iterable[int]) -> None:
        self.missed = frozenset(rounds)


NO_FAULTS = Faults()
