"""Decided rounds: their records, the blobs that the records name, and run checkpoints of theta, all read from the run
log.

Members of many replicas fetch many small blobs. So one reply has all that follow in the record up to a size, and the
newest replies are kept, because all members fetch the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import DamagedFile, HeteroPPError, Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import FOLLOWING_BYTES_MAX, FOLLOWING_MAX
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.log import URL_SECONDS, checkpoint_key, key_of
from replica_groups.exchange.replay import open_newest
from replica_groups.exchange.runner import CoordinatorRunner

SECONDS_TO_READ = 1.0
"""No further blob is read after this time, because other fetches wait for the reply. A store may be far."""

_KEPT_BYTES, _KEPT_REPLIES, _KEPT_ROUNDS = 16 << 20, 256, 4

_Included = tuple[str, pb.BlobEntry]  # key of a blob in the log, and its entry in the round's record


_ANYBODY = "a member"


@dataclass(frozen=True)
class Reply:
    """A blob of a round, and those of the same block that follow it in the record."""

    header: pb.BlobHeader
    replicas: Mapping[str, int]  # replica -> index of its blob
    ends: tuple[int, ...]  # where each blob ends in the payload
    payload: bytes

    def without(self, replica: str) -> tuple[pb.BlobHeader, list[memoryview]]:
        """Return the header and the payload, in parts, without the blob of a replica that follows the first one."""
        index, whole = self.replicas.get(replica, 0), memoryview(self.payload)
        if not index:
            return self.header, [whole]
        header = pb.BlobHeader()
        header.CopyFrom(self.header)
        del header.following[index - 1]
        return header, [whole[: self.ends[index - 1]], whole[self.ends[index] :]]


class DecidedRounds:
    """The decided rounds of one run, and its run checkpoints, from its log. Thread-safe."""

    def __init__(self, runner: CoordinatorRunner) -> None:
        self._runner, self._log = runner, runner.log
        self._reading = threading.Lock()
        self._blobs_of = lru_cache(_KEPT_ROUNDS)(self._read_blobs_of)
        """`_read_blobs_of` of the rounds that were asked for last."""
        self._replies: OrderedDict[tuple[int, str, str], Reply] = OrderedDict()
        """(round, block, first replica) -> reply; the newest ones."""
        self._held: RunCheckpoint | OpenCheckpoint | None = None
        """The run checkpoint that was asked for last, verified; in memory only until the run log has it."""
        self._newest = 0
        self._opening = threading.Lock()  # not the lock of everything else, because reading may take minutes

    def record(self, request: pb.RecordRequest, caller: Caller) -> pb.RoundRecord:
        """Return the record of a round, once the round is decided."""
        round_, member, incarnation = request.round, None, None
        if caller.name != EXCHANGE:
            member, incarnation = caller.name, self._runner.incarnation(caller)
            if round_ < 1:
                raise self._runner.refused(member, f"asked for the record of round {round_}, expected 1 or later")
        try:
            return self._runner.wait_for_record(round_, member, incarnation, caller.is_asked)
        except (DamagedFile, FileNotFoundError) as error:
            raise Refused(f"no record of round {round_}: {error}") from None

    def fetch(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return one blob of a decided round."""
        key, blob = self._included(request, caller)
        try:
            return self._runner.retry(lambda: self._log.read_blob(key, blob.sha256))
        except FileNotFoundError:
            reason = f"the contribution of {request.replica} to round {request.round} is no longer in the log"
            raise Refused(reason) from None
        except DamagedFile as error:
            raise Refused(str(error)) from None

    def fetch_many(self, request: pb.FetchRequest, caller: Caller) -> tuple[pb.BlobHeader, list[memoryview]]:
        """Return the header and the payload of a blob, and of those that follow it.

        The caller's own replica is left out. A blob that cannot be read ends the reply, and is then asked for alone.
        """
        own = self._runner.roster.members.get(caller.name, "")
        _, blob = self._included(request, caller)
        if request.replica == own or blob.size > FOLLOWING_BYTES_MAX:
            data = self.fetch(request, caller)
            return _header(request, len(data)), [memoryview(data)]
        which = request.round, request.block, request.replica
        with self._reading:
            if which not in self._replies:
                self._replies[which] = self._read(request, caller)
            self._replies.move_to_end(which)
            reply, kept = self._replies[which], self._replies
            while len(kept) > max(1, _KEPT_REPLIES) or (
                len(kept) > 1 and sum(len(one.payload) for one in kept.values()) > _KEPT_BYTES
            ):
                kept.popitem(last=False)
        return reply.without(own)

    def _read(self, request: pb.FetchRequest, caller: Caller) -> Reply:
        """Read a blob and those that follow it, up to the limits."""
        until = time.monotonic() + SECONDS_TO_READ
        parts, replicas = [self.fetch(request, caller)], [request.replica]
        header, most = _header(request, len(parts[0])), FOLLOWING_BYTES_MAX
        of_block = self._blobs_of(request.round)[request.block]
        first = list(of_block).index(request.replica) + 1
        for replica, (key, blob) in islice(of_block.items(), first, first + FOLLOWING_MAX):
            most -= blob.size
            if most < 0 or time.monotonic() >= until:
                break
            try:
                parts.append(self._log.read_blob(key, blob.sha256))
            except (HeteroPPError, OSError):
                break
            replicas.append(replica)
            header.following.add(replica=replica, size=blob.size)
        ends = tuple(accumulate(map(len, parts)))
        return Reply(header, {name: index for index, name in enumerate(replicas)}, ends, b"".join(parts))

    def stored(self, request: pb.FetchRequest, caller: Caller) -> pb.BlobHeader | None:
        """Return where a member may read a blob from the store itself; None if the store has no such URLs."""
        key, blob = self._included(request, caller)
        url = self._runner.retry(lambda: self._log.store.sign("GET", key, URL_SECONDS))
        return None if url is None else pb.BlobHeader(url=url, sha256=blob.sha256, size=blob.size)

    def _included(self, request: pb.FetchRequest, caller: Caller) -> tuple[str, pb.BlobEntry]:
        """Return the key of a blob, and its entry in the round's record."""
        self._runner.require_alive()
        self._runner.require_begun(caller.name)
        round_ = request.round
        if 1 <= round_ <= self._runner.coordinator.last_round:
            included = self._blobs_of(round_).get(request.block, {}).get(request.replica)
            if included is not None:
                return included
        reason = f"no `{request.block}` of {request.replica} in a closed round {round_}"
        raise self._runner.refused(caller.name, reason)

    def _read_blobs_of(self, round_: int) -> Mapping[str, Mapping[str, _Included]]:
        """Return block -> replica -> blob of a decided round, in the order of the record."""
        record = self.record(pb.RecordRequest(round=round_), Caller(EXCHANGE))
        blobs: dict[str, dict[str, _Included]] = {}
        for entry in record.contributions:
            for blob in entry.blobs:
                blobs.setdefault(blob.block, {})[entry.replica] = key_of(record, entry, blob), blob
        return blobs

    # ---- run checkpoints ----

    def begin(self, checkpoint: RunCheckpoint) -> None:
        """Serve this run checkpoint, with which the run begins, from the run log if that has it."""
        is_stored = checkpoint.round in self._runner.retry(self._log.checkpoints)
        self._held, self._newest = None if is_stored else checkpoint, checkpoint.round

    def kept_checkpoint(self, round_: int) -> None:
        """Note that the run log has this run checkpoint, the newest."""
        with self._runner.changed:
            self._newest = max(self._newest, round_)
            if isinstance(self._held, RunCheckpoint):
                self._held = None
            self._runner.changed.notify_all()

    def newest_checkpoint(self, request: pb.NewestCheckpointRequest, caller: Caller) -> pb.NewestCheckpointReply:
        """Return the round of the newest undamaged run checkpoint, and its tensors' names."""
        self._runner.wait_until_begun(caller.is_asked)
        with self._opening:
            held = self._held
            if held is None or held.round != self._newest:
                damaged: list[str] = []
                try:
                    held = self._held = self._runner.retry(lambda: open_newest(self._log, self._newest, damaged))
                except FileNotFoundError as error:
                    raise Refused("; ".join([str(error), *damaged])) from None
                for one in damaged:
                    print(f"{EXCHANGE}: {one}; reading an older one", file=sys.stderr, flush=True)
            return pb.NewestCheckpointReply(round=held.round, names=held.shapes)

    def open_checkpoint(self, request: pb.CheckpointRequest, caller: Caller) -> RunCheckpoint | OpenCheckpoint:
        """Return a run checkpoint that has the tensors of a request, by default the newest."""
        self._runner.require_begun(_ANYBODY, caller.is_asked)
        round_ = request.round if request.HasField("round") else self._newest
        with self._opening:
            checkpoint = self._held
            if checkpoint is None or checkpoint.round != round_:
                try:
                    checkpoint = self._held = self._runner.retry(lambda: self._log.open_checkpoint(round_))
                except (DamagedFile, FileNotFoundError) as error:
                    raise Refused(f"{_ANYBODY}: no run checkpoint after round {round_}: {error}") from None
        unknown = [name for name in request.names if name not in checkpoint.shapes]
        if unknown:
            more = f" and {len(unknown) - 1} other names" if len(unknown) > 1 else ""
            reason = f"found no tensor named {unknown[0]:.80}{more} in the run checkpoint"
            raise self._runner.refused(_ANYBODY, reason)
        return checkpoint

    def stored_at(self, checkpoint: OpenCheckpoint) -> str | None:
        """Return a URL at which a member may read a run checkpoint from the store itself; None if there is none."""
        return self._runner.retry(lambda: self._log.store.sign("GET", checkpoint_key(checkpoint.round), URL_SECONDS))


def _header(request: pb.FetchRequest, size: int) -> pb.BlobHeader:
    return pb.BlobHeader(round=request.round, replica=request.replica, block=request.block, size=size)
