"""A member's link to the exchange that carries a round while the member trains the next one.

Contributions wait until all of a member's are there. Then a thread deposits them, waits for the round's record and
fetches the blobs that the record names. They are here when the record is asked for, unless training took less time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_service import Caller
from replica_groups.loop.shaped import ShapedExchange

_Blob = tuple[pb.BlobHeader, bytes, Caller]
"""Arguments of `deposit_blob`."""
_Fetched = dict[tuple[str, str], bytes]
"""Blobs of a round, by replica and block."""


class CarriedExchange(ShapedExchange):
    """The exchange of one member, which asks for one round after the other."""

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
            except BaseException as error:  # noqa: BLE001 - whoever asks for the record gets it
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
        self,
        member: str,
        record: pb.RoundRecord,
        replica: str,
        blocks: Collection[str],
        is_over: Callable[[], bool],
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
