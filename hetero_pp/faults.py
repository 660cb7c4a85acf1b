"""What may be done to a process of a run from within, to see what the run survives: by default nothing.

Whoever is asked for a phase, an address or a write asks this object first. It is handed from above like any other part,
so that nothing has to be replaced where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from torch import Tensor

from hetero_pp.store.store import Store


class Phase(StrEnum):
    """Of a member in a round, in this order."""

    TRAINING = "training"
    """From its first inner step on."""
    CONTRIBUTING = "contributing"
    WAITING = "waiting"
    """For the round's record."""
    EVALUATING = "evaluating"
    SAVING = "saving"


class Faults:
    """None at all. What does some overrides what it does."""

    missed: frozenset[int] = frozenset()
    """Rounds whose record is there before the member's contribution arrives."""

    def reached(self, phase: Phase, round_: int) -> None:
        """The member is at this point of a round; it may be held there."""

    def touch(self, theta: Mapping[str, Tensor]) -> None:
        """theta where a round starts, as the member holds it; may be changed."""

    def write(self) -> None:
        """The member is about to write to its disk. Raises OSError if that is full."""

    def disk(self, store: Store) -> Store:
        """The store that the exchange writes to."""
        return store

    def route(self, link: str, address: str) -> str:
        """Where to dial for a link whose other end listens at HOST:PORT."""
        return address


class Missed(Faults):
    """Contributions of some rounds arrive late, and nothing else happens."""

    def __init__(self, rounds: Iterable[int]) -> None:
        self.missed = frozenset(rounds)


NO_FAULTS = Faults()
