"""Simulates bandwidth, latency and jitter of links and access lines, inside the process.

A `Bucket` gives the time when bytes have left, and latency with jitter the time of their arrival; queues wait until
then. Frames are timed when they are queued, not when a thread wakes up. So late threads cost no bandwidth, and latency
costs no throughput.

Streams that share a line take turns. A bucket serves in the order of reservations. Each stream reserves a quantum, and
no more before it has left. So active streams get equal shares, and they use the capacity of idle ones. This works
between processes as well as between threads, because they share only the bucket. `Shaper` does the same for
contributions and run checkpoints, which are no messages between stages.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from filelock import FileLock

from hetero_pp.config.lines import EXCHANGE, Direction, Line, LinkShape, LinkSpec, Way
from hetero_pp.core.errors import LinkClosed, LinkTimeout
from hetero_pp.link.protocol import PEER_CLOSED

CREDIT_BYTES = 128 << 10
CREDIT_SECONDS = 0.010

TURN_SECONDS = 0.010  # Seconds for which a quantum occupies a bucket. Other streams wait for this time.
CONTROL_BYTES = 512  # largest message that is sent first

POLL_SECONDS = 0.0005
"""Seconds between attempts to lock a bucket that another process holds; it holds it for some microseconds."""

_FREE_AT = struct.Struct("<d")

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


def wait_until(moment: float, clock: Clock) -> None:
    """Return once the clock has reached `moment`."""
    alone = threading.Condition()
    with alone:
        while (remaining := moment - clock.now()) > 0:
            clock.wait(alone, remaining)


def delay(shape: LinkShape, random_: random.Random) -> float:
    """Return the latency of one frame, including its jitter."""
    return shape.latency + (random_.uniform(0, shape.jitter) if shape.jitter else 0.0)


def busy_seconds(shape: LinkShape, n_bytes: int) -> float:
    """Return the seconds for which `n_bytes` on the wire occupy the link; 0 without a bandwidth."""
    return 0.0 if shape.bandwidth is None else n_bytes * 8 / shape.bandwidth


class Bucket:
    """Times at which bytes have left a line, for all threads that share it. Callers tell the time.

    Unlike a textbook token bucket, tokens are not saved while the line is idle, because the capacity of a real line is
    not. The credit only lets a late sender continue where it should have been, by at most `credit_bytes` and not before
    its data were ready. So a small message on an idle line takes its full serialisation time. A long transfer has
    exactly the bandwidth, however irregularly its thread is scheduled.
    """

    def __init__(self, bandwidth: float, credit_bytes: int | None = None) -> None:
        """`bandwidth`: bits per second."""
        self.bandwidth = bandwidth
        bytes_ = CREDIT_BYTES if credit_bytes is None else credit_bytes
        self._credit = max(bytes_ * 8 / bandwidth, CREDIT_SECONDS if credit_bytes is None else 0.0)
        self._free_at = float("-inf")  # time at which all reserved bytes have left
        self._lock = threading.Lock()

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """Return the time when the last bit of `n_bytes` has left; ready at `ready_at`, reserved at `now`."""
        with self._alone():
            start = max(self._free_at, ready_at, now - self._credit)
            self._free_at = start + n_bytes * 8 / self.bandwidth
            return self._free_at

    def overtake(self, now: float, n_bytes: int) -> float:
        """Return the same for `n_bytes` that are sent first, at once. Bytes in the queue leave later by that time."""
        with self._alone():
            seconds = n_bytes * 8 / self.bandwidth
            self._free_at = max(self._free_at, now) + seconds
            return now + seconds

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep all other users out of the bucket during the block."""
        with self._lock:
            yield


class FileBucket(Bucket):
    """Bucket for the processes of one machine. A file stores the time when it is free; all use the machine's clock."""

    def __init__(self, bandwidth: float, path: Path) -> None:
        super().__init__(bandwidth)
        self._path = path
        self._processes = FileLock(f"{path}.lock", poll_interval=POLL_SECONDS)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, self._processes:
            started = time.time() - time.monotonic()  # an older file has times of another clock
            if self._path.exists() and self._path.stat().st_mtime > started:
                content = self._path.read_bytes()
                if len(content) == _FREE_AT.size:
                    [self._free_at] = _FREE_AT.unpack(content)
            yield
            with suppress(OSError):  # the disk fails: for a while, only this process keeps to the bandwidth
                self._path.write_bytes(_FREE_AT.pack(self._free_at))


