"""A member's calls to the exchange about outer rounds: deposits, records, and the blobs that records name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from hetero_pp.core.errors import ExchangeLost
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.pseudo_gradient.together import batches


class Contributions(Protocol):
    """The calls of an outer round to the exchange (`ExchangeService`)."""

    def deposit_together(
        self, member: str, blobs: Mapping[BlobAddress, bytes], epoch: int | None = None, steps: int = 0
    ) -> None: ...

    def record(self, round_: int, member: str | None = None) -> RoundRecord: ...

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes: ...

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None: ...


class Carrier(Protocol):
    """With overlap, completes a round in the background while the next one is trained (`CarriedExchange`)."""

    def carry(self, member: str, round_: int, replica: str, blocks: Collection[str]) -> None: ...

    def give_up(self) -> None: ...


class RoundCalls:
    """Calls in the name of one member of a replica."""

    def __init__(self, run: str, member: str, replica: str, exchange: Contributions) -> None:
        self.run, self.member, self.replica, self.exchange = run, member, replica, exchange
        self.blocked = 0.0
        """Seconds spent waiting for the exchange; callers reset it to 0."""

    def address(self, round_: int, block: str) -> BlobAddress:
        return BlobAddress(self.run, round_, self.replica, block)

    def deposit(
        self,
        round_: int,
        blobs: Iterable[tuple[str, bytes]],
        epoch: int | None,
        steps: int,
        before_last: Callable[[], object] = lambda: None,
    ) -> None:
        """Deposit blobs of this member, by block, as they are made. Small ones go together.

        `before_last` is called once all are made, and before the last are sent: then the contribution is complete.
        """

        def send(batch: Iterable[tuple[str, bytes]]) -> None:
            with self._blocking():
                own = {self.address(round_, block): data for block, data in batch}
                self.exchange.deposit_together(self.member, own, epoch, steps)

        last = None
        for batch in batches(blobs):
            if last is not None:
                send(last)
            last = batch
        before_last()
        if last is not None:
            send(last)

    def record(
        self, round_: int, own: Mapping[str, bytes] | None = None, epoch: int | None = None, steps: int = 0
    ) -> RoundRecord:
        """Return the record once the round is closed.

        After a lost connection, deposit `own` again, as the exchange may have restarted.
        """
        while True:
            try:
                with self._blocking():
                    return self.exchange.record(round_, self.member)
            except ExchangeLost:
                self.deposit(round_, (own or {}).items(), epoch, steps)

    def entry(self, record: RoundRecord) -> ContributionEntry | None:
        """Return the entry of a record that is this replica's; None if the round excludes it."""
        return next((one for one in record.contributions if one.replica == self.replica), None)

    def fetches(self, round_: int) -> Callable[[str, str], bytes]:
        """Return a function that fetches the blob of (replica, block) in a round."""

        def fetch(replica: str, block: str) -> bytes:
            with self._blocking():
                return self.exchange.fetch(self.member, round_, replica, block)

        return fetch

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.blocked += time.monotonic() - began
