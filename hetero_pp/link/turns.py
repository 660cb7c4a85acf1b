"""Lets streams share links and lines: each reserves a quantum, waits until it has left, and reserves the next.

A bucket serves in the order of reservations. No stream reserves more before its quantum has left. So active streams
take turns and get equal shares, and they use the capacity of idle ones. This works between processes as well as between
threads, because they share only the bucket.

`Shaper` does the same for contributions and run checkpoints, which are no messages between stages.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from hetero_pp.config.links import LinkShape
from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.protocol import PEER_CLOSED
from hetero_pp.link.shaping import (
    Clock,
    DelayLine,
    MonotonicClock,
    ShapedQueue,
    TokenBucket,
    busy_seconds,
    delay,
    wait_until,
)

TURN_SECONDS = 0.010
"""Seconds for which a quantum occupies a bucket. Other streams wait for this time."""

CONTROL_BYTES = 512
"""Largest message that is sent first."""

T = TypeVar("T")


class Bucket:
    """Times at which bytes have left, as in TokenBucket, for the threads of one process that share it."""

    def __init__(self, rate: float) -> None:
        """`rate`: bits per second."""
        self.rate = rate
        self._bucket = TokenBucket(rate)
        self._lock = threading.Lock()

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """Return the time when the last bit of `n_bytes` has left, after all earlier reservations."""
        with self._alone():
            return self._bucket.reserve(now, ready_at, n_bytes)

    def overtake(self, now: float, n_bytes: int) -> float:
        """Return the same for bytes that are sent before all reservations."""
        with self._alone():
            return self._bucket.overtake(now, n_bytes)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep all other users out of the bucket during the block."""
        with self._lock:
            yield


class Stream:
    """Sends one message after the other through all its buckets at the same time, at the speed of the slowest."""

    def __init__(self, buckets: Sequence[Bucket], clock: Clock | None = None) -> None:
        self._shares = [_LineShare(bucket) for bucket in buckets]
        self._clock = clock or MonotonicClock()

    def leave(self, n_bytes: int, ready_at: float) -> tuple[float, float]:
        """Wait until `n_bytes`, ready since `ready_at`, have left.

        Returns the times when they began and ended to leave.
        """
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


class _LineShare:
    """Reservation of a stream in one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._quantum = max(1, int(bucket.rate * TURN_SECONDS / 8))
        self._granted = 0
        self._until = float("-inf")

    def ask(self, now: float, ready_at: float, n_bytes: int) -> int:
        """Return how many of `n_bytes` may be sent; reserves another quantum if none are left."""
        if self._granted == 0:
            self._granted = min(self._quantum, n_bytes)
            self._until = self.bucket.reserve(now, ready_at, self._granted)
        return self._granted

    def take(self, n_bytes: int) -> float:
        """Return the time when `n_bytes` of the reserved bytes have left."""
        self._granted -= n_bytes
        return self._until - self._granted * 8 / self.bucket.rate

    def overtake(self, now: float, n_bytes: int) -> float:
        return self.bucket.overtake(now, n_bytes)


class Arrivals:
    """Arrival times of bytes that have left: after the receiver's line, after earlier bytes, and after the latency.

    Receiving takes no longer than sending did, if the receiver's line is as fast and idle.
    """

    def __init__(self, bucket: Bucket | None, shape: LinkShape, slowest: float | None, seed: str, clock: Clock) -> None:
        """`shape`: latency and jitter, drawn from `seed`. `slowest`: bits per second of sending, if known."""
        self._bucket = bucket
        self._delays = DelayLine(LinkShape(None, shape.latency, shape.jitter), seed)
        self._slowest = slowest
        self._clock = clock

    def at(self, began: float, left: float, n_bytes: int) -> float:
        """Return the arrival time of bytes that left between `began` and `left`."""
        if self._bucket is None or n_bytes == 0:
            come = left
        elif n_bytes <= CONTROL_BYTES:
            come = self._bucket.overtake(left, n_bytes)
        else:
            come = max(left, self._bucket.reserve(began, began, n_bytes))
        return self._delays.arrival(come, 0)

    def come(self, n_bytes: int) -> float:
        """Return the arrival time of bytes at the moment at which their last bit has left."""
        now = self._clock.now()
        return self.at(now if self._slowest is None else now - n_bytes * 8 / self._slowest, now, n_bytes)


class StreamQueue(Generic[T]):
    """Queue that yields its items when a stream has sent them. It has the interface of ShapedQueue.

    A separate thread sends the items, whether or not a receiver waits for them.
    """

    def __init__(self, stream: Stream, arrives: Callable[[float, float, int], float] | None, clock: Clock) -> None:
        """`arrives` gives the time at which bytes (began, left, n bytes) may come out; None: as soon as they left."""
        self._stream = stream
        self._arrives = arrives
        self._clock = clock
        self._waiting: ShapedQueue[tuple[T, Sequence[int], float]] = ShapedQueue(LinkShape())
        self._left: ShapedQueue[T] = ShapedQueue(LinkShape(), clock=clock)
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, item: T, frames: Sequence[int] = (0,)) -> None:
        self._waiting.put((item, frames, self._clock.now()))

    def get(self, timeout: float | None = None) -> T:
        return self._left.get(timeout)

    def poll(self) -> T | None:
        return self._left.poll()

    def close(self, reason: str = PEER_CLOSED) -> None:
        self._waiting.close(reason)

    def abort(self, cause: str) -> None:
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
                self._left.put_due([item], due)
        except LinkClosed as closed:
            self._left.close(str(closed))


class Shaper:
    """Shaper of one direction. Its messages share the link, and take turns with other traffic on the access lines."""

    def __init__(
        self, shape: LinkShape, seed: str = "", clock: Clock | None = None, lines: Sequence[Bucket] = ()
    ) -> None:
        self.shape = shape
        self.clock = clock or MonotonicClock()
        own = [] if shape.bandwidth is None else [Bucket(shape.bandwidth)]
        self.buckets: Sequence[Bucket] = [*own, *lines]
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def start_message(self) -> ShapedMessage:
        """Wait for the latency, once per message regardless of its number of frames."""
        with self._lock:
            arrives = self.clock.now() + delay(self.shape, self._random)
        wait_until(arrives, self.clock)
        return ShapedMessage(self.shape, Stream(self.buckets, self.clock), self.clock.now())


@dataclass(frozen=True)
class ShapedMessage:
    """Message sent through a Shaper. Its frames count as ready since its start, so that a late sender can catch up."""

    shape: LinkShape
    stream: Stream
    started: float

    def transmit(self, n_bytes: int) -> float:
        """Wait until `n_bytes` have crossed the link, and return the seconds for which the link was occupied."""
        self.stream.leave(n_bytes, self.started)
        return busy_seconds(self.shape, n_bytes)
