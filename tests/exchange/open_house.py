"""A run whose server admits hosts by tickets, over TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from members import TIMEOUT
from small_run import Run

from hetero_pp.core.progress import steady_clock
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.join.membership import Membership, take_slot
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import (
    Credentials,
    Secret,
    Ticket,
    make_ticket,
)
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom

SECRET = Secret("the run's secret")


HOUR = 3600.0


class Served:
    """A run of members `a` and `b` whose server admits hosts by tickets."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.run = Run(folder / "log", {"a": 1, "b": 1}, quorum=1.0)
        # No member has joined without a ticket.
        self.run.exchange.vacant = lambda: ["a", "b"]  # type: ignore[method-assign]
        self.date_is_off = 0.0
        """Error of the date on the exchange's machine, in seconds."""
        self.memberships = Memberships(folder / "members.sqlite", steady_clock(lambda: time.time() + self.date_is_off))
        stack.callback(self.memberships.close)
        told = RunForGuests('{"name": "run"}', {"tokenizer.json": b"{}"})
        self.waiting_room = WaitingRoom({}, group_spares)
        self.unnamed: frozenset[str] | None = None
        self.spare = self.memberships.invite("a", HOUR)
        self.told, self.port = told, 0
        self.serve()

    def serve(self) -> None:
        """Start the server. A later call uses the same port."""
        listen, exchange = f"127.0.0.1:{self.port}", self.run.exchange
        house = OpenHouse(self.memberships, self.told, self.waiting_room, self.unnamed)
        self.server, self.port = serve_exchange(exchange, SECRET, listen, encrypted=True, open_house=house)
        self.address = f"127.0.0.1:{self.port}"
        self._stack.callback(self.stop)

    def stop(self) -> None:
        self.server.stop(None).wait(TIMEOUT)

    def serve_again(self) -> None:
        self.stop()
        self.serve()

    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange.runner.refusals.counts)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        over = threading.Event()
        for _ in range(int(TIMEOUT / 0.05)):
            if is_so():
                return
            over.wait(0.05)
        raise AssertionError("it did not come to that")

    @contextmanager
    def waiting(self) -> Iterator[ThreadPoolExecutor]:
        """Yield threads that may wait for a slot. The run is over at the end, so that each of them ends."""
        with ThreadPoolExecutor() as threads:
            try:
                yield threads
            finally:
                self.run.exchange.coordinator.last_round, self.run.exchange.coordinator.open = 9, None

    def ticket(self, slot: str | None = None, seconds: float = HOUR) -> Ticket:
        found = self.memberships.invite(slot, seconds)
        return make_ticket("run", self.address, SECRET.authority, found, time.time() + seconds)

    def client(self, credentials: Credentials) -> ExchangeClient:
        client = ExchangeClient(self.address, credentials, "run", timeout=TIMEOUT)
        self._stack.callback(client.close)
        return client

    def takes(self, ticket: Ticket, host: str = "host") -> Membership:
        """Redeem the ticket on a host with its own folder."""
        return take_slot(ticket, self.folder / host)
