"""One member's exchange for all ranks of its replica: the first rank calls, and all get the reply or the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.core.errors import ExchangeLost, HeteroPPError, RunFailed, Stopped, Suspended, TermOver
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, call_of, untold
from replica_groups.engines.ranks import Ranks

_ANSWER = b"\0"

_ERRORS: tuple[type[HeteroPPError], ...] = (RunFailed, TermOver, Suspended, ExchangeLost, Stopped)
"""Errors that all ranks have to handle alike; any other error of the first rank is RunFailed on the others."""


class CollectiveExchange(ExchangeService):
    """The exchange on every rank of a replica; only the first rank has an `exchange`.

    All ranks make a call together if they need its reply. The first rank alone sends heartbeats, blobs, hashes and
    reports.
    """

    def __init__(self, exchange: ExchangeService | None, ranks: Ranks) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._deferred: HeteroPPError | None = None
        """Error of a deposit, which the other ranks have not heard of yet."""

    def call(self, request: Message, caller: Caller) -> Any:
        reply = GetMessageClass(call_of(request).output_type)
        if isinstance(request, pb.BeatRequest | pb.HashReport | pb.ReportRequest):
            return reply() if self._exchange is None else self._exchange.call(request, caller)
        deferred = None
        if isinstance(request, pb.RecordRequest):
            deferred, self._deferred = self._deferred, None

        def ask(exchange: ExchangeService) -> bytes:
            if deferred is not None:
                raise deferred
            found: Message = exchange.call(request, caller)
            return found.SerializeToString()

        return reply.FromString(self._ask(ask))

    def read_snapshot(
        self, request: pb.SnapshotRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        """Return the tensors, each broadcast alone, because a large model would be twice in memory otherwise."""
        return {name: self._tensor(name, request, caller) for name in request.names}

    def _tensor(self, name: str, request: pb.SnapshotRequest, caller: Caller) -> Tensor:
        one = pb.SnapshotRequest(names=[name], round=request.round if request.HasField("round") else None)
        return load(self._ask(lambda exchange: save(exchange.read_snapshot(one, caller))))[name]

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        """Deposit a blob on the first rank. The next call for the record raises its error on all ranks."""
        if self._exchange is not None:
            try:
                self._exchange.deposit_blob(header, data, caller)
            except (TermOver, Suspended, Stopped) as error:
                self._deferred = error

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        return self._ask(lambda exchange: exchange.fetch_blob(request, caller))

    def _ask(self, question: Callable[[ExchangeService], bytes]) -> bytes:
        answer, failure = None, None
        if self._exchange is not None:
            try:
                answer = _ANSWER + question(self._exchange)
            except HeteroPPError as error:
                kind = next((index for index, one in enumerate(_ERRORS) if isinstance(error, one)), 0)
                answer, failure = bytes([1 + kind]) + str(error).encode(), error
        told = self._ranks.broadcast_bytes(answer)
        if failure is not None:
            raise failure
        if told[:1] != _ANSWER:
            raise _ERRORS[told[0] - 1](told[1:].decode())
        return told[1:]
