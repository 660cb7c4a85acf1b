"""What was sent and is not known to have arrived: it is sent again where a link is cut and dialled anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from hetero_pp.errors import MalformedMessage

T = TypeVar("T")

COUNT_BYTES = 2
"""Of a count as the other end tells it while a stream lasts: its low bytes, as it is never behind by as many."""

_MODULUS = 1 << (8 * COUNT_BYTES)


class Outbox(Generic[T]):
    """Things in the order in which they were sent, from the first that is not known to have arrived."""

    def __init__(self) -> None:
        self.arrived = 0
        """Things that the other end has said it has, from the first on."""
        self._waiting: deque[T] = deque()

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, thing: T) -> None:
        """This is sent next."""
        self._waiting.append(thing)

    def have_arrived(self, count: int) -> None:
        """The other end has so many in all. Raises MalformedMessage if it cannot."""
        most = self.arrived + len(self._waiting)
        if not self.arrived <= count <= most:
            raise MalformedMessage(f"found {count} messages that have arrived, expected {self.arrived} to {most}")
        for _ in range(count - self.arrived):
            self._waiting.popleft()
        self.arrived = count

    def have_arrived_by(self, low: bytes) -> None:
        """The same, told by the low bytes of the count."""
        self.have_arrived(self.arrived + (int.from_bytes(low, "little") - self.arrived) % _MODULUS)

    def clear(self) -> None:
        """Nothing more will be sent."""
        self._waiting.clear()


def low_bytes(count: int) -> bytes:
    """What `have_arrived_by` takes."""
    return (count % _MODULUS).to_bytes(COUNT_BYTES, "little")
