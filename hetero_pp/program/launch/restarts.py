"""Limits how often a process that dies is restarted."""

from __future__ import annotations

from collections import defaultdict, deque

from hetero_pp.config.run_config import RestartSettings


class Restarts:
    """Allows a number of restarts per process within a time window. Pure: every time is an argument."""

    def __init__(self, settings: RestartSettings) -> None:
        self.settings = settings
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, member: str, now: float) -> int | None:
        """Count a restart of a member. Return its number within the window, or None if the limit is reached."""
        begun = self._begun[member]
        while begun and now - begun[0] > self.settings.within:
            begun.popleft()
        if len(begun) >= self.settings.count:
            return None
        begun.append(now)
        return len(begun)
