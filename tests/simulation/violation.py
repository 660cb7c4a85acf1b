"""The exception that ends a history because an invariant was broken."""

from __future__ import annotations


class Violation(Exception):
    """A broken invariant: its number in the list of `invariants.py`, and how it was broken."""

    def __init__(self, invariant: int, what: str) -> None:
        super().__init__(f"invariant {invariant}: {what}")
        self.invariant = invariant
