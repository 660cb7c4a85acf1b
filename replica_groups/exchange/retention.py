"""Removal of objects from a log while its run continues: replaced snapshots, and excluded blobs.

Records, included contributions and the first snapshot stay, so that theta after any round can be computed again. With
`store.history: recent`, contributions up to the oldest remaining snapshot are removed, too. Nothing is removed before
the auditor has replayed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetero_pp.core.errors import DamagedFile
from replica_groups.exchange.log import ContributionLog, key_of, round_key, snapshot_key
from replica_groups.exchange.uploads import UPLOADED


@dataclass(frozen=True)
class Retention:
    """Retention of one run's log."""

    log: ContributionLog
    keep: int = 2
    """Number of snapshots to keep beside the first."""
    history: Literal["whole", "recent"] = "whole"

    def audited(self, round_: int) -> None:
        """Remove excluded blobs of the round before an audited one.

        Those of the audited round itself stay, because a blob that is still on its way would never be removed.
        """
        if round_ > 1:
            self._remove_uncounted(round_ - 1)

    def kept_snapshot(self, round_: int) -> None:
        """Remove all but the newest snapshots, after a new one was written."""
        older = sorted(number for number in self.log.snapshots() if 0 < number <= round_)[: -self.keep]
        self.log.store.delete([snapshot_key(number) for number in older])
        if self.history == "recent":
            self._forget_history(round_)

    def _forget_history(self, newest: int) -> None:
        """Remove contributions up to the oldest remaining snapshot. Oldest first: an interruption leaves no gap."""
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
