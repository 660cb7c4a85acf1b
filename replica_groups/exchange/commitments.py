"""Commitments of members to the open round, which its record keeps with the contributions."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from hetero_pp.messages.messages_pb2 import Commitment, RoundRecord

_DIGEST = 32
_ROUNDS_KEPT = 4


class Commitments:
    """Newest commitments of members. Thread-safe."""

    def __init__(self, members: Mapping[str, str], readers: Collection[str]) -> None:
        """`members`: member -> replica. `readers` read the corpus, so that they commit to their text."""
        self._members, self._readers = members, readers
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str, int], Commitment] = {}
        """(round, member, generation) -> the commitment."""

    def take(self, member: str, round_: int, epoch: int, commitment: Commitment, holder: int) -> str | None:
        """Keep what came with a blob; return a complaint if it is missing, malformed, or a second commitment."""
        if (complaint := self._complaint(member, commitment)) is not None:
            return complaint
        commitment.holder = holder
        with self._lock:
            known = self._kept.setdefault((round_, member, epoch), commitment)
            self._kept = {key: one for key, one in self._kept.items() if key[0] > round_ - _ROUNDS_KEPT}
        return None if known == commitment else f"a second, different commitment for round {round_}"

    def add_to(self, record: RoundRecord) -> None:
        """Add to each contribution what its members committed to, by name."""
        for entry in record.contributions:
            for member in sorted(name for name, replica in self._members.items() if replica == entry.replica):
                if (found := self._found(record.round, member, entry.epoch)) is not None:
                    entry.commitments.append(found)

    def _found(self, round_: int, member: str, epoch: int) -> Commitment | None:
        with self._lock:
            return self._kept.get((round_, member, epoch))

    def _complaint(self, member: str, found: Commitment) -> str | None:
        if not found.before:
            return "found a contribution without a commitment, expected `audit.recompute` as on the exchange's host"
        if found.member != member:
            return f"found a commitment of `{found.member[:80]}`, expected its own"
        lengths = [len(found.before), len(found.after), len(found.text), len(found.messages)]
        text, messages = (_DIGEST if one else 0 for one in (member in self._readers, self._has_neighbours(member)))
        if lengths != (expected := [_DIGEST, _DIGEST, text, messages]):
            return f"found a commitment with digests of {lengths} bytes, expected {expected}"
        return None

    def _has_neighbours(self, member: str) -> bool:
        """Return whether a member exchanges messages with other stages. One without a digest of them is not judged."""
        return list(self._members.values()).count(self._members[member]) > 1
