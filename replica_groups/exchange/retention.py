"""What is removed from a log while its run goes on: snapshots that newer ones replace, and blobs that never counted.

Records stay, and so do counted contributions and the first snapshot, so that theta after any round can be come to
again, unless only recent history is asked for: then they go with the snapshots that they lead to. Nothing is removed
that the auditor has not passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_pp.errors import DamagedFile
from replica_groups.exchange.log import ContributionLog, key_of, round_key, snapshot_key
from replica_groups.exchange.uploads import UPLOADED


@dataclass(frozen=True)
class Retention:
    """Of one run."""

    log: ContributionLog
    keep: int = 2
    """How many snapshots, beside the first."""
    history: Literal["whole", "recent"] = "whole"

    def audited(self, round_: int) -> None:
        """The auditor has passed a round: what no record names of the one before goes.

        Not of this one yet: a blob may still be on its way, and would be left for ever.
        """
        if round_ > 1:
            self._remove_uncounted(round_ - 1)

    def kept_snapshot(self, round_: int) -> None:
        """There is a snapshot after this round: all but the newest go."""
        older = sorted(number for number in self.log.snapshots() if 0 < number <= round_)[: -self.keep]
        self.log.store.delete([snapshot_key(number) for number in older])
        if self.history == "recent":
            self._forget_history(round_)

    def _forget_history(self, newest: int) -> None:
        """Contributions up to the oldest snapshot that stays. What is older goes first, whatever ends this."""
        stay = sorted(number for number in self.log.snapshots() if 0 < number <= newest)
        if len(stay) < self.keep:
            return
        self.log.store.delete([snapshot_key(0)])
        found: list[list[str]] = []
        for number in range(stay[0], 0, -1):
            blobs = self._blobs(number)
            if not blobs:
                break  # they went with an older snapshot
            found.append(blobs)
        for blobs in reversed(found):
            self.log.store.delete(blobs)

    def _blobs(self, round_: int) -> list[str]:
        return [key for key in self.log.store.below(round_key(round_)) if key.endswith((".blob", UPLOADED))]

    def _remove_uncounted(self, round_: int) -> None:
        try:
            record = self.log.read_record(round_)
        except (DamagedFile, FileNotFoundError):
            return  # of a round before the run went on, from a later snapshot: nobody knows what counted
        counted = {key_of(record, entry, blob) for entry in record.contributions for blob in entry.blobs}
        self.log.store.delete([key for key in self._blobs(round_) if key not in counted])
