"""Heartbeats of a member: once a second they tell its progress, and return whether it has to stop its work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero_pp.core.errors import HeteroPPError, LinkError
from hetero_pp.outer.exchange_service import ExchangeService

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
        """Note progress."""
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
                continue  # the exchange is gone, or late: whoever needs it waits for it
            except HeteroPPError as error:
                self._say(EVERY_EPOCH, str(error))  # it is over; whoever waits for a neighbour hears why
                return
            if found.is_over or (found.HasField("suspended") and found.suspended == epoch):
                self._say(epoch + 1, found.cause or "its incarnation is over")

    def _say(self, before: int, cause: str) -> None:
        if not self._finished:
            self._give_up(before, cause)
