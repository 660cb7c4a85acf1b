"""A clock that tells the date and is not changed when the machine's clock is set."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock(
    date: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock of seconds since 1970: the date now, and from then on the seconds that have passed.

    The exchange uses it for certificates and reports. If its machine's clock is set while a run is under way, no member
    loses its slot, and the run's duration stays right.
    """
    began = date() - elapsed()
    return lambda: began + elapsed()
