"""Lets streams share what they pass: each asks for a quantum, waits until that has left, and asks again.

A bucket serves in the order of asking. As no stream asks for more before its quantum has left, streams that have
something to send take turns and get equal shares, and what is idle is used by whoever is there. This works as well
between processes as between threads: a bucket is all that they share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hetero_pp.errors import LinkClosed
from hetero_pp.link.protocol import PEER_CLOSED
from hetero_pp.link.shaping import Clock, DelayLine, MonotonicClock, ShapedQueue, TokenBucket, wait_until
from hetero_pp.links import LinkShape

TURN_SECONDS = 0.010
"""How long a quantum occupies a bucket: so long others wait for it."""

CONTROL_BYTES = 512
"""What is no larger goes first."""

T = TypeVar("T")


class Bucket(Protocol):
    """The times at which bytes have left; see TokenBucket. Safe to use from all that share it."""

    @property
    def rate(self) -> float:
        """Bits per second."""

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """When the last bit of `n_bytes` has left, behind all that was asked for before."""

    def overtake(self, now: float, n_bytes: int) -> float:
        """The same, ahead of all that."""


class ThreadBucket:
    """A bucket for the threads of one process."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._bucket = TokenBucket(rate)
        self._lock = threading.Lock()

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """See Bucket."""
        with self._lock:
            return self._bucket.reserve(now, ready_at, n_bytes)

    def overtake(self, now: float, n_bytes: int) -> float:
        """See Bucket."""
        with self._lock:
            return self._bucket.overtake(now, n_bytes)


class Stream:
    """What sends one message after the other by way of some buckets, all at a time: as fast as the slowest lets it."""

    def __init__(self, buckets: Sequence[Bucket], clock: Clock | None = None) -> None:
        self._shares = [_Share(bucket) for bucket in buckets]
        self._clock = clock or MonotonicClock()

    def leave(self, n_bytes: int, ready_at: float) -> tuple[float, float]:
        """Wait until `n_bytes`, ready since `ready_at`, have left; when they began to, and when they had."""
        began, left, to_go = None, ready_at, n_bytes
        while to_go and self._shares:
            now = self._clock.now()
            if n_bytes <= CONTROL_BYTES:
                portion, left = to_go, max(share.overtake(now, to_go) for share in self._shares)
            else:
                portion = min(share.ask(now, left, to_go) for share in self._shares)
                left = max(share.take(portion) for share in self._shares)
            slowest = min(share.bucket.rate for share in self._shares)
            began = left - portion * 8 / slowest if began is None else began
            to_go -= portion
            wait_until(left, self._clock)
        return ready_at if began is None else began, left


class _Share:
    """What a stream has been granted of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._quantum = max(1, int(bucket.rate * TURN_SECONDS / 8))
        self._granted = 0
        self._until = float("-inf")

    def ask(self, now: float, ready_at: float, n_bytes: int) -> int:
        """How many of so many bytes may go; asks for another turn if none may."""
        if self._granted == 0:
            self._granted = min(self._quantum, n_bytes)
            self._until = self.bucket.reserve(now, ready_at, self._granted)
        return self._granted

    def take(self, n_bytes: int) -> float:
        """When so many of those granted have left."""
        self._granted -= n_bytes
        return self._until - self._granted * 8 / self.bucket.rate

    def overtake(self, now: float, n_bytes: int) -> float:
        return self.bucket.overtake(now, n_bytes)


class Arrivals:
    """When bytes that have left are there: once they have come in, behind what came before, and their latency is over.

    Coming in takes no longer than leaving did, if what they come by is as fast and has nothing else to do.
    """

    def __init__(self, bucket: Bucket | None, shape: LinkShape, slowest: float | None, seed: str, clock: Clock) -> None:
        """`shape` gives latency and jitter, drawn from `seed`; `slowest` the bits per second of leaving, if known."""
        self._bucket = bucket
        self._delays = DelayLine(LinkShape(None, shape.latency, shape.jitter), seed)
        self._slowest = slowest
        self._clock = clock

    def at(self, began: float, left: float, n_bytes: int) -> float:
        """When bytes are there that left in this time."""
        if self._bucket is None or n_bytes == 0:
            come = left
        elif n_bytes <= CONTROL_BYTES:
            come = self._bucket.overtake(left, n_bytes)
        else:
            come = max(left, self._bucket.reserve(began, began, n_bytes))
        return self._delays.arrival(come, 0)

    def come(self, n_bytes: int) -> float:
        """The same of bytes whose last bit has just left."""
        now = self._clock.now()
        return self.at(now if self._slowest is None else now - n_bytes * 8 / self._slowest, now, n_bytes)


class StreamQueue(Generic[T]):
    """A queue out of which items come when a stream has let them through. Used as a ShapedQueue is.

    A thread of its own lets them leave, so that they do whether anybody waits for them or not.
    """

    def __init__(self, stream: Stream, arrives: Callable[[float, float, int], float] | None, clock: Clock) -> None:
        """`arrives`, if given, says when bytes that (began, left, n bytes) may come out; else as soon as they left."""
        self._stream = stream
        self._arrives = arrives
        self._clock = clock
        self._waiting: ShapedQueue[tuple[T, Sequence[int], float]] = ShapedQueue(LinkShape())
        self._left: ShapedQueue[T] = ShapedQueue(LinkShape(), clock=clock)
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, item: T, frames: Sequence[int] = (0,)) -> None:
        """See ShapedQueue."""
        self._waiting.put((item, frames, self._clock.now()))

    def get(self, timeout: float | None = None) -> T:
        """See ShapedQueue."""
        return self._left.get(timeout)

    def close(self, reason: str = PEER_CLOSED) -> None:
        """See ShapedQueue."""
        self._waiting.close(reason)

    def abort(self, cause: str) -> None:
        """See ShapedQueue."""
        self._waiting.abort(cause)
        self._left.abort(cause)

    def _run(self) -> None:
        try:
            while True:
                item, frames, ready = self._waiting.get()
                due = None
                for n_bytes in frames:
                    began, ready = self._stream.leave(n_bytes, ready)
                    due = None if self._arrives is None else self._arrives(began, ready, n_bytes)
                self._left.put_due(item, due)
        except LinkClosed as closed:
            self._left.close(str(closed))
