"""A simulated clock that only advances when code waits."""

from __future__ import annotations

import threading


class FakeClock:
    """Only waiting advances the time."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        assert seconds is not None, "this would wait for ever"
        self.time += seconds
