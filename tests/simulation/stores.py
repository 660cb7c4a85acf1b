"""State that outlives processes: the shared store and the slots' disks.

A call of the store may fail before or after it takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from simulation.timeline import Timeline

from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord

Units = frozenset[int]
"""The trainings that changed one position of a slot's parameters, each by its number."""

THETA = b"theta before the first round"
KEPT_STATES = 2


class StoreFailed(Exception):
    """The call failed, and may or may not have taken effect."""


class Path(NamedTuple):
    """Key of a blob, as in the run log."""

    round: int
    replica: str
    generation: int
    block: str
    digest: object


class Blob(NamedTuple):
    """A slot's part of a contribution: the units that it sends, by position."""

    digest: int
    training: int
    slot: str
    steps: int
    """Steps of the round that its slot's holder has trained."""
    sent: dict[int, Units]


class Kept(NamedTuple):
    """A record in the store, and its digest."""

    record: RoundRecord
    digest: bytes


class Store:
    """A store in which the first writer of a record or of an incarnation wins."""

    def __init__(
        self, timeline: Timeline, dice: Random, fails: float, on_record: Callable[[RoundRecord], None]
    ) -> None:
        """Create an empty store.

        `fails` is the share of calls that fail. `on_record` gets each record that decides a round.
        """
        self._timeline, self._dice, self.fails, self._on_record = timeline, dice, fails, on_record
        self.down_until = 0.0
        self.records: dict[int, Kept] = {}
        self.incarnations: dict[str, int] = {}
        self.blobs: dict[Path, Blob] = {}
        self._claimed: set[tuple[str, int]] = set()

    @property
    def last(self) -> int:
        """The newest decided round."""
        return len(self.records)

    def claim(self, slot: str, incarnation: int) -> bool:
        """Claim an incarnation of a slot. Return whether this claim was the first."""
        is_lost = self._fail()
        is_first = (slot, incarnation) not in self._claimed
        self._claimed.add((slot, incarnation))
        self.incarnations[slot] = max(incarnation, self.incarnations.get(slot, 0))
        self._answer(is_lost)
        return is_first

    def create(self, record: RoundRecord) -> RoundRecord:
        """Write a record unless the round has one. Return the record that decides the round."""
        is_lost = self._fail()
        if record.round not in self.records:
            self._keep(record)
        self._answer(is_lost)
        return self.records[record.round].record

    def _keep(self, record: RoundRecord) -> None:
        self.records[record.round] = Kept(
            record, blake2b(record.SerializeToString(deterministic=True), digest_size=8).digest()
        )
        self._on_record(record)

    def read(self, round_: int) -> Kept | None:
        """Return a round's record, or None if it is not decided."""
        self._fail()
        return self.records.get(round_)

    def put(self, path: Path, blob: Blob) -> None:
        """Write a blob, and replace what the key had before."""
        is_lost = self._fail()
        self.blobs[path] = blob
        self._answer(is_lost)

    def forget_blobs_before(self, round_: int) -> None:
        """Remove the blobs of older rounds, which no process reads any more."""
        self.blobs = {path: blob for path, blob in self.blobs.items() if path.round >= round_}

    def _fail(self) -> bool:
        """Fail, or return whether the answer gets lost after the call has taken effect."""
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


def included(record: RoundRecord, replica: str) -> ContributionEntry | None:
    """Return a replica's contribution of a record, if it has one."""
    return next((one for one in record.contributions if one.replica == replica), None)


def digests(entry: ContributionEntry) -> dict[str, int]:
    """Return block -> digest of its blob, which the simulation keeps as the size of the blob."""
    return {blob.block: blob.size for blob in entry.blobs}


def replayed(theta: bytes, kept: Kept) -> bytes:
    """Return theta after a round, from theta before it."""
    return blake2b(theta + kept.digest, digest_size=8).digest()


@dataclass(frozen=True)
class State:
    """The saved state of a slot after a round."""

    round: int
    error: Sequence[Units]


class Disks:
    """The newest states of each slot. None is a torn state, which its digest reveals."""

    def __init__(self) -> None:
        self._states: dict[str, list[State | None]] = {}

    def write(self, slot: str, state: State | None) -> None:
        """Save a state, or a torn one."""
        states = self._states.setdefault(slot, [])
        states.append(state)
        del states[:-KEPT_STATES]

    def newest(self, slot: str) -> State | None:
        """Return the newest complete state."""
        return max((s for s in self._states.get(slot, []) if s is not None), key=lambda s: s.round, default=None)
