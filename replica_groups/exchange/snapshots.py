"""Snapshots for members: the newest one, or one of an earlier round, read from the run log."""

from __future__ import annotations

import sys
import threading

from torch import Tensor

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import DamagedFile, Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_service import Caller
from hetero_pp.run.snapshot import Snapshot
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.restart import newest_sound
from replica_groups.exchange.run_state import RunState

_ANYBODY = "a member"


class Snapshots:
    """Snapshots of one run. Keeps the last one that was read in memory. Thread-safe."""

    def __init__(self, state: RunState, log: ContributionLog) -> None:
        self._state, self._log = state, log
        self._held: Snapshot | None = None
        self._newest = 0
        self._reading = threading.Lock()  # not the lock of everything else, because reading may take minutes

    def begin(self, snapshot: Snapshot) -> None:
        """Serve this snapshot, with which the run begins."""
        self._held, self._newest = snapshot, snapshot.round

    def kept(self, round_: int) -> None:
        """Note that the run log has a newer snapshot."""
        with self._state.changed:
            self._newest = round_
            self._state.changed.notify_all()

    @property
    def newest_round(self) -> int:
        """Round of the newest snapshot in the run log."""
        return self._newest

    def newest(self, request: pb.NewestSnapshotRequest, caller: Caller) -> pb.NewestSnapshotReply:
        """Return the round of the newest undamaged snapshot, and its tensors' names."""
        self._state.wait_until_begun(caller.is_asked)
        with self._reading:
            if self._held is None or self._held.round != self._newest:
                damaged: list[str] = []
                try:
                    self._held = self._state.decisions.patiently(lambda: newest_sound(self._log, self._newest, damaged))
                except FileNotFoundError as error:
                    raise Refused("; ".join([str(error), *damaged])) from None
                for one in damaged:
                    print(f"{EXCHANGE}: {one}; reading an older one", file=sys.stderr, flush=True)
            return pb.NewestSnapshotReply(round=self._held.round, names=self._held.tensors())

    def read(self, request: pb.SnapshotRequest) -> dict[str, Tensor]:
        """Return tensors of a snapshot, by default the newest."""
        tensors = self._after(request.round if request.HasField("round") else self._newest).tensors()
        unknown = [name for name in request.names if name not in tensors]
        if unknown:
            more = f" and {len(unknown) - 1} other names" if len(unknown) > 1 else ""
            reason = f"found no tensor named {unknown[0]:.80}{more} in the snapshot"
            raise self._state.refused(_ANYBODY, reason)
        return {name: tensors[name] for name in request.names}

    def _after(self, round_: int) -> Snapshot:
        """Return the snapshot after a round, from the log unless it is in memory."""
        if self._held is None:
            raise self._state.refused(_ANYBODY, "the run has not started: some members have not joined")
        with self._reading:
            if self._held.round != round_:
                try:
                    self._held = self._state.decisions.patiently(lambda: self._log.read_snapshot(round_))
                except (DamagedFile, FileNotFoundError) as error:
                    raise Refused(f"{_ANYBODY}: no snapshot after round {round_}: {error}") from None
            return self._held
