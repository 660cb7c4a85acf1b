"""Fault injection around the calls of an outer round: reports phases, and delays contributions of missed rounds."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_pp.faults import Faults, Phase
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.outer_round import Contributions


class HeldBack:
    """Delivers contributions of `faults.missed` rounds late, after the round record exists.

    Implements Contributions.
    """

    def __init__(self, exchange: Contributions, faults: Faults) -> None:
        self._exchange, self._faults = exchange, faults
        self._contributed: int | None = None
        self._held: list[tuple[str, BlobAddress, bytes, int | None, int]] = []

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        if self._contributed != address.round:
            self._contributed, self._held = address.round, []
            self._faults.reached(Phase.CONTRIBUTING, address.round)
        if address.round in self._faults.missed:
            self._held.append((member, address, data, epoch, steps))
        else:
            self._exchange.deposit(member, address, data, epoch, steps)

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        if self._contributed == round_:
            self._contributed = None
            self._faults.reached(Phase.WAITING, round_)
        record = self._exchange.record(round_, member)
        held, self._held = self._held, []
        for blob in held:
            self._exchange.deposit(*blob)
        return record

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        return self._exchange.fetch(member, round_, replica, block)

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        self._exchange.confirm(member, round_, sha256)
