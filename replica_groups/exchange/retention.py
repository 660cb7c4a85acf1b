"""What is removed from a log while its run goes on: snapshots that newer ones replace, and blobs that never counted.

Records, counted contributions and the first snapshot stay: theta after any round can be come to again. Nothing is
removed that the auditor has not passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from replica_groups.exchange.log import ContributionLog, blob_key, round_key, snapshot_key


@dataclass(frozen=True)
class Retention:
    """Of one run."""

    log: ContributionLog
    keep: int
    """How many snapshots, beside the first."""

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

    def _remove_uncounted(self, round_: int) -> None:
        record = self.log.read_record(round_)
        counted = {
            blob_key(round_, entry.replica, entry.epoch, blob.block)
            for entry in record.contributions
            for blob in entry.blobs
        }
        found = [key for key in self.log.store.below(round_key(round_)) if key.endswith(".blob")]
        self.log.store.delete([key for key in found if key not in counted])
