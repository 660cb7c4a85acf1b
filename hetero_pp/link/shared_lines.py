"""The lines of the members that are here, as buckets that all their streams share."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from hetero_pp.lines import LineSpec, Way
from hetero_pp.link.shaping import Clock, MonotonicClock, ShapedQueue, TokenBucket, direction_queue
from hetero_pp.link.turns import Arrivals, Bucket, Stream, StreamQueue, T, ThreadBucket
from hetero_pp.links import EXCHANGE, Direction, LinkSpec

POLL_SECONDS = 0.0005
"""Between looks at a bucket that another process has; it has it for some microseconds."""


class FileBucket:
    """A bucket for processes of one machine: when it is free stands in a file. They share the machine's clock."""

    def __init__(self, rate: float, path: Path) -> None:
        self.rate = rate
        self._bucket = TokenBucket(rate)
        self._path = path
        self._threads = threading.Lock()
        self._processes = FileLock(f"{path}.lock", poll_interval=POLL_SECONDS)

    def reserve(self, now: float, ready_at: float, n_bytes: int) -> float:
        """See Bucket."""
        with self._threads, self._processes:
            self._read()
            left = self._bucket.reserve(now, ready_at, n_bytes)
            self._write()
        return left

    def overtake(self, now: float, n_bytes: int) -> float:
        """See Bucket."""
        with self._threads, self._processes:
            self._read()
            left = self._bucket.overtake(now, n_bytes)
            self._write()
        return left

    def _read(self) -> None:
        started = time.time() - time.monotonic()  # an older file tells the time of another clock
        if self._path.exists() and self._path.stat().st_mtime > started:
            content = self._path.read_bytes()
            if len(content) == _FREE_AT.size:
                [self._bucket.free_at] = _FREE_AT.unpack(content)

    def _write(self) -> None:
        with suppress(OSError):  # of a disk that fails: then this process alone keeps to the rate for a while
            self._path.write_bytes(_FREE_AT.pack(self._bucket.free_at))


_FREE_AT = struct.Struct("<d")


class Lines:
    """Buckets by line and way, made when first asked for. Links without lines need none and stay what they are."""

    def __init__(self, shared: Path | None = None, clock: Clock | None = None) -> None:
        """`shared` is the folder that processes of a run on one machine share; None if all members are in this one."""
        self.clock = clock or MonotonicClock()
        self._shared = shared
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, Way], Bucket] = {}

    def buckets(self, link: LinkSpec, direction: Direction) -> list[Bucket]:
        """Of the lines that a direction passes, for who shapes all of it."""
        up, down = link.lines(direction)
        return [one for one in (self._bucket(up, "up"), self._bucket(down, "down")) if one is not None]

    def leaving(self, link: LinkSpec, direction: Direction, seed: int) -> ShapedQueue[T] | StreamQueue[T]:
        """Out of which comes what one direction may send. Without lines, when it would be there; with, once it left."""
        return self._queue(link, direction, seed, is_here=False)

    def crossing(self, link: LinkSpec, direction: Direction, seed: int) -> ShapedQueue[T] | StreamQueue[T]:
        """Out of which comes what one direction of a link within this process has brought."""
        return self._queue(link, direction, seed, is_here=True)

    def _queue(self, link: LinkSpec, direction: Direction, seed: int, is_here: bool) -> ShapedQueue[T] | StreamQueue[T]:
        """`is_here`: whether who receives is in this process too, so that the queue times the arrival."""
        if not link.has_lines:
            return direction_queue(link, direction, seed, self.clock)
        up, bandwidth = self._bucket(link.lines(direction)[0], "up"), link.shape(direction).bandwidth
        own = [] if bandwidth is None else [ThreadBucket(bandwidth)]
        stream = Stream([*([] if up is None else [up]), *own], self.clock)
        return StreamQueue(stream, self.arriving(link, direction, seed).at if is_here else None, self.clock)

    def arriving(self, link: LinkSpec, direction: Direction, seed: int) -> Arrivals:
        """When is there what one direction sent."""
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
        is_shared = len(line.members) > 1 or EXCHANGE in line.members  # all members shape what they exchange
        if self._shared is None or not is_shared:
            return ThreadBucket(rate)
        self._shared.mkdir(parents=True, exist_ok=True)
        return FileBucket(rate, self._shared / f"{line.name}-{way}")
