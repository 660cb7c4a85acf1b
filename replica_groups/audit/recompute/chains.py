"""Chain of the commitments of each replica: its state after a round is its state before the next.

The chain may end where a replica was formed anew, where a round excluded it and its contribution returned to the error
feedback, or where a run resumed. Its next commitment is then a new anchor, and counted: nobody can compare it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord


@dataclass(frozen=True)
class Broken:
    """A chain that ended without a reason."""

    replica: str
    member: str


@dataclass(frozen=True)
class _Link:
    round: int
    generation: int
    after: Mapping[str, bytes]
    """Member -> digest of its state after the round."""


class Chains:
    """Chains of all replicas of a run, as its records tell them."""

    def __init__(self) -> None:
        self.anchors = Counter[str]()
        """Replica -> number of its anchors."""
        self._links: dict[str, _Link] = {}

    def follow(self, record: RoundRecord) -> Iterator[Broken]:
        """Take the records of a run in their order; yield the chains that a round has broken."""
        for entry in record.contributions:
            if entry.commitments:
                yield from self._follow(record.round, entry)

    def _follow(self, round_: int, entry: ContributionEntry) -> Iterator[Broken]:
        before, name = self._links.get(entry.replica), entry.replica
        self._links[name] = _Link(round_, entry.epoch, {one.member: one.after for one in entry.commitments})
        if before is None or (before.round, before.generation) != (round_ - 1, entry.epoch):
            self.anchors[name] += 1
            return
        for one in entry.commitments:
            if before.after.get(one.member) != one.before:
                yield Broken(name, one.member)
