"""Fault injection around the calls of an outer round: reports phases, and delays contributions of missed rounds."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from hetero_pp.messages.messages_pb2 import BlobHeader, RecordRequest
from hetero_pp.outer.exchange_service import Caller, ExchangeService, ForwardedExchange
from hetero_pp.store.faults import Faults, Phase


class HeldBack(ForwardedExchange):
    """Delivers contributions of `faults.missed` rounds late, after the round record exists."""

    def __init__(self, exchange: ExchangeService, faults: Faults) -> None:
        super().__init__(exchange)
        self._faults = faults
        self._contributed: int | None = None
        self._held: list[tuple[BlobHeader, bytes, Caller]] = []

    def deposit_blob(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        if self._contributed != header.round:
            self._contributed, self._held = header.round, []
            self._faults.reached(Phase.CONTRIBUTING, header.round)
        if header.round in self._faults.missed:
            self._held.append((header, data, caller))
        else:
            super().deposit_blob(header, data, caller)

    def call(self, request: Message, caller: Caller) -> Any:
        if not isinstance(request, RecordRequest):
            return super().call(request, caller)
        if self._contributed == request.round:
            self._contributed = None
            self._faults.reached(Phase.WAITING, request.round)
        record = super().call(request, caller)
        held, self._held = self._held, []
        for blob in held:
            super().deposit_blob(*blob)
        return record
