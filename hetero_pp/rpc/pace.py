"""How much one caller may tell in a second: who tells more waits, and with it nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hetero_pp.errors import TooMuch


class Pace:
    """Of each caller a bucket that fills at a rate, up to a burst. Safe to use from many threads."""

    def __init__(self, a_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = a_second, burst, clock
        self._lock = threading.Lock()
        self._empty_until: dict[str, float] = {}
        """By caller, when its bucket had been empty, or will be: since then it fills."""

    def due_in(self, caller: str, count: int) -> float:
        """Seconds to wait before so much is taken in. Raises TooMuch for more than a burst."""
        if count > self._burst:
            raise TooMuch(f"{caller} has told {count} at once, expected at most {self._burst}")
        with self._lock:
            now, whole = self._clock(), self._burst / self._rate
            since = max(self._empty_until.get(caller, -float("inf")), now - whole) + count / self._rate
            self._empty_until[caller] = since
        return max(0.0, since - now)
