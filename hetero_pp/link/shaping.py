"""Simulates bandwidth, latency and jitter of one direction of a link, inside the process.

A shaped direction computes times. `TokenBucket` gives the time when a frame's last bit has left, and `DelayLine` the
time of its arrival; `ShapedQueue` waits until then. Frames are timed when they are queued, not when a thread wakes up.
So late threads cost no bandwidth, and latency costs no throughput.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hetero_pp.config.links import Direction, LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed, LinkTimeout
from hetero_pp.link.protocol import PEER_CLOSED

CREDIT_BYTES = 128 << 10
CREDIT_SECONDS = 0.010

T = TypeVar("T")


class Clock(Protocol):
    """Source of time, with a wait; tests replace it."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Release the held condition until it is notified or the time has passed; may return early."""


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        condition.wait(seconds)


class TokenBucket:
    """Times at which frames have left a link with a fixed rate. Pure: the caller passes the time.

    Unlike a textbook token bucket, tokens are not saved while the link is idle, because the capacity of a real link is
    not. The credit only lets a late sender continue where it should have been, by at most `credit_bytes` and not before
    its data were ready. So a small message on an idle link takes its full serialisation time. A long transfer has
    exactly the rate, however irregularly its thread is scheduled.
    """

    def __init__(self, rate_bits_per_second: float, credit_bytes: int | None = None) -> None:
        self._rate = rate_bits_per_second
        if credit_bytes is None:
            self._credit = max(CREDIT_BYTES * 8 / rate_bits_per_second, CREDIT_SECONDS)
        else:
            self._credit = credit_bytes * 8 / rate_bits_per_second
        self.free_at = float("-inf")
        """Time at which all reserved bytes have left."""

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """Return the time when the last bit of `n_bytes` has left; ready at `ready_at`, reserved at `now`."""
        start = max(self.free_at, ready_at, now - self._credit)
        self.free_at = start + n_bytes * 8 / self._rate
        return self.free_at

    def overtake(self, now: float, n_bytes: int) -> float:
        """Return the same for `n_bytes` that are sent first, at once. Bytes in the queue leave later by that time."""
        seconds = n_bytes * 8 / self._rate
        self.free_at = max(self.free_at, now) + seconds
        return now + seconds


class DelayLine:
    """A bucket, followed by latency with jitter: gives the time at which a frame arrives. Pure; keeps the order.

    Jitter is uniform in [0, jitter], drawn from `seed` (such as "17/home.0-1/forward"), so it is reproducible.
    """

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self._shape = shape
        self._bucket = None if shape.bandwidth is None else TokenBucket(shape.bandwidth)
        self._random = random.Random(seed)
        self._last = float("-inf")

    def arrival(self, now: float, n_bytes: int) -> float:
        """Return the time when a frame of `n_bytes` on the wire, sent at `now`, arrives."""
        left = now if self._bucket is None else self._bucket.reserve(now, now, n_bytes)
        self._last = max(self._last, left + delay(self._shape, self._random))
        return self._last


def delay(shape: LinkShape, random_: random.Random) -> float:
    """Return the latency of one frame, including its jitter."""
    return shape.latency + (random_.uniform(0, shape.jitter) if shape.jitter else 0.0)


def busy_seconds(shape: LinkShape, n_bytes: int) -> float:
    """Return the seconds for which `n_bytes` on the wire occupy the link; 0 without a bandwidth."""
    return 0.0 if shape.bandwidth is None else n_bytes * 8 / shape.bandwidth


class ShapedQueue(Generic[T]):
    """Queue between two threads. Items come out when the link would have delivered them.

    With an unlimited shape it is a plain queue and does not use the clock.
    """

    def __init__(self, shape: LinkShape, seed: str = "", clock: Clock | None = None) -> None:
        self._line = None if shape.is_unlimited else DelayLine(shape, seed)
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._items: deque[tuple[float | None, T]] = deque()
        self._ended: str | None = None
        self._aborted = False

    def put(self, item: T, frames: Sequence[int] = (0,)) -> None:
        """Add an item that crosses as frames of these sizes on the wire, and arrives with the last frame.

        Raises LinkClosed after `close` or `abort`.
        """
        with self._changed:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            due = None
            if self._line is not None:
                now = self._clock.now()
                for n_bytes in frames:
                    due = self._line.arrival(now, n_bytes)
            self._append(item, due)

    def put_due(self, items: Iterable[T], due: float | None) -> None:
        """Add items with a given arrival time (None: at once). Items keep their order."""
        with self._changed:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            for item in items:
                self._append(item, due)

    def _append(self, item: T, due: float | None) -> None:
        self._items.append((due, item))
        self._changed.notify()

    def get(self, timeout: float | None = None) -> T:
        """Return the next item once it is due.

        Raises LinkTimeout after `timeout` seconds, LinkClosed if the queue is closed and empty, or was aborted.
        """
        deadline = None if timeout is None else self._clock.now() + timeout
        with self._changed:
            while not self._is_due():
                if deadline is not None and deadline <= self._clock.now():
                    raise LinkTimeout(f"nothing arrived within {timeout:g} s")
                self._wait(deadline)
            return self._items.popleft()[1]

    def poll(self) -> T | None:
        """Return the next item if it is due now, else None; also None if the queue has ended."""
        with self._changed:
            return self._items.popleft()[1] if self._items and self._is_due() else None

    def _is_due(self) -> bool:
        """Return whether the first item is due."""
        if not self._items:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            return False
        due = self._items[0][0]
        return due is None or due <= self._clock.now()

    def _wait(self, deadline: float | None) -> None:
        """Wait for the first item's time, the deadline or a change, whichever comes first."""
        times = [deadline, self._items[0][0] if self._items else None]
        ends = [end for end in times if end is not None]
        self._clock.wait(self._changed, min(ends) - self._clock.now() if ends else None)

    def close(self, reason: str = PEER_CLOSED) -> None:
        """Refuse new items. The queued items still come out, followed by LinkClosed with the reason."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def abort(self, cause: str) -> None:
        """Discard all items and raise LinkClosed(cause) in waiting threads. The first cause is kept."""
        with self._changed:
            if not self._aborted:
                self._ended, self._aborted = cause, True
            self._items.clear()
            self._changed.notify_all()


def direction_queue(spec: LinkSpec, direction: Direction, seed: int, clock: Clock | None = None) -> ShapedQueue[Any]:
    """Return the queue of one direction of a link. Its jitter depends on the seed, the link and the direction."""
    return ShapedQueue(spec.shape(direction), f"{seed}/{spec.name}/{direction}", clock)


def wait_until(moment: float, clock: Clock) -> None:
    """Return once the clock has reached `moment`."""
    alone = threading.Condition()
    with alone:
        while (remaining := moment - clock.now()) > 0:
            clock.wait(alone, remaining)
