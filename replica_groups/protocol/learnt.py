"""What is learnt from the run itself: how late contributions come, and how long a member is silent."""

from __future__ import annotations

import math
from collections import deque

from replica_groups.protocol.rules import Window

REMEMBERED = 64
"""How many of the last ones count."""


class Lateness:
    """How long after the quorum those came that it did without: the grace window follows it."""

    def __init__(self, window: Window, quantile: float = 0.9) -> None:
        self._window, self._quantile = window, quantile
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.grace = window.of(None)
        """Seconds; the longest that is allowed until something was seen."""

    def came(self, seconds: float) -> None:
        """A contribution, so long after a quorum had come."""
        self._seen.append(max(0.0, seconds))
        ordered = sorted(self._seen)
        self.grace = self._window.of(ordered[math.ceil(self._quantile * len(ordered)) - 1])


class Silence:
    """The longest time between two signs of somebody; how long to wait for the next."""

    def __init__(self, window: Window, now: float) -> None:
        self._window = window
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self.since = now
        self.lease = window.of(0.0)
        """Seconds."""

    def sign(self, now: float) -> None:
        """It is there."""
        self._gaps.append(now - self.since)
        self.since = now
        self.lease = self._window.of(max(self._gaps))

    def restart(self, now: float) -> None:
        """It is there, and the time until now says nothing."""
        self.since = now

    @property
    def least(self) -> float:
        """The shortest that is ever waited."""
        return self._window.least
