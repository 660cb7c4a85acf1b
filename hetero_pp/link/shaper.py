"""Shapes traffic other than stage messages to the settings of a link: contributions, snapshots and downloads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_pp.config.links import LinkShape
from hetero_pp.link.shaping import Clock, MonotonicClock, busy_seconds, delay, wait_until
from hetero_pp.link.turns import Bucket, Stream, ThreadBucket


class Shaper:
    """Shaper of one direction. Its messages share the link, and take turns with other traffic on the access lines."""

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
