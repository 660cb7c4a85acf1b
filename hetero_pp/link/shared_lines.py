"""Access lines of the local members, as buckets that all their streams share."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.config.links import EXCHANGE, Direction, LinkSpec
from hetero_pp.link.shaping import Clock, MonotonicClock, ShapedQueue, direction_queue
from hetero_pp.link.turns import Arrivals, Bucket, Stream, StreamQueue, T

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
