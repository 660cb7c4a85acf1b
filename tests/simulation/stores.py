"""What outlives processes: the store that all share, which may fail before or after it has done a thing, and the disks
on which places' states lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from simulation.timeline import Timeline

from replica_groups.protocol.events import Record

Units = frozenset[int]
"""What trainings gave to one position of a place's parameters, each named by its training."""

THETA = b"theta before the first round"
KEPT_STATES = 2


class StoreFailed(Exception):
    """Nobody knows whether it was done."""


class Path(NamedTuple):
    """Of a blob, as the log has it."""

    round: int
    replica: str
    epoch: int
    block: str
    digest: object


class Blob(NamedTuple):
    """A place's part of a contribution: which units it sends, by position."""

    digest: int
    training: int
    place: str
    sent: dict[int, Units]


class Kept(NamedTuple):
    """A record as it lies in the store, and its digest."""

    record: Record
    digest: bytes


class Store:
    """Records and terms belong to whoever was first."""

    def __init__(self, timeline: Timeline, dice: Random, fails: float, on_record: Callable[[Record], None]) -> None:
        """`fails`: share of all calls. `on_record` is told of each record that decides a round."""
        self._timeline, self._dice, self.fails, self._on_record = timeline, dice, fails, on_record
        self.down_until = 0.0
        self.records: dict[int, Kept] = {}
        self.terms: dict[str, int] = {}
        self.blobs: dict[Path, Blob] = {}
        self._claimed: set[tuple[str, int]] = set()

    @property
    def last(self) -> int:
        """The newest round that is decided."""
        return len(self.records)

    def claim(self, place: str, term: int) -> bool:
        """Whether nobody was there before."""
        is_lost = self._fail()
        is_first = (place, term) not in self._claimed
        self._claimed.add((place, term))
        self.terms[place] = max(term, self.terms.get(place, 0))
        self._answer(is_lost)
        return is_first

    def create(self, record: Record) -> Record:
        """The record that counts, which is this one or that of whoever was first."""
        is_lost = self._fail()
        if record.round not in self.records:
            self._keep(record)
        self._answer(is_lost)
        return self.records[record.round].record

    def _keep(self, record: Record) -> None:
        self.records[record.round] = Kept(record, blake2b(repr(record).encode(), digest_size=8).digest())
        self._on_record(record)

    def read(self, round_: int) -> Kept | None:
        """A round's record, if it is decided."""
        self._fail()
        return self.records.get(round_)

    def put(self, path: Path, blob: Blob) -> None:
        """In the place of what was there."""
        is_lost = self._fail()
        self.blobs[path] = blob
        self._answer(is_lost)

    def forget_blobs_before(self, round_: int) -> None:
        """Nobody reads them any more."""
        self.blobs = {path: blob for path, blob in self.blobs.items() if path.round >= round_}

    def _fail(self) -> bool:
        """Fail, or decide that the answer will be lost once it is done."""
        if self._timeline.now < self.down_until:
            raise StoreFailed
        if self.fails and self._dice.random() < self.fails:
            if self._dice.random() < 0.5:
                raise StoreFailed
            return True
        return False

    def _answer(self, is_lost: bool) -> None:
        if is_lost:
            raise StoreFailed


def replayed(theta: bytes, kept: Kept) -> bytes:
    """theta after a round, from theta before it."""
    return blake2b(theta + kept.digest, digest_size=8).digest()


@dataclass(frozen=True)
class State:
    """A place's own, after a round."""

    round: int
    error: Sequence[Units]


class Disks:
    """The newest states of each place; None: one that is torn, as its digest shows."""

    def __init__(self) -> None:
        self._states: dict[str, list[State | None]] = {}

    def write(self, place: str, state: State | None) -> None:
        """Keep a state, or what is left of one."""
        states = self._states.setdefault(place, [])
        states.append(state)
        del states[:-KEPT_STATES]

    def newest(self, place: str) -> State | None:
        """The newest that is whole."""
        return max((s for s in self._states.get(place, []) if s is not None), key=lambda s: s.round, default=None)
