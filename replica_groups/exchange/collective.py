"""One member's exchange for all ranks of its replica: the first asks, and all get the answer or fail with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import ExchangeLost, HeteroPPError, RunFailed, Stopped, Suspended, TermOver
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.outer.exchange_service import NO_STATES, Assignment, AvailableStates, ExchangeService, Standing
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.ranks import Ranks

_ANSWER = b"\0"
_ERRORS: tuple[type[HeteroPPError], ...] = (RunFailed, TermOver, Suspended, ExchangeLost, Stopped)
"""What all ranks have to go on from in the same way; any other error of the first is RunFailed to the others."""


class CollectiveExchange:
    """Implements ExchangeService on every rank; only the first has an `exchange`.

    What has an answer is asked by all ranks together; what has none is done by the first alone.
    """

    def __init__(self, exchange: ExchangeService | None, ranks: Ranks) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._deferred: HeteroPPError | None = None
        """What went wrong with a deposit, of which the other ranks do not know yet."""

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """See ExchangeService. All ranks were started with one configuration, and read one text."""
        return self._ask(lambda exchange: exchange.agree(member, configuration, tokens).encode()).decode()

    def join(
        self, member: str, address: str, available: AvailableStates = NO_STATES, process: str | None = None
    ) -> int:
        """See ExchangeService. The first rank speaks for all: they see one file system."""
        return int(self._ask(lambda exchange: str(exchange.join(member, address, available, process)).encode()))

    def last_round(self) -> int:
        """See ExchangeService."""
        return int(self._ask(lambda exchange: str(exchange.last_round()).encode()))

    def changes(self) -> Changes:
        """See ExchangeService."""
        return Changes.from_json(self._ask(lambda exchange: exchange.changes().to_json().encode()).decode())

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        """See ExchangeService."""
        round_, names = json.loads(self._ask(lambda exchange: json.dumps(exchange.newest_snapshot()).encode()))
        return round_, names

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """See ExchangeService. Tensor by tensor, as all of a large model would be twice in memory."""
        return {name: self._tensor(name, round_) for name in names}

    def _tensor(self, name: str, round_: int | None) -> Tensor:
        return load(self._ask(lambda exchange: save(exchange.snapshot([name], round_))))[name]

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        """See ExchangeService."""
        answer = self._ask(
            lambda exchange: json.dumps(asdict(exchange.assign(member, holds, address, trained))).encode()
        )
        return Assignment(**json.loads(answer))

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        """See ExchangeService. Asked by the first rank alone, beside what all of them do."""
        return Standing() if self._exchange is None else self._exchange.beat(member, round_, epoch, progress, computes)

    def broken(self, member: str, epoch: int, cause: str, blames: str = "") -> None:
        """See ExchangeService."""

        def tell(exchange: ExchangeService) -> bytes:
            exchange.broken(member, epoch, cause, blames)
            return b""

        self._ask(tell)

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """See ExchangeService. Called by the first rank alone; all hear from `record` if the round is trained again."""
        if self._exchange is not None:
            try:
                self._exchange.deposit(member, address, data, epoch, steps)
            except (TermOver, Suspended, Stopped) as error:
                self._deferred = error

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """See ExchangeService."""

        def ask(exchange: ExchangeService) -> bytes:
            error, self._deferred = self._deferred, None
            if error is not None:
                raise error
            return exchange.record(round_, member).SerializeToString()

        return RoundRecord.FromString(self._ask(ask))

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
                kind = next((index for index, one in enumerate(_ERRORS) if isinstance(error, one)), 0)
                answer, failure = bytes([1 + kind]) + str(error).encode(), error
        told = self._ranks.broadcast_bytes(answer)
        if failure is not None:
            raise failure
        if told[:1] != _ANSWER:
            raise _ERRORS[told[0] - 1](told[1:].decode())
        return told[1:]
