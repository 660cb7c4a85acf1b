"""Failing reads and writes of an exchange, which it retries: reported, so that no member is blamed for the delay."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.files import LONGEST_PAUSE

_FORGOTTEN = 2 * LONGEST_PAUSE
"""Seconds after which an operation that is not retried any more, because nobody needs it, is forgotten."""


@dataclass
class _Obstacle:
    why: str
    since: float
    tried: float
    """Time of its last failure."""
    told: float
    """Time at which it was last printed."""


class Obstacles:
    """Operations of one exchange that fail. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._found: dict[Hashable, _Obstacle] = {}

    def failed(self, operation: Hashable, why: str) -> None:
        """Note that an operation has failed and will be retried. Prints its failures at intervals."""
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
        """Note that an operation has succeeded, or is not needed any more."""
        with self._lock:
            self._found.pop(operation, None)

    def oldest(self) -> tuple[str, float] | None:
        """Return the cause of the operation that has failed for longest, and its seconds; None if nothing fails."""
        with self._lock:
            now = self._clock()
            self._found = {key: one for key, one in self._found.items() if now - one.tried < _FORGOTTEN}
            first = min(self._found.values(), key=lambda one: one.since, default=None)
            return None if first is None else (first.why, now - first.since)
