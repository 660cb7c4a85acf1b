"""Auditor: replays the run log beside the exchange to check every round, and writes the snapshots."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import torch

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import RunFailed, StoreError
from hetero_pp.core.scratch import Scratch
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_sha256, parameters_sha256
from hetero_pp.run.snapshot import Snapshot
from replica_groups.exchange.audits import write_audit
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.retention import Retention
from replica_groups.outer.apply_round import apply_round


class Auditor:
    """Replays each round as it closes, compares its hashes with the members' hashes, and writes snapshots."""

    def __init__(
        self,
        exchange: Exchange,
        snapshot: Snapshot,
        rounds: int,
        snapshot_every: int,
        optimizer: RoundOptimizer | None = None,
        retention: Retention | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` holds theta between rounds (Scratch), because it would be a whole model in memory."""
        self.exchange = exchange
        self.rounds = rounds
        self.snapshot_every = snapshot_every
        self._retention = retention or Retention(exchange.log)
        self._unpruned: list[int] = []
        """Audited rounds whose excluded blobs may not be removed yet."""
        self._start: Snapshot | None = snapshot
        """Until it is written."""
        self._first_round = snapshot.round + 1
        self._basis = snapshot.basis
        self._optimizer = optimizer or OuterOptimizer(exchange.settings)
        if snapshot.round > 0:
            self._optimizer.load(snapshot.momentum, snapshot.round)
        self._theta = Scratch(folder)
        for name, tensor in snapshot.parameters.items():
            self._theta.keep(name, tensor)
        blocks = shapes_by_block(shapes_of(snapshot.parameters)).values()
        is_whole = self._optimizer.settings.source == "gradient"  # because it clips by the norm of all
        self._parts = [list(snapshot.parameters)] if is_whole else [list(shapes) for shapes in blocks]
        """Names of the parameters that are in memory at the same time."""
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)

    def start(self) -> None:
        """Write the snapshot from which the run begins or resumes, and start to follow the rounds.

        Waits while the disk refuses it. Raises RunFailed.
        """
        if (start := self._start) is not None:
            self.exchange.decisions.patiently(lambda: self.exchange.log.write_snapshot(start))
        self._start = None
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the last round is replayed or the run has failed, for at most `seconds`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            for round_ in range(self._first_round, self.rounds + 1):
                self._follow(round_)
        except RunFailed:
            return
        except Exception as error:  # noqa: BLE001 (a run that is no longer checked must not go on)
            self.exchange.fail(f"the auditor cannot replay the log: {error}")

    @torch.no_grad()
    def _follow(self, round_: int) -> None:
        record = self.exchange.record(round_)
        hashes: dict[str, bytes] = {}
        for names in self._parts:
            hashes |= self._replay(names, record)
        self.exchange.confirm(EXCHANGE, round_, hashes)
        store, sha256 = self.exchange.log.store, parameters_sha256(hashes)
        self.exchange.decisions.patiently(lambda: write_audit(store, round_, record.sha256, sha256))
        self._unpruned.append(round_)
        with suppress(StoreError):  # what is not removed is in nobody's way, and is tried again after the next round
            while self._unpruned:
                self._retention.audited(self._unpruned[0])
                self._unpruned.pop(0)
        if round_ == self.rounds or round_ % self.snapshot_every == 0:
            self._save(round_)

    def _replay(self, names: list[str], record: RoundRecord) -> dict[str, bytes]:
        """Apply a round to some parameters; return their hashes."""
        read = self.exchange.log.blobs_of(record)

        def fetch(replica: str, block: str) -> bytes:
            return self.exchange.decisions.patiently(lambda: read(replica, block))

        theta = {name: self._theta.read(name) for name in names}
        apply_round(theta, self.exchange.run, record, fetch, self._optimizer)
        for name, tensor in theta.items():
            self._theta.keep(name, tensor)
        return {name: parameter_sha256(tensor) for name, tensor in theta.items()}

    def _save(self, round_: int) -> None:
        theta = {name: self._theta.read(name) for names in self._parts for name in names}
        snapshot = Snapshot(round_, theta, self._basis, self._optimizer.state)
        self.exchange.decisions.patiently(lambda: self.exchange.log.write_snapshot(snapshot))
        self.exchange.snapshots.kept(round_)
        with suppress(StoreError):
            self._retention.kept_snapshot(round_)
