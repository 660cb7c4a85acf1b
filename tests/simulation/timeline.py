"""A simulated clock with planned events, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Seconds since the start. Events at the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Plan a call in so many seconds."""
        self._count += 1
        heapq.heappush(self._planned, (self.now + seconds, self._count, what, arguments))

    def go_on(self) -> bool:
        """Run the next planned call. Return whether there was one."""
        if not self._planned:
            return False
        self.now, _, what, arguments = heapq.heappop(self._planned)
        self.happened += 1
        what(*arguments)
        return True
