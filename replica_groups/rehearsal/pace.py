"""Timed waits that take the place of the computation of one member."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The clock of an emulated device. It advances by what the device computes and by what its member waits for others.

    Other work of this process, such as the conversion of messages, is part of the costs. So it shortens the next wait.
    """

    def __init__(self) -> None:
        self.waited: Callable[[], float] = lambda: 0.0
        """Returns the seconds for which the member has waited for others since some moment before the step."""
        self.computed = 0.0
        """Seconds of emulated computation so far."""
        self.late = 0.0
        """Most seconds by which this process was later than the device."""
        self._free_at, self._waited_before = time.monotonic(), 0.0

    def begin(self) -> None:
        """Begin a step: what the process did since the last computation took time of the device, too."""
        self._free_at, self._waited_before = time.monotonic(), self.waited()

    def compute(self, seconds: float) -> None:
        """Return once the device has computed for that long."""
        waited = self.waited()
        self._free_at += waited - self._waited_before + seconds
        self._waited_before = waited
        self.computed += seconds
        left = self._free_at - time.monotonic()
        self.late = max(self.late, -left)
        if left > 0:
            time.sleep(left)
