"""A member's place in its run: takes it as often as it is lost, asks for work, has links to the stages beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hetero_pp.errors import TermOver
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.ledger import Ledger
from hetero_pp.links import Direction
from hetero_pp.outer.exchange_service import Assignment, AvailableStates, ExchangeService
from replica_groups.exchange.pulse import Pulse

LedgerOf = tuple[str, Direction, Ledger]
"""(link, direction, what this member counted of it)"""


class Links(Protocol):
    """Of a member to the stages beside it, and what it counts; see take_part."""

    def form(self, work: Assignment) -> LinkEnds:
        """Links of the assignment's epoch. Raises LinkError."""

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over; see Connections."""

    @property
    def ledgers(self) -> Sequence[LedgerOf]:
        """What was sent, by link and direction."""


class Seat:
    """What a member asks of the rest of its run beside the outer round."""

    def __init__(
        self, exchange: ExchangeService, member: str, address: str, available: AvailableStates, links: Links
    ) -> None:
        """`address`: where the member listens for the stages beside it; `available`: what it could go on from."""
        self.exchange, self.member, self.links = exchange, member, links
        self.pulse = Pulse(exchange, member, links.give_up)
        self._address, self._available = address, available
        self._epoch: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Join, and be known to be there while the block runs."""
        self._join()
        with self.pulse.beating():
            yield

    def _join(self) -> None:
        self.exchange.join(self.member, self._address, self._available)

    def ask(self, holds: int, trained: int = 0) -> Assignment:
        """What to do next, with theta after a round, and another one trained beyond it (0: none); takes the place again
        if it was lost. See ExchangeService.assign.
        """
        while True:
            try:
                return self.exchange.assign(self.member, holds, self._address, trained)
            except TermOver:
                self._epoch = None
                self._join()

    def form(self, work: Assignment) -> LinkEnds | None:
        """Links of an assignment's epoch; None if those that there are are of it. Raises LinkError."""
        if work.epoch == self._epoch:
            return None
        self._epoch = work.epoch
        return self.links.form(work)

    def leave_links(self, cause: str) -> int | None:
        """Links are not to be used any more, and whoever waits for this member hears why; which epoch they were of."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self.links.give_up(epoch + 1, cause)
        return epoch
