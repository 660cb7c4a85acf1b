"""How often a process that dies is started again."""

from __future__ import annotations

from collections import defaultdict, deque

from hetero_pp.run.config import RestartSettings


class Restarts:
    """So many of each process within a time. Pure: every time is an argument."""

    def __init__(self, settings: RestartSettings) -> None:
        self.settings = settings
        self._begun: defaultdict[str, deque[float]] = defaultdict(deque)

    def take(self, member: str, now: float) -> int | None:
        """Start a member again: the how-manyeth time that is, or None if it was too often."""
        begun = self._begun[member]
        while begun and now - begun[0] > self.settings.within:
            begun.popleft()
        if len(begun) >= self.settings.count:
            return None
        begun.append(now)
        return len(begun)
