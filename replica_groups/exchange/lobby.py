"""The lobby: who shows a ticket waits here for a group that nobody is in yet, until enough wait for a whole one.

So no group stands half empty while others do, and those whose lines are alike come together: a link is as fast as the
slower of its ends, and a group as its slowest link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_pp.errors import Refused
from hetero_pp.messages.messages_pb2 import InLobby

SETTLE_SECONDS = 2.0
"""For so long nobody has come when a group forms: of some who come at once the best are to be chosen."""

FORGET_SECONDS = 10.0
"""Who has not asked for so long is gone; it is to ask every two."""

PROMISE_SECONDS = 60.0
"""For so long a place is kept for who was chosen."""


@dataclass(frozen=True)
class Line:
    """Bits per second, as the exchange has measured them."""

    up: float
    down: float


Choose = Callable[[Sequence[Line], int], Sequence[Sequence[int]]]
"""Of lines, and for so many stages: groups of them, each in the order of its stages, the best first."""


@dataclass
class _Guest:
    """Who waits."""

    came: float
    asked: float
    line: Line


class Lobby:
    """Of one run. Safe to use from many threads. It forgets with its process: who waits asks again."""

    def __init__(
        self, groups: Mapping[str, Sequence[str]], choose: Choose, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`groups`: places of those that may be there or not, by replica, in the order of their stages."""
        self._groups = [list(places) for places in groups.values() if len(places) > 1]
        self._choose, self._clock, self._lock = choose, clock, threading.Lock()
        self._lines: dict[str, Line] = {}
        self._guests: dict[str, _Guest] = {}
        self._promised: dict[str, tuple[str, float]] = {}
        """Ticket -> place, and until when."""

    @property
    def here(self) -> int:
        """How many wait."""
        with self._lock:
            self._forget()
            return len(self._guests)

    def probed(self, ticket: str, up: float, down: float) -> None:
        """The line of who shows a ticket was measured, in bits per second."""
        with self._lock:
            self._lines[ticket] = Line(up, down)

    def place_for(self, ticket: str, free: Sequence[str]) -> str | InLobby:
        """Of the places that are free, the best first, the one that who shows a ticket may take, or how many wait.

        Raises Refused where none is free, nor will be for those who wait already.
        """
        with self._lock:
            self._forget()
            if ticket in self._promised and self._promised[ticket][0] not in free:
                del self._promised[ticket]
            if ticket not in self._promised:
                self._promise(ticket, free)
            if ticket in self._promised:
                return self._promised[ticket][0]
            needed = len(self._empty(free)[0])
            return InLobby(here=len(self._guests), needed=needed, probed=ticket in self._lines)

    def _promise(self, ticket: str, free: Sequence[str]) -> None:
        """A place for a ticket, if there is one to be had now."""
        now, promised, empty = self._clock(), {place for place, _ in self._promised.values()}, self._empty(free)
        waits = {place for places in empty for place in places}
        at_once = [place for place in free if place not in waits | promised]
        if at_once:
            self._promised[ticket] = (at_once[0], now + PROMISE_SECONDS)
            self._leave(ticket)
        elif not empty:
            raise Refused("no place of the run is free")
        elif ticket in self._lines:
            came = self._guests[ticket].came if ticket in self._guests else now
            self._guests[ticket] = _Guest(came, now, self._lines[ticket])
            self._form(empty)

    def _empty(self, free: Sequence[str]) -> list[list[str]]:
        """Groups all of whose places are free, and promised to nobody."""
        open_ = set(free) - {place for place, _ in self._promised.values()}
        return [places for places in self._groups if open_.issuperset(places)]

    def _form(self, empty: Sequence[Sequence[str]]) -> None:
        """As many groups as there are enough for, if nobody is about to come."""
        now = self._clock()
        if now - max(guest.came for guest in self._guests.values()) < SETTLE_SECONDS:
            return
        size = len(empty[0])
        tickets = list(self._guests)
        chosen = self._choose([self._guests[one].line for one in tickets], size) if len(tickets) >= size else []
        for places, group in zip([own for own in empty if len(own) == size], chosen, strict=False):
            for place, one in zip(places, group, strict=True):
                self._promised[tickets[one]] = (place, now + PROMISE_SECONDS)
                self._leave(tickets[one])

    def _leave(self, ticket: str) -> None:
        self._guests.pop(ticket, None)
        self._lines.pop(ticket, None)

    def _forget(self) -> None:
        now = self._clock()
        for ticket in [one for one, guest in self._guests.items() if now - guest.asked > FORGET_SECONDS]:
            self._leave(ticket)
        for ticket in [one for one, (_, until) in self._promised.items() if now > until]:
            del self._promised[ticket]
