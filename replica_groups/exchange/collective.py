"""One member's exchange for all ranks of its replica: the first asks, and all get the answer or fail with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import HeteroPPError, RunFailed
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.outer.exchange_service import NO_STATES, AvailableStates, ExchangeService
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.ranks import Ranks

_ANSWER, _ERROR = b"\0", b"\1"


class CollectiveExchange:
    """Implements ExchangeService on every rank; only the first has an `exchange`.

    What has an answer is asked by all ranks together; what has none is done by the first alone.
    """

    def __init__(self, exchange: ExchangeService | None, ranks: Ranks) -> None:
        self._exchange = exchange
        self._ranks = ranks

    def agree(self, member: str, configuration: str) -> str:
        """See ExchangeService. All ranks were started with one configuration."""
        return self._ask(lambda exchange: exchange.agree(member, configuration).encode()).decode()

    def join(self, member: str, address: str, available: AvailableStates = NO_STATES) -> None:
        """See ExchangeService. The first rank speaks for all: they see one file system."""

        def join(exchange: ExchangeService) -> bytes:
            exchange.join(member, address, available)
            return b""

        self._ask(join)

    def last_round(self) -> int:
        """See ExchangeService."""
        return int(self._ask(lambda exchange: str(exchange.last_round()).encode()))

    def changes(self) -> Changes:
        """See ExchangeService."""
        return Changes.from_json(self._ask(lambda exchange: exchange.changes().to_json().encode()).decode())

    def locate(self, member: str) -> str:
        """See ExchangeService."""
        return self._ask(lambda exchange: exchange.locate(member).encode()).decode()

    def snapshot(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See ExchangeService. Tensor by tensor, as all of a large model would be twice in memory."""
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> Tensor:
        return load(self._ask(lambda exchange: save(exchange.snapshot([name]))))[name]

    def deposit(self, member: str, address: BlobAddress, data: bytes) -> None:
        """See ExchangeService."""
        if self._exchange is not None:
            self._exchange.deposit(member, address, data)

    def record(self, round_: int) -> RoundRecord:
        """See ExchangeService."""
        return RoundRecord.FromString(self._ask(lambda exchange: exchange.record(round_).SerializeToString()))

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        return self._ask(lambda exchange: exchange.fetch(member, round_, replica, block))

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService."""
        if self._exchange is not None:
            self._exchange.confirm(member, round_, sha256)

    def report(self, reports: Sequence[Report]) -> None:
        """See ExchangeService."""
        if self._exchange is not None:
            self._exchange.report(reports)

    def _ask(self, question: Callable[[ExchangeService], bytes]) -> bytes:
        answer, failure = None, None
        if self._exchange is not None:
            try:
                answer = _ANSWER + question(self._exchange)
            except HeteroPPError as error:
                answer, failure = _ERROR + str(error).encode(), error
        told = self._ranks.broadcast_bytes(answer)
        if failure is not None:
            raise failure
        if told[:1] == _ERROR:
            raise RunFailed(told[1:].decode())
        return told[1:]
