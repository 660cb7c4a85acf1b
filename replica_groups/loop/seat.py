"""Session (`Seat`) of a member with its run: takes a slot, asks for work, forms links to neighbouring stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hetero_pp.config.links import Direction
from hetero_pp.core.errors import TermOver
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.ledger import Ledger
from hetero_pp.messages.messages_pb2 import AssignReply
from hetero_pp.outer.exchange_service import AvailableStates, ExchangeService
from replica_groups.loop.pulse import Pulse

LedgerOf = tuple[str, Direction, Ledger]
"""(link, direction, this member's byte counts)"""


class Links(Protocol):
    """Links of a member to the neighbouring stages, and their byte counts."""

    def form(self, work: AssignReply) -> LinkEnds:
        """Return links of the assignment's generation. Raises LinkError."""

    def give_up(self, before: int, cause: str) -> None:
        """Close links of generations before this one, from any thread."""

    @property
    def ledgers(self) -> Sequence[LedgerOf]:
        """Counts of what was sent, by link and direction."""


class Seat:
    """The requests of a member to the rest of its run, apart from the outer round."""

    def __init__(
        self, exchange: ExchangeService, member: str, address: str, available: AvailableStates, links: Links
    ) -> None:
        """`address`: where the member listens for other stages. `available`: its member checkpoints."""
        self.exchange, self.member, self.links = exchange, member, links
        self.pulse = Pulse(exchange, member, links.give_up)
        self._address, self._available = address, available
        self._epoch: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Join the run, and send heartbeats while the block runs."""
        self._join()
        with self.pulse.beating():
            yield

    def _join(self) -> None:
        self.exchange.join(self.member, self._address, self._available)

    def ask(self, holds: int, trained: int = 0) -> AssignReply:
        """Return the next assignment, for a member with theta after round `holds`; join again if the slot was lost.

        `trained` is the last round whose training the member has beyond theta (0: none), as in
        `ExchangeService.assign`.
        """
        while True:
            try:
                return self.exchange.assign(self.member, holds, self._address, trained)
            except TermOver:
                self._epoch = None
                self._join()

    def form(self, work: AssignReply) -> LinkEnds | None:
        """Return new links for an assignment's generation; None if the current links belong to it. Raises LinkError.

        From now on a heartbeat's answer that this generation is over ends the links, also while they are formed.
        """
        if work.epoch == self._epoch:
            return None
        self._epoch = work.epoch
        self.pulse.trains(None, work.epoch)
        return self.links.form(work)

    def leave_links(self, cause: str) -> int | None:
        """Give up the current links, and tell waiting neighbours the cause.

        Return the generation of the links, if any.
        """
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self.links.give_up(epoch + 1, cause)
        return epoch
