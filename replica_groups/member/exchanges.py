"""The exchange as the loop of one member sees it: layers around the client, of which each adds one thing.

`ShapedExchange` shapes and counts traffic like any other link, and `CarriedExchange` also carries a round while the
member trains the next one. `HeldBack` injects faults. On several ranks, `collective` shares the replies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.links import DIRECTIONS, LinkSpec
from hetero_pp.core.errors import Stopped
from hetero_pp.link.ledger import FRAME_BYTES, Ledger, raw_frames, wire_bytes
from hetero_pp.link.shaping import busy_seconds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.link.turns import ShapedMessage, Shaper
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.together import apart
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, ForwardedExchange, untold
from hetero_pp.store.faults import Faults, Phase
from replica_groups.member.stopping import NEVER_STOPPED, SECONDS_TO_FETCH, Stopping

_Blob = tuple[pb.BlobHeader, bytes, Caller]
"""Arguments of `deposit_blob`."""

_Fetched = dict[tuple[str, str], bytes]
"""Blobs of a round, by replica and block."""


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


class CarriedExchange(ShapedExchange):
    """Carries a round while the member trains the next one. The member asks for one round after the other.

    Contributions wait until all of a member's are there. Then a thread deposits them, waits for the round's record and
    fetches the blobs that the record names. They are here when the record is asked for, unless training took less time.
    """

    _waiting: tuple[_Blob, ...] = ()
    """Blobs that were not deposited yet."""
    _carried: tuple[int, Future[tuple[pb.RoundRecord, _Fetched]]] | None = None
    """The round that a thread carries. The thread of a round that was given up may still wait, unread."""
    _fetched: tuple[int, _Fetched] = 0, {}

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        """Keep the blob until `carry` is called or the record is asked for, which raises what a deposit would."""
        self._waiting += ((header, data, caller),)

    def carry(self, member: str, round_: int, replica: str, blocks: Collection[str]) -> None:
        """Deposit what waits, and fetch the other replicas' blobs of these blocks; `replica` is the member's."""
        waiting, self._waiting, found = self._waiting, (), Future[tuple[pb.RoundRecord, _Fetched]]()
        self._carried, self._fetched = (round_, found), (0, {})

        def run() -> None:
            try:
                record = self._record(waiting, pb.RecordRequest(round=round_), Caller(member))
                fetched = self._fetch_all(member, record, replica, blocks, found.cancelled)
                with suppress(InvalidStateError):  # it was given up
                    found.set_result((record, fetched))
            except BaseException as error:  # noqa: BLE001 (raised by the call for the record)
                with suppress(InvalidStateError):
                    found.set_exception(error)

        threading.Thread(target=run, name=f"carries round {round_} of {member}", daemon=True).start()

    def give_up(self) -> None:
        """Wait no more for the round that is carried, and drop the blobs that were not deposited."""
        self._waiting = ()
        if self._carried is not None:
            self._carried[1].cancel()
            self._carried = None

    def call(self, request: Message, caller: Caller) -> Any:
        if not isinstance(request, pb.RecordRequest):
            return super().call(request, caller)
        carried, self._carried = self._carried, None
        if carried is None or carried[0] != request.round:
            waiting, self._waiting = self._waiting, ()
            return self._record(waiting, request, caller)
        with self._stopping.allowed(request.round):
            record, fetched = carried[1].result()
        self._fetched = request.round, fetched
        return record

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return a blob. One that was fetched in the background is returned once, and then forgotten."""
        of_round, fetched = self._fetched
        data = fetched.pop((request.replica, request.block), None) if of_round == request.round else None
        return super().fetch_blob(request, caller) if data is None else data

    def _record(self, waiting: tuple[_Blob, ...], request: pb.RecordRequest, caller: Caller) -> pb.RoundRecord:
        for blob in waiting:
            super().deposit_blob(*blob)
        record: pb.RoundRecord = super().call(request, caller)
        return record

    def _fetch_all(
        self, member: str, record: pb.RoundRecord, replica: str, blocks: Collection[str], is_over: Callable[[], bool]
    ) -> _Fetched:
        fetch = super().fetch_blob
        return {
            (entry.replica, blob.block): fetch(
                pb.FetchRequest(round=record.round, replica=entry.replica, block=blob.block), Caller(member)
            )
            for entry in record.contributions
            for blob in entry.blobs
            if blob.block in blocks and entry.replica != replica and not is_over()
        }


class HeldBack(ForwardedExchange):
    """Injects faults: reports phases, and delivers contributions of `faults.missed` rounds after the round record."""

    def __init__(self, exchange: ExchangeService, faults: Faults) -> None:
        super().__init__(exchange)
        self._faults = faults
        self._contributed: int | None = None
        self._held: list[tuple[pb.BlobHeader, bytes, Caller]] = []

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        if self._contributed != header.round:
            self._contributed, self._held = header.round, []
            self._faults.reached(Phase.CONTRIBUTING, header.round)
        if header.round in self._faults.missed:
            self._held.append((header, data, caller))
        else:
            super().deposit_blob(header, data, caller)

    def call(self, request: Message, caller: Caller) -> Any:
        if not isinstance(request, pb.RecordRequest):
            return super().call(request, caller)
        if self._contributed == request.round:
            self._contributed = None
            self._faults.reached(Phase.WAITING, request.round)
        record = super().call(request, caller)
        held, self._held = self._held, []
        for blob in held:
            super().deposit_blob(*blob)
        return record
