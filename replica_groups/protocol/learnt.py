"""Time limits learned from the run itself: the delay of late contributions, and the silence of members."""

from __future__ import annotations

import math
from collections import deque

from replica_groups.protocol.rules import Window

REMEMBERED = 64
"""Number of recent observations that count."""


class Lateness:
    """Delay of contributions after the quorum; determines the grace window."""

    def __init__(self, window: Window, quantile: float = 0.9) -> None:
        self._window, self._quantile = window, quantile
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.grace = window.of(None)
        """Grace window in seconds; the largest allowed one until something was observed."""

    def came(self, seconds: float) -> None:
        """Note a contribution that came `seconds` after the quorum."""
        self._seen.append(max(0.0, seconds))
        ordered = sorted(self._seen)
        self.grace = self._window.of(ordered[math.ceil(self._quantile * len(ordered)) - 1])


class Silence:
    """Longest time between two signs of life of a member; determines how long to wait for the next."""

    def __init__(self, window: Window, now: float) -> None:
        self._window = window
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self.since = now
        self.lease = window.of(0.0)
        """Seconds to wait for the next sign."""

    def sign(self, now: float) -> None:
        """Note a sign of life. A silence beyond the lease was a failure: it teaches no more than the lease."""
        self._gaps.append(min(now - self.since, self.lease))
        self.since = now
        self.lease = self._window.of(max(self._gaps))

    def restart(self, now: float) -> None:
        """Note that the member is present, without learning from the time until now."""
        self.since = now

    @property
    def least(self) -> float:
        """The shortest time that is ever waited."""
        return self._window.least
