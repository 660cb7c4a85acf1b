"""Sent messages whose arrival is not confirmed. They are sent again when a broken link is reconnected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from hetero_pp.core.errors import MalformedMessage

T = TypeVar("T")

COUNT_BYTES = 2
"""Number of low bytes of a count that the peer sends. The peer is never behind by more than they can express."""

_MODULUS = 1 << (8 * COUNT_BYTES)


class Outbox(Generic[T]):
    """Items in the order of sending, from the first one whose arrival is not confirmed."""

    def __init__(self) -> None:
        self.arrived = 0
        """Number of items that the peer has confirmed, from the first item on."""
        self._waiting: deque[T] = deque()

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, thing: T) -> None:
        """Append an item that is about to be sent."""
        self._waiting.append(thing)

    def have_arrived(self, count: int) -> None:
        """Record that the peer has received `count` items in total. Raises MalformedMessage for an impossible count."""
        most = self.arrived + len(self._waiting)
        if not self.arrived <= count <= most:
            raise MalformedMessage(f"found {count} messages that have arrived, expected {self.arrived} to {most}")
        for _ in range(count - self.arrived):
            self._waiting.popleft()
        self.arrived = count

    def have_arrived_by(self, low: bytes) -> None:
        """Record the same from the low bytes of the count."""
        self.have_arrived(self.arrived + (int.from_bytes(low, "little") - self.arrived) % _MODULUS)

    def clear(self) -> None:
        self._waiting.clear()


def low_bytes(count: int) -> bytes:
    """Return the low bytes of a count, for `have_arrived_by`."""
    return (count % _MODULUS).to_bytes(COUNT_BYTES, "little")
