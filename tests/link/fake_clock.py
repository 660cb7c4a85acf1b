"""A clock that only moves when somebody waits."""

from __future__ import annotations

import threading


class FakeClock:
    """Waiting moves the time and nothing else does."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        assert seconds is not None, "this would wait for ever"
        self.time += seconds
