"""The lobby: who shows a ticket waits here for a group that nobody is in yet, until enough wait for a whole one.

So no group stands half empty while others do, and those whose lines are alike come together: a link is as fast as the
slower of its ends, and a group as its slowest link.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_pp.errors import AskAgain, Forbidden, Refused
from hetero_pp.messages.messages_pb2 import InLobby
from hetero_pp.rpc.probe import BUSY

SETTLE_SECONDS = 2.0
"""For so long nobody has come when a group forms: of some who come at once the best are to be chosen."""

FORGET_SECONDS = 10.0
"""Who has not asked for so long is gone; it is to ask every two."""

AWAKE_SECONDS = 5.0
"""Who has not asked for so long is not chosen."""

PROMISE_SECONDS = 15.0
"""For so long a place is kept for who was chosen, and asks no more."""

PROBE_AGAIN_SECONDS = 120.0
"""Between two probes of one ticket: lines are measured one at a time, and nobody keeps others from it."""


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
        self._guests: dict[str, _Guest] = {}
        self._promised: dict[str, tuple[str, float]] = {}
        """Ticket -> place, and until when."""
        self._probes: dict[str, float] = {}
        """Ticket -> when its probe began."""
        self._probing: dict[str, Callable[[], object]] = {}
        """Ticket -> ends the measurement that is under way."""
        self._probes_begun: Counter[str] = Counter()
        """Ticket -> measurements of its line since this process started."""
        self._in_queue: dict[str, tuple[float, float]] = {}
        """Ticket that asked for a measurement -> when it asked first, and last."""
        self._answered: dict[str, float] = {}
        """Ticket -> when it was last told to wait, while it does."""
        self._changed = threading.Condition(self._lock)

    @property
    def here(self) -> int:
        """How many wait."""
        with self._lock:
            self._forget()
            return len(self._guests)

    @property
    def needed(self) -> int:
        """How many the next group needs; 0 if there are no groups to form."""
        return min(len(places) for places in self._groups) if self._groups else 0

    @property
    def guests(self) -> Sequence[tuple[str, float]]:
        """The tickets of those that wait, and for how many seconds; the one that has waited longest first."""
        with self._lock:
            self._forget()
            now = self._clock()
            return sorted(((one, now - guest.came) for one, guest in self._guests.items()), key=lambda one: -one[1])

    def told(self, ticket: str) -> None:
        """Who shows a ticket has heard that the run is over, and does not wait any more."""
        with self._lock:
            self._waits_no_more(ticket)
            self._leave(ticket)

    def wait_until_told(self, seconds: float) -> bool:
        """Give those that wait so much time to ask again, and hear that the run is over; whether all did.

        Ends the measurement under way: a slow line takes longer than the exchange waits.
        """
        with self._lock:
            for end in list(self._probing.values()):
                end()
            self._forget()
            return self._changed.wait_for(lambda: not self._answered, seconds)

    def _waits_no_more(self, ticket: str) -> None:
        self._answered.pop(ticket, None)
        self._changed.notify_all()

    def begin_probe(self, ticket: str, end: Callable[[], object] = lambda: None) -> None:
        """Begin to measure the line of a ticket's holder. `end` is called if the measurement has to stop early.

        Tickets that were measured least often come first, then those that asked first. So tickets that are measured
        again and again keep nobody else waiting. Raises Forbidden if this line was measured lately, AskAgain if it is
        another ticket's turn.
        """
        with self._lock:
            self._forget()
            if ticket in self._probes or ticket in self._guests:
                raise Forbidden(f"a line is measured at most once in {PROBE_AGAIN_SECONDS:g} seconds")
            now = self._clock()
            self._in_queue[ticket] = (self._in_queue.get(ticket, (now, now))[0], now)
            first = min(self._in_queue, key=lambda one: (self._probes_begun[one], self._in_queue[one][0]))
            if self._probing or first != ticket:
                raise AskAgain(BUSY)
            del self._in_queue[ticket]
            self._probes_begun[ticket] += 1
            self._probes[ticket] = self._answered[ticket] = now
            self._probing[ticket] = end

    def end_probe(self, ticket: str) -> None:
        """The line is not measured any more, whether that succeeded or not."""
        with self._lock:
            self._probing.pop(ticket, None)

    def probed(self, ticket: str, up: float, down: float) -> None:
        """It was, in bits per second. Who then does not ask is forgotten."""
        with self._lock:
            self._guests[ticket] = _Guest(self._clock(), self._clock(), Line(up, down))
            self._answered[ticket] = self._clock()

    def seated(self, ticket: str) -> None:
        """Who shows a ticket has taken its place: nothing is kept for it any more."""
        with self._lock:
            self._promised.pop(ticket, None)
            self._waits_no_more(ticket)

    def place_for(self, ticket: str, free: Sequence[str]) -> str | InLobby:
        """Of the places that are free, the best first, the one that who shows a ticket may take, or how many wait.

        Raises Refused where none is.
        """
        with self._lock:
            self._forget()
            if not free:
                raise Refused("no slot of the run is free")
            if ticket in self._promised and self._promised[ticket][0] not in free:
                del self._promised[ticket]
            if ticket not in self._promised:
                self._promise(ticket, free)
            if ticket in self._promised:
                return self._promised[ticket][0]
            self._answered[ticket] = self._clock()
            return InLobby(here=len(self._guests), needed=self.needed, probed=ticket in self._guests)

    def _promise(self, ticket: str, free: Sequence[str]) -> None:
        """A place for a ticket, if there is one to be had now; what is promised may yet come back."""
        now, promised, empty = self._clock(), {place for place, _ in self._promised.values()}, self._empty(free)
        waits = {place for places in empty for place in places}
        at_once = [place for place in free if place not in waits | promised]
        if at_once:
            self._promised[ticket] = (at_once[0], now + PROMISE_SECONDS)
            self._leave(ticket)
        elif ticket in self._guests:
            self._guests[ticket].asked = now
            for size in sorted({len(places) for places in empty}, reverse=True):
                self._form([places for places in empty if len(places) == size], size)

    def _empty(self, free: Sequence[str]) -> list[list[str]]:
        """Groups all of whose places are free, and promised to nobody."""
        open_ = set(free) - {place for place, _ in self._promised.values()}
        return [places for places in self._groups if open_.issuperset(places)]

    def _form(self, empty: Sequence[Sequence[str]], size: int) -> None:
        """As many groups of a size as there are enough for, if nobody is about to come."""
        now = self._clock()
        awake = [ticket for ticket, guest in self._guests.items() if now - guest.asked <= AWAKE_SECONDS]
        if len(awake) < size or now - max(self._guests[ticket].came for ticket in awake) < SETTLE_SECONDS:
            return
        chosen = self._choose([self._guests[one].line for one in awake], size)
        for places, group in zip(empty, chosen, strict=False):
            for place, one in zip(places, group, strict=True):
                self._promised[awake[one]] = (place, now + PROMISE_SECONDS)
                self._leave(awake[one])

    def _leave(self, ticket: str) -> None:
        """It waits no more; should it come again, its line is measured again."""
        self._guests.pop(ticket, None)
        self._probes.pop(ticket, None)

    def _forget(self) -> None:
        now = self._clock()
        for ticket in [one for one, guest in self._guests.items() if now - guest.asked > FORGET_SECONDS]:
            self._leave(ticket)
        for ticket in [one for one, answered in self._answered.items() if now - answered > FORGET_SECONDS]:
            self._waits_no_more(ticket)
        for ticket in [one for one, (_, asked) in self._in_queue.items() if now - asked > FORGET_SECONDS]:
            del self._in_queue[ticket]
        for ticket in [one for one, (_, until) in self._promised.items() if now > until]:
            del self._promised[ticket]
        for ticket in [one for one, begun in self._probes.items() if now - begun > PROBE_AGAIN_SECONDS]:
            del self._probes[ticket]
