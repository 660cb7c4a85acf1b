"""A member's link to the exchange, shaped and counted like any other link."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.links import DIRECTIONS, LinkSpec
from hetero_pp.core.errors import Stopped
from hetero_pp.link.ledger import FRAME_BYTES, Ledger, raw_frames, wire_bytes
from hetero_pp.link.shaper import ShapedMessage, Shaper
from hetero_pp.link.shaping import busy_seconds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_service import Arrived, Caller, ExchangeService, ForwardedExchange, untold
from hetero_pp.pseudo_gradient.together import apart
from replica_groups.loop.stopping import NEVER_STOPPED, SECONDS_TO_FETCH, Stopping


class ShapedExchange(ForwardedExchange):
    """Delays what a member sends to and fetches from the exchange as the link's shape says.

    Blobs and snapshots are shaped and counted; control messages and reports, some hundred bytes each, are not.
    """

    def __init__(
        self,
        exchange: ExchangeService,
        spec: LinkSpec,
        seed: int,
        lines: Lines | None = None,
        stopping: Stopping = NEVER_STOPPED,
    ) -> None:
        """`lines`: the member's lines, which its stage links share. `stopping` may interrupt the calls that wait."""
        super().__init__(exchange)
        lines = lines or Lines()
        self._stopping = stopping
        up, down = (lines.buckets(spec, way) for way in DIRECTIONS)
        self._up = Shaper(spec.forward, f"{seed}/{spec.name}/forward", lines.clock, up)
        self._down = Shaper(spec.backward, f"{seed}/{spec.name}/backward", lines.clock, down)
        self.forward = Ledger()
        self.backward = Ledger()

    def call(self, request: Message, caller: Caller) -> Any:
        """Make a call. Stopped may interrupt it while it waits for a reply, or for an exchange that is gone.

        A member that is asked to stop and gets no reply to its hashes continues without one: it has applied the round.
        """
        match request:
            case pb.RecordRequest():
                with self._stopping.allowed(request.round):
                    return super().call(request, caller)
            case pb.HashReport():
                with suppress(Stopped), self._stopping.allowed(request.round):
                    super().call(request, caller)
                return pb.HashReply()
            case pb.NewestSnapshotRequest():
                with self._stopping.allowed(0):  # the member is recovering, and can save its state afterwards
                    return super().call(request, caller)
        with self._stopping.allowed():
            return super().call(request, caller)

    def read_snapshot(
        self, request: pb.SnapshotRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        """Read a snapshot. The line carries each frame as it comes, because a whole model takes long to come."""
        message: ShapedMessage | None = None

        def carry(n_bytes: int) -> None:
            nonlocal message
            message = message or self._down.start_message()
            message.transmit(wire_bytes(raw_frames(n_bytes)))
            arrived(n_bytes)

        with self._stopping.allowed(request.round, SECONDS_TO_FETCH):
            tensors = super().read_snapshot(request, caller, carry)
        size = sum(tensor.nbytes for tensor in tensors.values())
        wire = wire_bytes(raw_frames(size))
        self.backward.add(0, size, wire, busy_seconds(self._down.shape, wire))
        return tensors

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        with self._stopping.allowed(header.round):  # the round may be decided by this blob
            for _, blob in apart(header, data):  # each counts as a message, as it is predicted
                _carry(self._up, self.forward, header.round, len(blob))
            super().deposit_blob(header, data, caller)

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        with self._stopping.allowed(request.round, SECONDS_TO_FETCH):
            data = super().fetch_blob(request, caller)
            _carry(self._down, self.backward, request.round, len(data))
        return data

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        """Send a file. Its frames cross the line first: a checkpoint may take longer than a round."""
        message, size = self._up.start_message(), header.size
        for start in range(0, size, FRAME_BYTES):
            message.transmit(wire_bytes(raw_frames(min(FRAME_BYTES, size - start))))
        wire = wire_bytes(raw_frames(size))
        self.forward.add(header.round, size, wire, busy_seconds(self._up.shape, wire))
        super().show_file(header, path, caller)


def _carry(shaper: Shaper, ledger: Ledger, round_: int, size: int) -> None:
    wire = wire_bytes(raw_frames(size))
    ledger.add(round_, size, wire, shaper.start_message().transmit(wire))
