"""Tells the exchange, once a second, that a member is there and gets on; hears if it has to stop what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero_pp.errors import HeteroPPError, LinkError
from hetero_pp.outer.exchange_service import ExchangeService

SECONDS_BETWEEN_BEATS = 1.0

EVERY_EPOCH = 1 << 62
"""Comes after all of them: one that is being formed, too, which is newer than that of the last round."""

GiveUp = Callable[[int, str], None]
"""(before, cause): links of epochs before this one are over, whoever waits for them is woken."""


class Pulse:
    """Of one member; beats in a thread of its own, so that neither compute nor a full line keeps it back."""

    def __init__(self, exchange: ExchangeService, member: str, give_up: GiveUp) -> None:
        self._exchange, self._member, self._give_up = exchange, member, give_up
        self._round: int | None = None
        self._epoch = 0
        self._progress = 0
        self._activity: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self._finished = False
        self._ended = threading.Event()

    def trains(self, round_: int | None, epoch: int) -> None:
        """What the member does from now on."""
        self._round, self._epoch = round_, epoch
        self.progressed()

    def progressed(self) -> None:
        """It has done something."""
        self._progress += 1

    def finished(self) -> None:
        """Its part is over: links end with what a neighbour still reads from them, and not when its place is free."""
        self._finished = True

    @contextmanager
    def computing(self, activity: Callable[[], tuple[int, bool]]) -> Iterator[None]:
        """While the block runs `activity` says how much the member has done, and whether it is busy."""
        self._activity = activity
        try:
            yield
        finally:
            self._activity = lambda: (0, False)
            self.progressed()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While the block runs."""
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
