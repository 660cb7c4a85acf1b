"""Rate limits for each caller: a caller that exceeds its own waits or is refused, and no other caller is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hetero_pp.core.errors import TooMuch


class Pace:
    """A bucket for each caller that fills at a rate, up to a burst. Thread-safe."""

    def __init__(self, a_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = a_second, burst, clock
        self._lock = threading.Lock()
        self._empty_until: dict[str, float] = {}
        """Caller -> time at which its bucket was or will be empty; it fills from then on."""

    def due_in(self, caller: str, count: int) -> float:
        """Return the seconds to wait before `count` more are allowed. Raises TooMuch for more than a burst."""
        if count > self._burst:
            raise TooMuch(f"{caller} has sent {count} at once, expected at most {self._burst}")
        with self._lock:
            now = self._clock()
            since = self._empty_until[caller] = self._empty_after(caller, count, now)
        return max(0.0, since - now)

    def refused_for(self, caller: str) -> float:
        """Take one in and return 0, or take nothing in and return the seconds until one would be.

        A refused caller owes nothing for having asked. Otherwise one that retries faster than the rate would never be
        let in again.
        """
        with self._lock:
            now = self._clock()
            since = self._empty_after(caller, 1, now)
            if since <= now:
                self._empty_until[caller] = since
        return max(0.0, since - now)

    def _empty_after(self, caller: str, count: int, now: float) -> float:
        """Return when the caller's bucket is empty once so much is taken from it."""
        return max(self._empty_until.get(caller, -float("inf")), self._full_since(now)) + count / self._rate

    def _full_since(self, now: float) -> float:
        """Return the time at which a bucket was empty that is full just now."""
        return now - self._burst / self._rate

    def _forget_full(self, now: float) -> None:
        """Forget callers whose buckets are full, which are like new ones."""
        full = self._full_since(now)
        self._empty_until = {caller: since for caller, since in self._empty_until.items() if since > full}
