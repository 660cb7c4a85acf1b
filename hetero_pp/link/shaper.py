"""Holds what members exchange beside stage messages to a link's shape: contributions, snapshots, what is fetched."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_pp.link.shaping import Clock, MonotonicClock, busy_seconds, delay, wait_until
from hetero_pp.link.turns import Bucket, Stream, ThreadBucket
from hetero_pp.links import LinkShape


class Shaper:
    """One direction. Its messages share it, and take turns with all else that passes the same lines."""

    def __init__(
        self, shape: LinkShape, seed: str = "", clock: Clock | None = None, lines: Sequence[Bucket] = ()
    ) -> None:
        self.shape = shape
        self.clock = clock or MonotonicClock()
        own = [] if shape.bandwidth is None else [ThreadBucket(shape.bandwidth)]
        self.buckets: Sequence[Bucket] = [*own, *lines]
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def start_message(self) -> ShapedMessage:
        """Wait for the latency, once for a message however many frames it has."""
        with self._lock:
            arrives = self.clock.now() + delay(self.shape, self._random)
        wait_until(arrives, self.clock)
        return ShapedMessage(self.shape, Stream(self.buckets, self.clock), self.clock.now())


@dataclass(frozen=True)
class ShapedMessage:
    """One message under a Shaper. Its frames count as ready since it started, so its sender may catch up."""

    shape: LinkShape
    stream: Stream
    started: float

    def transmit(self, n_bytes: int) -> float:
        """Wait until `n_bytes` on the wire have crossed; returns the seconds that the link itself was occupied."""
        self.stream.leave(n_bytes, self.started)
        return busy_seconds(self.shape, n_bytes)
