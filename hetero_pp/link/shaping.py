"""Simulates bandwidth, latency and jitter of one direction of a link, inside the process.

A shaped direction computes times. `TokenBucket` gives the time when a frame's last bit has left, and `DelayLine` the
time of its arrival; `ShapedQueue` waits until then. Frames are timed when they are queued, not when a thread wakes up.
So late threads cost no bandwidth, and latency costs no throughput.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from filelock import FileLock

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.config.links import EXCHANGE, Direction, LinkShape, LinkSpec
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


TURN_SECONDS = 0.010
"""Seconds for which a quantum occupies a bucket. Other streams wait for this time."""

CONTROL_BYTES = 512
"""Largest message that is sent first."""


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


POLL_SECONDS = 0.0005
"""Seconds between attempts to lock a bucket that another process holds; it holds it for some microseconds."""


class FileBucket(Bucket):
    """Bucket for the processes of one machine. A file stores the time when it is free; all use the machine's clock."""

    def __init__(self, rate: float, path: Path) -> None:
        super().__init__(rate)
        self._path = path
        self._processes = FileLock(f"{path}.lock", poll_interval=POLL_SECONDS)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, self._processes:
            self._read()
            yield
            self._write()

    def _read(self) -> None:
        started = time.time() - time.monotonic()  # an older file has times of another clock
        if self._path.exists() and self._path.stat().st_mtime > started:
            content = self._path.read_bytes()
            if len(content) == _FREE_AT.size:
                [self._bucket.free_at] = _FREE_AT.unpack(content)

    def _write(self) -> None:
        with suppress(OSError):  # the disk fails: for a while, only this process keeps to the rate
            self._path.write_bytes(_FREE_AT.pack(self._bucket.free_at))


_FREE_AT = struct.Struct("<d")


class Lines:
    """Buckets by line and direction, created on first use. Links without access lines need none."""

    def __init__(self, shared: Path | None = None, clock: Clock | None = None) -> None:
        """`shared`: folder for the processes of a run on one machine; None if all members are in this process."""
        self.clock = clock or MonotonicClock()
        self._shared = shared
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, Way], Bucket] = {}

    def buckets(self, link: LinkSpec, direction: Direction) -> list[Bucket]:
        """Return the buckets of the lines on the path of a direction, for a caller that shapes all of it."""
        up, down = link.lines(direction)
        return [one for one in (self._bucket(up, "up"), self._bucket(down, "down")) if one is not None]

    def leaving(self, link: LinkSpec, direction: Direction, seed: int) -> ShapedQueue[T] | StreamQueue[T]:
        """Return the queue of what one direction sends.

        Items come out on arrival; with lines, already when they have left.
        """
        return self._queue(link, direction, seed, is_here=False)

    def crossing(self, link: LinkSpec, direction: Direction, seed: int) -> ShapedQueue[T] | StreamQueue[T]:
        """Return the queue of what one direction of a link inside this process delivers."""
        return self._queue(link, direction, seed, is_here=True)

    def _queue(self, link: LinkSpec, direction: Direction, seed: int, is_here: bool) -> ShapedQueue[T] | StreamQueue[T]:
        """Return a queue. `is_here`: the receiver is in this process, too, so the queue also times the arrival."""
        if not link.has_lines:
            return direction_queue(link, direction, seed, self.clock)
        up, bandwidth = self._bucket(link.lines(direction)[0], "up"), link.shape(direction).bandwidth
        own = [] if bandwidth is None else [Bucket(bandwidth)]
        stream = Stream([*([] if up is None else [up]), *own], self.clock)
        return StreamQueue(stream, self.arriving(link, direction, seed).at if is_here else None, self.clock)

    def arriving(self, link: LinkSpec, direction: Direction, seed: int) -> Arrivals:
        """Return the arrival times of one direction."""
        up, down = link.lines(direction)
        limits = [link.shape(direction).bandwidth, None if up is None else up.up]
        slowest = min((one for one in limits if one is not None), default=None)
        seed_ = f"{seed}/{link.name}/{direction}"
        return Arrivals(self._bucket(down, "down"), link.shape(direction), slowest, seed_, self.clock)

    def _bucket(self, line: LineSpec | None, way: Way) -> Bucket | None:
        if line is None or (rate := line.bandwidth(way)) is None:
            return None
        with self._lock:
            if (line.name, way) not in self._buckets:
                self._buckets[line.name, way] = self._make(line, way, rate)
            return self._buckets[line.name, way]

    def _make(self, line: LineSpec, way: Way, rate: float) -> Bucket:
        is_shared = len(line.members) > 1 or EXCHANGE in line.members  # every member uses this line
        if self._shared is None or not is_shared:
            return Bucket(rate)
        self._shared.mkdir(parents=True, exist_ok=True)
        return FileBucket(rate, self._shared / f"{line.name}-{way}")
