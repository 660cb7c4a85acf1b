"""Snapshots for members: the newest one, or one of an earlier round, read from the run log in pieces."""

from __future__ import annotations

import sys
import threading

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import DamagedFile, Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_service import Caller
from hetero_pp.run.snapshot import OpenSnapshot, Snapshot
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.restart import open_newest
from replica_groups.exchange.run_state import RunState

_ANYBODY = "a member"


class Snapshots:
    """Snapshots of one run. Keeps the last one that was asked for open, so that it is verified once. Thread-safe."""

    def __init__(self, state: RunState, log: ContributionLog) -> None:
        self._state, self._log = state, log
        self._held: Snapshot | OpenSnapshot | None = None
        """In memory only until the run log has it."""
        self._newest = 0
        self._has_begun = False
        self._reading = threading.Lock()  # not the lock of everything else, because reading may take minutes

    def begin(self, snapshot: Snapshot) -> None:
        """Serve this snapshot, with which the run begins."""
        self._held, self._newest, self._has_begun = snapshot, snapshot.round, True

    def kept(self, round_: int) -> None:
        """Note that the run log has this snapshot, the newest."""
        with self._state.changed:
            self._newest = max(self._newest, round_)
            if isinstance(self._held, Snapshot):
                self._held = None
            self._state.changed.notify_all()

    def newest(self, request: pb.NewestSnapshotRequest, caller: Caller) -> pb.NewestSnapshotReply:
        """Return the round of the newest undamaged snapshot, and its tensors' names."""
        self._state.wait_until_begun(caller.is_asked)
        with self._reading:
            held = self._held
            if held is None or held.round != self._newest:
                damaged: list[str] = []
                try:
                    held = self._state.decisions.patiently(lambda: open_newest(self._log, self._newest, damaged))
                    self._held = held
                except FileNotFoundError as error:
                    raise Refused("; ".join([str(error), *damaged])) from None
                for one in damaged:
                    print(f"{EXCHANGE}: {one}; reading an older one", file=sys.stderr, flush=True)
            return pb.NewestSnapshotReply(round=held.round, names=held.shapes)

    def open(self, request: pb.SnapshotRequest) -> Snapshot | OpenSnapshot:
        """Return a snapshot that has the tensors of a request, by default the newest."""
        snapshot = self._after(request.round if request.HasField("round") else self._newest)
        unknown = [name for name in request.names if name not in snapshot.shapes]
        if unknown:
            more = f" and {len(unknown) - 1} other names" if len(unknown) > 1 else ""
            reason = f"found no tensor named {unknown[0]:.80}{more} in the snapshot"
            raise self._state.refused(_ANYBODY, reason)
        return snapshot

    def _after(self, round_: int) -> Snapshot | OpenSnapshot:
        """Return the snapshot after a round, from the log unless it is open or in memory."""
        if not self._has_begun:
            raise self._state.refused(_ANYBODY, "the run has not started: some members have not joined")
        with self._reading:
            held = self._held
            if held is None or held.round != round_:
                try:
                    held = self._state.decisions.patiently(lambda: self._log.open_snapshot(round_))
                    self._held = held
                except (DamagedFile, FileNotFoundError) as error:
                    raise Refused(f"{_ANYBODY}: no snapshot after round {round_}: {error}") from None
            return held
