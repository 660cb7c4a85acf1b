"""Progress of long operations, reported to a callback, and a date that never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable

OnProgress = Callable[[str, float], None]
"""(operation, share that is done, from 0 to 1). Called often; a callback that shows progress skips most calls."""


def untold(what: str, share: float) -> None:
    """Ignore progress."""


class NowAndThen:
    """Forwards progress after `first` seconds, then after pauses that `later` computes from the previous pause."""

    def __init__(
        self, tell: OnProgress, first: float, later: Callable[[float], float], clock: Callable[[], float]
    ) -> None:
        self._tell, self._later, self._clock = tell, later, clock
        self._wait = first
        self._due = clock() + first

    def __call__(self, doing: str, share: float) -> None:
        """Report progress if it is due."""
        now = self._clock()
        if now >= self._due:
            self._tell(doing, share)
            self._wait = self._later(self._wait)
            self._due = now + self._wait


def steady_clock(
    date: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock of seconds since 1970: the date now, and from then on the seconds that have passed.

    The exchange uses it for certificates and reports. If its machine's clock is set while a run is under way, no member
    loses its slot, and the run's duration stays right.
    """
    began = date() - elapsed()
    return lambda: began + elapsed()
