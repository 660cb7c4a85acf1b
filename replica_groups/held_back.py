"""What a member asks of the exchange in an outer round, with faults: told where it is, and contributions held back."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_pp.faults import Faults, Phase
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.outer_round import Contributions


class HeldBack:
    """Implements Contributions; a contribution of a missed round arrives once its record is there, and is late."""

    def __init__(self, exchange: Contributions, faults: Faults) -> None:
        self._exchange, self._faults = exchange, faults
        self._contributed: int | None = None
        self._held: list[tuple[str, BlobAddress, bytes, int | None, int]] = []

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """See ExchangeService."""
        if self._contributed != address.round:
            self._contributed, self._held = address.round, []
            self._faults.reached(Phase.CONTRIBUTING, address.round)
        if address.round in self._faults.missed:
            self._held.append((member, address, data, epoch, steps))
        else:
            self._exchange.deposit(member, address, data, epoch, steps)

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """See ExchangeService."""
        if self._contributed == round_:
            self._contributed = None
            self._faults.reached(Phase.WAITING, round_)
        record = self._exchange.record(round_, member)
        held, self._held = self._held, []
        for blob in held:
            self._exchange.deposit(*blob)
        return record

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        return self._exchange.fetch(member, round_, replica, block)

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService."""
        self._exchange.confirm(member, round_, sha256)