class DelayLine:
    """A bucket, followed by latency with jitter: gives the time at which a frame arrives. Keeps the order.

    Jitter is uniform in [0, jitter], drawn from `seed` (such as "17/home.0-1/forward"), so it is reproducible.
    """

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self._shape = shape
        self._bucket = None if shape.bandwidth is None else Bucket(shape.bandwidth)
        self._random = random.Random(seed)
        self._last = float("-inf")

    def arrival(self, now: float, n_bytes: int) -> float:
        """Return the time when a frame of `n_bytes` on the wire, sent at `now`, arrives."""
        left = now if self._bucket is None else self._bucket.reserve(now, now, n_bytes)
        self._last = max(self._last, left + delay(self._shape, self._random))
        return self._last


class Stream:
    """Sends one message after the other through all its buckets at the same time, at the speed of the slowest."""

    def __init__(self, buckets: Sequence[Bucket], clock: Clock | None = None) -> None:
        self._buckets = buckets
        self._granted = [0] * len(buckets)
        """Reserved bytes of each bucket that were not sent yet, and the time when they have left."""
        self._until = [float("-inf")] * len(buckets)
        self._clock = clock or MonotonicClock()

    def leave(self, n_bytes: int, ready_at: float) -> tuple[float, float]:
        """Wait until `n_bytes`, ready since `ready_at`, have left.

        Returns the times when they began and ended to leave.
        """
        began, left, to_go = None, ready_at, n_bytes
        while to_go and self._buckets:
            now = self._clock.now()
            if n_bytes <= CONTROL_BYTES:
                portion, left = to_go, max(bucket.overtake(now, to_go) for bucket in self._buckets)
            else:
                portion, left = self.turn(now, left, to_go)
            if began is None:
                began = left - portion * 8 / min(bucket.bandwidth for bucket in self._buckets)
            to_go -= portion
            wait_until(left, self._clock)
        return ready_at if began is None else began, left

    def turn(self, now: float, ready_at: float, to_go: int) -> tuple[int, float]:
        """Return how many of `to_go` bytes leave next, and when they have left. Reserves quanta that are used up."""
        for index, bucket in enumerate(self._buckets):
            if self._granted[index] == 0:
                quantum = min(max(1, int(bucket.bandwidth * TURN_SECONDS / 8)), to_go)
                self._granted[index], self._until[index] = quantum, bucket.reserve(now, ready_at, quantum)
        portion = min(self._granted)
        self._granted = [granted - portion for granted in self._granted]
        shares = zip(self._buckets, self._granted, self._until, strict=True)
        return portion, max(until - granted * 8 / bucket.bandwidth for bucket, granted, until in shares)


class Arrivals:
    """Arrival times of bytes that have left: after the receiver's line, after earlier bytes, and after the latency.

    Receiving takes no longer than sending did, if the receiver's line is as fast and idle.
    """

    def __init__(self, bucket: Bucket | None, shape: LinkShape, slowest: float | None, seed: str, clock: Clock) -> None:
        """`shape`: latency and jitter, drawn from `seed`. `slowest`: bits per second of sending, if known."""
        self._bucket, self._slowest, self._clock = bucket, slowest, clock
        self._delays = DelayLine(LinkShape(None, shape.latency, shape.jitter), seed)

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
            self._items.append((due, item))
            self._changed.notify()

    def put_due(self, items: Iterable[T], due: float | None) -> None:
        """Add items with a given arrival time (None: at once). Items keep their order."""
        with self._changed:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            self._items.extend((due, item) for item in items)
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
                ends = [end for end in (deadline, self._items[0][0] if self._items else None) if end is not None]
                self._clock.wait(self._changed, min(ends) - self._clock.now() if ends else None)
            return self._items.popleft()[1]

    def poll(self) -> T | None:
        """Return the next item if it is due now, else None; also None if the queue has ended."""
        with self._changed:
            return self._items.popleft()[1] if self._items and self._is_due() else None

    def _is_due(self) -> bool:
        if not self._items:
            if self._ended is not None:
                raise LinkClosed(self._ended)
            return False
        due = self._items[0][0]
        return due is None or due <= self._clock.now()

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


