"""Gives one direction of a link a bandwidth, a latency and a jitter, inside the process.

A shaped direction is arithmetic on times: `TokenBucket` says when a frame's last bit has left, `DelayLine`
when it arrives; `ShapedQueue` waits for those times. As frames are timed when they are put in and not when some
thread wakes up, late threads cost no bandwidth and latency costs no throughput.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from hetero_pp.errors import LinkClosed, LinkTimeout
from hetero_pp.link.protocol import PEER_CLOSED
from hetero_pp.links import Direction, LinkShape, LinkSpec

CREDIT_BYTES = 128 << 10
CREDIT_SECONDS = 0.010

T = TypeVar("T")


class Clock(Protocol):
    """What time it is and how to wait; tests replace it."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Release the held condition until it is notified or the time is over; may return early."""


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        condition.wait(seconds)


class TokenBucket:
    """The times at which frames have left a link of a fixed rate. Pure: the caller tells the time.

    What differs from the textbook bucket, and why: tokens are not saved while the link is idle, since a real
    link's capacity is not. The credit only lets a sender that comes back late go on where it should have
    been, by at most `credit_bytes` and never from before its data were ready. So a small message on an idle
    link takes its whole serialisation time, and a long transfer has exactly the rate however roughly its
    thread is scheduled.
    """

    def __init__(self, rate_bits_per_second: float, credit_bytes: int | None = None) -> None:
        self._rate = rate_bits_per_second
        if credit_bytes is None:
            self._credit = max(CREDIT_BYTES * 8 / rate_bits_per_second, CREDIT_SECONDS)
        else:
            self._credit = credit_bytes * 8 / rate_bits_per_second
        self.free_at = float("-inf")
        """When all that was asked for has left."""

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """When the last bit of `n_bytes` has left, if they were ready to go at `ready_at`, asked at `now`."""
        start = max(self.free_at, ready_at, now - self._credit)
        self.free_at = start + n_bytes * 8 / self._rate
        return self.free_at

    def overtake(self, now: float, n_bytes: int) -> float:
        """The same of `n_bytes` that go first: at once. Those behind them leave later by so much."""
        seconds = n_bytes * 8 / self._rate
        self.free_at = max(self.free_at, now) + seconds
        return now + seconds


class DelayLine:
    """A bucket, then latency with jitter: when does a frame come out? Pure, order is kept.

    Jitter is uniform in [0, jitter], drawn from `seed` (such as "17/home.0-1/forward"), so it repeats.
    """

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self._shape = shape
        self._bucket = None if shape.bandwidth is None else TokenBucket(shape.bandwidth)
        self._random = random.Random(seed)
        self._last = float("-inf")

    def arrival(self, now: float, n_bytes: int) -> float:
        """When a frame of `n_bytes` on the wire, put in at `now`, is at the other end."""
        left = now if self._bucket is None else self._bucket.reserve(now, now, n_bytes)
        self._last = max(self._last, left + delay(self._shape, self._random))
        return self._last


def delay(shape: LinkShape, random_: random.Random) -> float:
    """The latency of one frame, with its jitter."""
    return shape.latency + (random_.uniform(0, shape.jitter) if shape.jitter else 0.0)


def busy_seconds(shape: LinkShape, n_bytes: int) -> float:
    """How long `n_bytes` on the wire occupy the link: 0 without a bandwidth."""
    return 0.0 if shape.bandwidth is None else n_bytes * 8 / shape.bandwidth


class ShapedQueue(Generic[T]):
    """A queue between two threads, out of which items come when the link would have delivered them.

    With an unlimited shape it is a plain queue that asks no clock.
    """

    def __init__(self, shape: LinkShape, seed: str = "", clock: Clock | None = None) -> None:
        self._line = None if shape.is_unlimited else DelayLine(shape, seed)
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._items: deque[tuple[float | None, T]] = deque()
        self._ended: str | None = None
        self._aborted = False

    def put(self, item: T, frames: Sequence[int] = (0,)) -> None:
        """Add an item that crosses as frames of these sizes on the wire, and is there when the last one is.

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

    def put_due(self, item: T, due: float | None) -> None:
        """Add an item that somebody else has timed: it comes out then, or at once, behind those before it."""
        with self._changed:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            self._append(item, due)

    def _append(self, item: T, due: float | None) -> None:
        self._items.append((due, item))
        self._changed.notify()

    def get(self, timeout: float | None = None) -> T:
        """The next item, once it is due.

        Raises LinkTimeout after `timeout` seconds; LinkClosed when it is closed and empty, or was aborted.
        """
        deadline = None if timeout is None else self._clock.now() + timeout
        with self._changed:
            while not self._is_due():
                if deadline is not None and deadline <= self._clock.now():
                    raise LinkTimeout(f"nothing arrived within {timeout:g} s")
                self._wait(deadline)
            return self._items.popleft()[1]

    def _is_due(self) -> bool:
        """Whether the first item may come out."""
        if not self._items:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            return False
        due = self._items[0][0]
        return due is None or due <= self._clock.now()

    def _wait(self, deadline: float | None) -> None:
        """Wait for the first item's time, the deadline or a change, whichever is first."""
        times = [deadline, self._items[0][0] if self._items else None]
        ends = [end for end in times if end is not None]
        self._clock.wait(self._changed, min(ends) - self._clock.now() if ends else None)

    def close(self, reason: str = PEER_CLOSED) -> None:
        """Take no more items; those inside still come out, and then LinkClosed with the reason."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def abort(self, cause: str) -> None:
        """Drop all items and wake whoever waits with LinkClosed(cause). The first cause stays."""
        with self._changed:
            if not self._aborted:
                self._ended, self._aborted = cause, True
            self._items.clear()
            self._changed.notify_all()


def direction_queue(spec: LinkSpec, direction: Direction, seed: int, clock: Clock | None = None) -> ShapedQueue[Any]:
    """The queue of one direction of a link; its jitter depends on the seed and both names."""
    return ShapedQueue(spec.shape(direction), f"{seed}/{spec.name}/{direction}", clock)


def wait_until(moment: float, clock: Clock) -> None:
    """Return no earlier than that."""
    alone = threading.Condition()
    with alone:
        while (remaining := moment - clock.now()) > 0:
            clock.wait(alone, remaining)
