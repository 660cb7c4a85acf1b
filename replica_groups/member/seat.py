"""Session (`Seat`) of a member with its run: takes a slot, asks for work, forms links to neighbouring stages.

Once a second a heartbeat (`Pulse`) tells the member's progress, and returns whether it has to stop its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hetero_pp.config.links import Direction, exchange_link_name, stage_link_name
from hetero_pp.core.errors import HeteroPPError, LinkClosed, LinkError, Refused, TermOver
from hetero_pp.link.ledger import Ledger
from hetero_pp.link.protocol import NOT_KNOWN, Holders, LinkEnds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.messages.messages_pb2 import AssignReply
from hetero_pp.rpc.exchange_service import AvailableStates, ExchangeService
from hetero_pp.run.spec import MemberSpec
from replica_groups.member.exchanges import ShapedExchange

LedgerOf = tuple[str, Direction, Ledger]
"""(link, direction, this member's byte counts)"""


SECONDS_BETWEEN_BEATS = 1.0

EVERY_EPOCH = 1 << 62
"""A generation after all others, including one that is being formed and that no heartbeat has named."""

GiveUp = Callable[[int, str], None]
"""(before, cause): ends links of generations before this one, and wakes threads that wait for them."""


class Pulse:
    """Heartbeats of one member, in a thread of its own, so that neither compute nor a busy line delays them."""

    def __init__(self, exchange: ExchangeService, member: str, give_up: GiveUp) -> None:
        self._exchange, self._member, self._give_up = exchange, member, give_up
        self._round: int | None = None
        self._epoch = 0
        self._progress = 0
        self._activity: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self._finished = False
        self._ended = threading.Event()

    def trains(self, round_: int | None, epoch: int) -> None:
        """Note the round and generation that the member trains from now on."""
        self._round, self._epoch = round_, epoch
        self.progressed()

    def progressed(self) -> None:
        self._progress += 1

    def finished(self) -> None:
        """Note that the member's part is over: its links stay until its neighbours have read everything."""
        self._finished = True

    @contextmanager
    def computing(self, activity: Callable[[], tuple[int, bool]]) -> Iterator[None]:
        """While the block runs, `activity` returns the amount of work done and whether the member is busy."""
        self._activity = activity
        try:
            yield
        finally:
            self._activity = lambda: (0, False)
            self.progressed()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats while the block runs."""
        thread = threading.Thread(target=self._run, name=f"pulse {self._member}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            epoch = self._epoch
            try:
                done, is_busy = self._activity()
                progress = (self._progress << 32) + done
                found = self._exchange.beat(self._member, self._round, epoch, progress, is_busy)
            except LinkError:
                continue  # the exchange is gone, or late: calls that need it wait for it
            except HeteroPPError as error:
                self._say(EVERY_EPOCH, str(error))  # the member is out: threads that wait for a neighbour get the cause
                return
            if found.is_over or (found.HasField("suspended") and found.suspended == epoch):
                self._say(epoch + 1, found.cause or "its incarnation is over")

    def _say(self, before: int, cause: str) -> None:
        if not self._finished:
            self._give_up(before, cause)


class Connections(Protocol):
    """Connections of a member to the rest of its run."""

    @property
    def exchange(self) -> ExchangeService:
        """The exchange, without traffic shaping. If several ranks form one member, only the first rank uses it."""

    @property
    def lines(self) -> Lines:
        """The access lines that all links of the member share."""

    def listen(self) -> str:
        """Start to listen for the neighbouring stages; return the address (empty if there is none)."""

    def open(self, epoch: int, upstream: str, downstream: str, holders: Holders = NOT_KNOWN) -> LinkEnds:
        """Open the links to the neighbouring stages in this generation of the group. The member must have joined.

        `upstream` and `downstream` are the addresses to dial; an empty one means that the neighbour dials or does not
        exist. A neighbour whose holder number differs from `holders` is refused. A call for a newer generation aborts
        the links of older ones; the byte counts continue.

        Raises LinkClosed if the generation is over, and LinkTimeout if a neighbour does not connect.
        """

    def give_up(self, before: int, cause: str) -> None:
        """Close links of generations before this one; their users, and callers waiting in `open`, get LinkClosed.

        May be called from any thread. From then on `open` raises for these generations.
        """


class Links:
    """Links of a member to the neighbouring stages, and the byte counts of all its links."""

    def __init__(self, member: MemberSpec, connections: Connections, shaped: ShapedExchange) -> None:
        self._member, self._connections, self._shaped = member, connections, shaped
        self._ends = LinkEnds()

    def form(self, work: AssignReply) -> LinkEnds:
        """Return links of the assignment's generation. Raises LinkError."""
        upstream = work.upstream_holder if work.HasField("upstream_holder") else None
        downstream = work.downstream_holder if work.HasField("downstream_holder") else None
        try:
            self._ends = self._connections.open(work.epoch, work.upstream, work.downstream, (upstream, downstream))
        except Refused as error:  # the word of a neighbour alone must not end this member
            raise LinkClosed(str(error)) from error
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        """Close links of generations before this one, from any thread."""
        self._connections.give_up(before, cause)

    @property
    def ledgers(self) -> Sequence[LedgerOf]:
        """The member's byte counts: both directions of its exchange link, and what it sends to neighbouring stages."""
        own, stage, replica = exchange_link_name(self._member.name), self._member.stage, self._member.replica.name
        found: list[LedgerOf] = [(own, "forward", self._shaped.forward), (own, "backward", self._shaped.backward)]
        if stage is not None and self._ends.downstream is not None:
            found.append((stage_link_name(replica, stage.index), "forward", self._ends.downstream.ledger))
        if stage is not None and self._ends.upstream is not None:
            found.append((stage_link_name(replica, stage.index - 1), "backward", self._ends.upstream.ledger))
        return found


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