class StreamQueue(Generic[T]):
    """Queue that yields its items when a stream has sent them. It has the interface of ShapedQueue.

    A separate thread sends the items, whether or not a receiver waits for them.
    """

    def __init__(self, stream: Stream, arrives: Callable[[float, float, int], float] | None, clock: Clock) -> None:
        """`arrives` gives the time at which bytes (began, left, n bytes) may come out; None: as soon as they left."""
        self._clock = clock
        self._waiting: ShapedQueue[tuple[T, Sequence[int], float]] = ShapedQueue(LinkShape())
        self._left: ShapedQueue[T] = ShapedQueue(LinkShape(), clock=clock)
        self.get, self.poll = self._left.get, self._left.poll

        def run() -> None:
            try:
                while True:
                    item, frames, ready = self._waiting.get()
                    due = None
                    for n_bytes in frames:
                        began, ready = stream.leave(n_bytes, ready)
                        due = None if arrives is None else arrives(began, ready, n_bytes)
                    self._left.put_due([item], due)
            except LinkClosed as closed:
                self._left.close(str(closed))

        threading.Thread(target=run, name="stream", daemon=True).start()

    def put(self, item: T, frames: Sequence[int] = (0,)) -> None:
        self._waiting.put((item, frames, self._clock.now()))

    def close(self, reason: str = PEER_CLOSED) -> None:
        self._waiting.close(reason)

    def abort(self, cause: str) -> None:
        self._waiting.abort(cause)
        self._left.abort(cause)


class Lines:
    """Access lines of the local members, as buckets that all their streams share. Links without them need none."""

    def __init__(self, shared: Path | None = None, clock: Clock | None = None) -> None:
        """`shared`: folder for the processes of a run on one machine; None if all members are in this process."""
        self.clock = clock or MonotonicClock()
        self._shared = shared
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, Way], Bucket] = {}

    def buckets(self, link: LinkSpec, direction: Direction) -> list[Bucket]:
        """Return the buckets of the lines on the path of a direction, for a caller that shapes all of it."""
        up, down = link.lines(direction)
        return [bucket for bucket in (self._bucket(up, "up"), self._bucket(down, "down")) if bucket is not None]

    def leaving(
        self, link: LinkSpec, direction: Direction, seed: int, is_here: bool = False
    ) -> ShapedQueue[T] | StreamQueue[T]:
        """Return the queue of what one direction sends. Items come out on arrival; with lines, when they have left.

        `is_here`: the receiver is in this process, so items come out on arrival with lines, too.
        """
        shape = link.shape(direction)
        if not link.has_lines:
            return ShapedQueue(shape, f"{seed}/{link.name}/{direction}", self.clock)
        up = self._bucket(link.lines(direction)[0], "up")
        own = [] if shape.bandwidth is None else [Bucket(shape.bandwidth)]
        stream = Stream([*([] if up is None else [up]), *own], self.clock)
        return StreamQueue(stream, self.arriving(link, direction, seed).at if is_here else None, self.clock)

    def arriving(self, link: LinkSpec, direction: Direction, seed: int) -> Arrivals:
        """Return the arrival times of one direction."""
        (up, down), shape = link.lines(direction), link.shape(direction)
        both = shape.bandwidth, None if up is None else up.bandwidth_of("up")
        limits = [bandwidth for bandwidth in both if bandwidth is not None]
        name = f"{seed}/{link.name}/{direction}"
        return Arrivals(self._bucket(down, "down"), shape, min(limits, default=None), name, self.clock)

    def _bucket(self, line: Line | None, way: Way) -> Bucket | None:
        if line is None or (bandwidth := line.bandwidth_of(way)) is None:
            return None
        with self._lock:
            if (line.name, way) not in self._buckets:
                is_shared = len(line.members) > 1 or EXCHANGE in line.members  # every member uses this line
                if self._shared is None or not is_shared:
                    self._buckets[line.name, way] = Bucket(bandwidth)
                else:
                    self._shared.mkdir(parents=True, exist_ok=True)
                    self._buckets[line.name, way] = FileBucket(bandwidth, self._shared / f"{line.name}-{way}")
            return self._buckets[line.name, way]


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

    def start_message(self) -> Callable[[int], float]:
        """Wait for the latency, once per message regardless of its frames; return a function that sends its frames.

        It waits until so many bytes have crossed the link, and returns the seconds for which the link was occupied.
        Frames count as ready since the start of their message, so that a late sender can catch up.
        """
        with self._lock:
            arrives = self.clock.now() + delay(self.shape, self._random)
        wait_until(arrives, self.clock)
        stream, started = Stream(self.buckets, self.clock), self.clock.now()

        def transmit(n_bytes: int) -> float:
            stream.leave(n_bytes, started)
            return busy_seconds(self.shape, n_bytes)

        return transmit
