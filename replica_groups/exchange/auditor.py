"""Auditor: replays the run log beside the exchange to check every round, and writes the run checkpoints."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import DamagedFile, RunFailed, StoreError
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameters_sha256
from replica_groups.exchange.audits import write_audit
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import TOGETHER, UPLOADED, ContributionLog, checkpoint_key, key_of, round_key
from replica_groups.exchange.replay import Follower


@dataclass(frozen=True)
class Retention:
    """Removes replaced run checkpoints and excluded blobs from one run's log while the run continues.

    Records, included contributions and the first run checkpoint stay, so that theta after any round can be computed
    again. With `store.history: recent`, contributions up to the oldest remaining run checkpoint are removed, too.
    Nothing is removed before the auditor has replayed it.
    """

    log: ContributionLog
    keep: int = 2  # number of run checkpoints to keep beside the first
    history: Literal["whole", "recent"] = "whole"

    def audited(self, round_: int) -> None:
        """Remove excluded blobs of the round before an audited one.

        Those of the audited round itself stay, because a blob that is still on its way would never be removed.
        """
        try:
            record = self.log.read_record(round_ - 1)
        except (DamagedFile, FileNotFoundError):
            return  # of a round before the run went on, from a later run checkpoint: nobody knows what counted
        counted = {key_of(record, entry, blob) for entry in record.contributions for blob in entry.blobs}
        for key in self._blobs(round_ - 1):
            with suppress(DamagedFile):  # it stays, so that it can be repaired
                if counted.isdisjoint(self.log.index(key) if key.endswith(TOGETHER) else [key]):
                    self.log.store.delete([key])

    def kept_checkpoint(self, round_: int) -> None:
        """Remove all but the newest run checkpoints, after a new one was written."""
        older = sorted(number for number in self.log.checkpoints() if 0 < number <= round_)[: -self.keep]
        self.log.store.delete([checkpoint_key(number) for number in older])
        if self.history != "recent":
            return
        stay = sorted(number for number in self.log.checkpoints() if 0 < number <= round_)
        if len(stay) < self.keep:
            return
        # Contributions up to the oldest remaining run checkpoint go, too; oldest first, so that no gap is left.
        self.log.store.delete([checkpoint_key(0)])
        found: list[list[str]] = []
        for number in range(stay[0], 0, -1):
            blobs = self._blobs(number)
            if not blobs:
                break  # they went with an older run checkpoint
            found.append(blobs)
        for blobs in reversed(found):
            self.log.store.delete(blobs)

    def _blobs(self, round_: int) -> list[str]:
        return [key for key in self.log.store.below(round_key(round_)) if key.endswith((".blob", TOGETHER, UPLOADED))]


class Auditor:
    """Replays each round as it closes, compares its hashes with the members' hashes, and writes run checkpoints."""

    def __init__(
        self,
        exchange: Exchange,
        checkpoint: RunCheckpoint,
        outer: OuterSettings,
        checkpoint_every: int,
        optimizer: RoundOptimizer | None = None,
        retention: Retention | None = None,
        folder: Path | None = None,
    ) -> None:
        """`outer` says when the run is over. `folder` holds theta between rounds (Follower)."""
        self.exchange = exchange
        self.outer = outer
        self.checkpoint_every = checkpoint_every
        self._retention = retention or Retention(exchange.log)
        self._unpruned: list[int] = []  # audited rounds whose excluded blobs may not be removed yet
        self._start: RunCheckpoint | None = checkpoint  # until it is written
        self._first_round = checkpoint.round + 1
        optimizer = optimizer or OuterOptimizer(exchange.settings)
        self._follower = Follower(exchange.run, checkpoint, optimizer, folder)
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)

    def start(self) -> None:
        """Write the run checkpoint from which the run begins or resumes, and start to follow the rounds.

        Waits while the disk refuses it. Raises RunFailed.
        """
        if (start := self._start) is not None:
            self.exchange.runner.retry(lambda: self.exchange.log.write_checkpoint(start))
        self._start = None
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the last round is replayed or the run has failed, for at most `seconds`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            before = self._first_round - 1
            log, retry, tokens = self.exchange.log, self.exchange.runner.retry, 0
            if self.outer.tokens is not None:
                tokens = retry(lambda: log.tokens_after(self._first_round - 1))
            while not self.outer.is_over(before, tokens):
                before += 1
                tokens = self._follow(before)
        except RunFailed:
            return
        except Exception as error:  # noqa: BLE001 (a run that is no longer checked must not go on)
            self.exchange.fail(f"the auditor cannot replay the log: {error}")

    def _follow(self, round_: int) -> int:
        """Replay a round, and return the tokens of the run so far."""
        record = self.exchange.record(round_)
        read = self.exchange.log.blobs_of(record)

        def fetch(replica: str, block: str) -> bytes:
            return self.exchange.runner.retry(lambda: read(replica, block))

        hashes = self._follower.apply(record, fetch)
        self.exchange.confirm(EXCHANGE, round_, hashes)
        store, sha256 = self.exchange.log.store, parameters_sha256(hashes)
        self.exchange.runner.retry(lambda: write_audit(store, round_, record.sha256, sha256))
        self.exchange.reports.keep_so_far()
        self._unpruned.append(round_)
        with suppress(StoreError):  # what is not removed is in nobody's way, and is tried again after the next round
            while self._unpruned:
                self._retention.audited(self._unpruned[0])
                self._unpruned.pop(0)
        if round_ % self.checkpoint_every == 0 or self.outer.is_over(round_, record.tokens):
            checkpoint = self._follower.checkpoint()
            self.exchange.runner.retry(lambda: self.exchange.log.write_checkpoint(checkpoint))
            self.exchange.decided.kept_checkpoint(round_)
            with suppress(StoreError):
                self._retention.kept_checkpoint(round_)
        return record.tokens
