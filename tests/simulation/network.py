"""The network between processes: messages are lost, duplicated, delayed and therefore reordered."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from simulation.dice import Faults
from simulation.timeline import Timeline

SECONDS = 0.2
"""Seconds that the slowest message takes, if it is not late."""
LATE_SECONDS = 20.0


class Network:
    """Delivers each message by a call of its receiver."""

    def __init__(self, timeline: Timeline, dice: Random, faults: Faults) -> None:
        self._timeline, self._dice = timeline, dice
        self.lost, self.doubled, self.late = faults.lost, faults.doubled, faults.late

    def send(self, deliver: Callable[..., None], *message: Any) -> None:
        """Deliver a message once, never or twice."""
        if self.lost and self._dice.random() < self.lost:
            return
        self._timeline.after(self._seconds(), deliver, *message)
        if self.doubled and self._dice.random() < self.doubled:
            self._timeline.after(self._seconds(), deliver, *message)

    def heal(self) -> None:
        """From now on deliver every message once and without delay."""
        self.lost = self.doubled = self.late = 0.0

    def _seconds(self) -> float:
        seconds = SECONDS * self._dice.random()
        if self.late and self._dice.random() < self.late:
            seconds += LATE_SECONDS * self._dice.random()
        return seconds
