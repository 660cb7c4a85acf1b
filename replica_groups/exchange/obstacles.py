"""What an exchange cannot write or read now, and tries again: for whoever watches, instead of blame for members."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hetero_pp.files import LONGEST_PAUSE
from hetero_pp.links import EXCHANGE

_FORGOTTEN = 2 * LONGEST_PAUSE
"""Seconds after which an operation that is not tried any more, as nobody needs it, is no obstacle."""


@dataclass
class _Obstacle:
    why: str
    since: float
    tried: float
    """When it failed last."""
    told: float
    """When it was printed last."""


class Obstacles:
    """Operations of one exchange that fail. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._found: dict[Hashable, _Obstacle] = {}

    def failed(self, operation: Hashable, why: str) -> None:
        """An operation has failed, and will be tried again. It is printed at first, and now and then."""
        with self._lock:
            now, known = self._clock(), self._found.get(operation)
            if known is None:
                known = self._found[operation] = _Obstacle(why, now, now, -LONGEST_PAUSE)
            is_due = why != known.why or now - known.told >= LONGEST_PAUSE
            known.why, known.tried = why, now
            if is_due:
                known.told = now
        if is_due:
            print(f"{EXCHANGE}: {why}; retrying", file=sys.stderr, flush=True)

    def over(self, operation: Hashable) -> None:
        """An operation was done, or is not needed any more."""
        with self._lock:
            self._found.pop(operation, None)

    def oldest(self) -> tuple[str, float] | None:
        """What has failed for longest, with why, and for how many seconds; None if nothing does."""
        with self._lock:
            now = self._clock()
            self._found = {key: one for key, one in self._found.items() if now - one.tried < _FORGOTTEN}
            first = min(self._found.values(), key=lambda one: one.since, default=None)
            return None if first is None else (first.why, now - first.since)
