"""Commitments of members to the open round, which its record keeps with the contributions.

A member begins a round with the state after the last round that counted it, or with a fresh state: no moments, and no
error feedback. The exchange compares digests before it takes a contribution, so no member can bring invented ones, not
even one that leaves and joins again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from hetero_pp.core.errors import DamagedFile
from hetero_pp.messages.messages_pb2 import Commitment, RoundRecord
from replica_groups.member.committed_state import state_sha256

_DIGEST = 32
_ROUNDS_KEPT = 4

ROUNDS_REMEMBERED = 256
"""Rounds for which a member that no round counts may still return with its state."""


class Commitments:
    """Newest commitments of members. Thread-safe."""

    def __init__(self, members: Mapping[str, str], readers: Collection[str], fresh: Mapping[str, bytes]) -> None:
        """`members`: member -> replica. `readers` read the corpus, so that they commit to their text.

        `fresh`: member -> digest of the tensors of its state before its first step.
        """
        self._members, self._readers, self._fresh = members, readers, fresh
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str, int], Commitment] = {}
        """(round, member, generation) -> the commitment."""
        self._last_round = 0
        self._after: dict[str, tuple[int, bytes]] = {}
        """Member -> the last round that counted it, and the digest of its state after that."""

    def begin(self, last_round: int, record_of: Callable[[int], RoundRecord]) -> None:
        """Take the states after a round, from which the run begins or resumes."""
        with self._lock:
            self._last_round, self._after = last_round, {}
        for round_ in range(max(1, last_round - ROUNDS_REMEMBERED + 1), last_round + 1):
            with suppress(DamagedFile, FileNotFoundError):  # members that it counts may have to begin fresh
                self.closed(record_of(round_))

    def closed(self, record: RoundRecord) -> None:
        """Take the states after a round that is closed."""
        with self._lock:
            self._last_round = record.round
            for entry in record.contributions:
                self._after |= {one.member: (record.round, one.after) for one in entry.commitments}

    def expected(self, member: str) -> bytes:
        """Return the digest of the state with which a member begins the open round; empty: a fresh one."""
        with self._lock:
            round_, after = self._after.get(member, (0, b""))
            return after if round_ > self._last_round - ROUNDS_REMEMBERED else b""

    def take(self, member: str, round_: int, generation: int, commitment: Commitment, holder: int) -> str | None:
        """Keep what came with a blob; return a complaint if it is missing, malformed, or a second commitment."""
        if (complaint := self._complaint(member, round_, commitment)) is not None:
            return complaint
        commitment.holder = holder
        with self._lock:
            known = self._kept.setdefault((round_, member, generation), commitment)
            self._kept = {key: one for key, one in self._kept.items() if key[0] > round_ - _ROUNDS_KEPT}
        return None if known == commitment else f"a second, different commitment for round {round_}"

    def add_to(self, record: RoundRecord) -> None:
        """Add to each contribution what its members committed to, by name."""
        for entry in record.contributions:
            for member in sorted(name for name, replica in self._members.items() if replica == entry.replica):
                if (found := self._found(record.round, member, entry.generation)) is not None:
                    entry.commitments.append(found)

    def _found(self, round_: int, member: str, generation: int) -> Commitment | None:
        with self._lock:
            return self._kept.get((round_, member, generation))

    def _complaint(self, member: str, round_: int, found: Commitment) -> str | None:
        if not found.before:
            return "found a contribution without a commitment, expected `audit.recompute` as on the exchange's host"
        if found.member != member:
            return f"found a commitment of `{found.member[:80]}`, expected its own"
        lengths = [len(found.before), len(found.after), len(found.rest), len(found.text), len(found.messages)]
        text, messages = (_DIGEST if one else 0 for one in (member in self._readers, self._has_neighbours(member)))
        if lengths != (expected := [_DIGEST, _DIGEST, _DIGEST, text, messages]):
            return f"found a commitment with digests of {lengths} bytes, expected {expected}"
        known = self.expected(member)
        is_open = round_ > self._last_round  # a round that has closed since may have counted it
        if is_open and found.before not in (known, state_sha256(found.rest, self._fresh[member])):
            last = "the one after the last round that counted it, or " if known else ""
            return f"began round {round_} with an unknown state, expected {last}a fresh one"
        return None

    def _has_neighbours(self, member: str) -> bool:
        """Return whether a member exchanges messages with other stages. One without a digest of them is not judged."""
        return list(self._members.values()).count(self._members[member]) > 1
