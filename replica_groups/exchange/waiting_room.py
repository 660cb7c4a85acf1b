"""Waiting room: ticket holders wait here until there are enough of them for a whole new group.

So no group is left incomplete while another one forms, and hosts with similar lines form a group. A link is as fast as
the slower of its ends, and a group as its slowest link.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero_pp.core.errors import AskAgain, Forbidden
from hetero_pp.messages.messages_pb2 import InWaitingRoom
from hetero_pp.rpc.admission_client import BUSY

SETTLE_SECONDS = 2.0
"""Seconds without a newcomer before a group forms, so that the best of several newcomers can be chosen."""

FORGET_SECONDS = 10.0
"""Seconds after which a ticket holder that has not asked again is forgotten; it should ask every two."""

AWAKE_SECONDS = 5.0  # seconds after which a ticket holder that has not asked again is not chosen

PROMISE_SECONDS = 15.0  # seconds for which a slot is kept for a chosen ticket holder that asks no more

PROBE_AGAIN_SECONDS = 120.0  # seconds between two measurements for one ticket, because lines are measured one at a time


@dataclass(frozen=True)
class HostLine:
    """Bandwidth of a line in bits per second, as the exchange has measured it."""

    up: float
    down: float


Choose = Callable[[Sequence[HostLine], int], Sequence[Sequence[int]]]
"""(lines, number of stages) -> groups of indices of lines, each in the order of its stages, the best group first."""


@dataclass
class _WaitingHost:
    """A waiting ticket holder."""

    came: float
    asked: float
    line: HostLine


class WaitingRoom:
    """Waiting room of one run. Thread-safe. It is lost with its process: ticket holders ask again."""

    def __init__(
        self, groups: Mapping[str, Sequence[str]], choose: Choose, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`groups`: optional replica -> its slots in the order of stages."""
        self._groups = [list(slots) for slots in groups.values() if len(slots) > 1]
        self._choose, self._clock, self._lock = choose, clock, threading.Lock()
        self._guests: dict[str, _WaitingHost] = {}
        self._promised: dict[str, tuple[str, float]] = {}  # ticket -> promised slot, and until when
        self._probes: dict[str, float] = {}  # ticket -> time at which its measurement began
        self._probing: dict[str, Callable[[], object]] = {}  # ticket -> ends the measurement in progress
        self._probes_begun: Counter[str] = Counter()  # ticket -> measurements of its line since this process started
        self._in_queue: dict[str, tuple[float, float]] = {}
        """Ticket that asked for a measurement -> when it asked first, and last."""
        self._answered: dict[str, float] = {}  # ticket -> time at which it was last told to wait, while it waits
        self._changed = threading.Condition(self._lock)

    @property
    def here(self) -> int:
        """Number of waiting ticket holders."""
        with self._lock:
            self._forget()
            return len(self._guests)

    @property
    def needed(self) -> int:
        """Number of hosts that the next group needs; 0 if no group can form."""
        return min(len(slots) for slots in self._groups) if self._groups else 0

    @property
    def guests(self) -> Sequence[tuple[str, float]]:
        """Waiting tickets and their seconds of waiting, the longest first."""
        with self._lock:
            self._forget()
            now = self._clock()
            return sorted(((one, now - guest.came) for one, guest in self._guests.items()), key=lambda one: -one[1])

    def told(self, ticket: str) -> None:
        """Note that a ticket holder has heard that the run is over, and waits no more."""
        with self._lock:
            self._waits_no_more(ticket)
            self._leave(ticket)

    def wait_until_told(self, seconds: float) -> bool:
        """Wait for all ticket holders to ask again and hear that the run is over; return whether all did.

        Waits at most `seconds`. Ends the measurement in progress, which may take longer on a slow line.
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
        """Note that the measurement of a line has ended, with or without a result."""
        with self._lock:
            self._probing.pop(ticket, None)

    def probed(self, ticket: str, up: float, down: float) -> None:
        """Note the result in bits per second. A ticket holder that does not ask afterwards is forgotten."""
        with self._lock:
            self._guests[ticket] = _WaitingHost(self._clock(), self._clock(), HostLine(up, down))
            self._answered[ticket] = self._clock()

    def has_slot(self, ticket: str) -> None:
        """Note that a ticket holder has taken its slot, and forget the ticket."""
        with self._lock:
            self._promised.pop(ticket, None)
            self._waits_no_more(ticket)

    def slot_for(self, ticket: str, free: Sequence[str]) -> str | InWaitingRoom:
        """Return the slot for a ticket among `free`, the best first, or the state of the waiting room."""
        with self._lock:
            self._forget()
            if ticket in self._promised and self._promised[ticket][0] not in free:
                del self._promised[ticket]
            may_form = ticket in self._promised or self._promise(ticket, free)
            if ticket in self._promised:
                return self._promised[ticket][0]
            self._answered[ticket] = self._clock()
            why = "" if may_form or not free else "every free slot is kept for another host that waits"
            return InWaitingRoom(here=len(self._guests), needed=self.needed, probed=ticket in self._guests, why=why)

    def _promise(self, ticket: str, free: Sequence[str]) -> bool:
        """Promise a free slot to a ticket, or form groups of waiting tickets. Return whether a group may form."""
        now, promised = self._clock(), {slot for slot, _ in self._promised.values()}
        empty = [slots for slots in self._groups if (set(free) - promised).issuperset(slots)]
        waits = {slot for slots in empty for slot in slots}
        at_once = [slot for slot in free if slot not in waits | promised]
        if (guest := self._guests.get(ticket)) is not None:
            guest.asked = now
        if at_once:  # who has waited longest is first, unless it asks no more
            came = sorted(one.came for one in self._guests.values() if now - one.asked <= AWAKE_SECONDS)
            if len(came) < len(at_once) or (guest is not None and guest.came <= came[len(at_once) - 1]):
                self._promised[ticket] = (at_once[0], now + PROMISE_SECONDS)
                self._leave(ticket)
        elif guest is not None:
            for size in sorted({len(slots) for slots in empty}, reverse=True):
                self._form([slots for slots in empty if len(slots) == size], size)
        return bool(empty)

    def _form(self, empty: Sequence[Sequence[str]], size: int) -> None:
        """Form as many groups of a size as there are hosts for, unless a host has just come."""
        now = self._clock()
        awake = [ticket for ticket, guest in self._guests.items() if now - guest.asked <= AWAKE_SECONDS]
        if len(awake) < size or now - max(self._guests[ticket].came for ticket in awake) < SETTLE_SECONDS:
            return
        chosen = self._choose([self._guests[one].line for one in awake], size)
        for slots, group in zip(empty, chosen, strict=False):
            for slot, one in zip(slots, group, strict=True):
                self._promised[awake[one]] = (slot, now + PROMISE_SECONDS)
                self._leave(awake[one])

    def _leave(self, ticket: str) -> None:
        """Forget a ticket. If it comes again, its line is measured again."""
        self._guests.pop(ticket, None)
        self._probes.pop(ticket, None)

    def _forget(self) -> None:
        now = self._clock()
        for ticket in [one for one, guest in self._guests.items() if now - guest.asked > FORGET_SECONDS]:
            self._leave(ticket)
        for ticket in [one for one, answered in self._answered.items() if now - answered > FORGET_SECONDS]:
            self._waits_no_more(ticket)
        self._in_queue = {one: times for one, times in self._in_queue.items() if now - times[1] <= FORGET_SECONDS}
        self._promised = {one: promise for one, promise in self._promised.items() if now <= promise[1]}
        self._probes = {one: begun for one, begun in self._probes.items() if now - begun <= PROBE_AGAIN_SECONDS}
