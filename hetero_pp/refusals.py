"""What was not let in: counted by kind, and told at a bounded rate, so that who sends much of it costs little."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from hetero_pp.messages.messages_pb2 import Refusal

TOLD_AT_ONCE = 20
SECONDS_BETWEEN = 1.0
"""From the twenty-first on, of all kinds together."""


class Kind(StrEnum):
    """Why something was not let in."""

    STRANGER = "of a stranger"
    """Its sender has not shown who it is."""
    FORBIDDEN = "forbidden"
    """It is not its sender's to ask or to tell."""
    MALFORMED = "malformed"
    """No honest peer sends it."""
    UNEXPECTED = "unexpected"
    """It fits neither the run nor its round: another configuration, version or epoch, a second contribution."""


class Refusals:
    """Of one process. Safe to use from many threads."""

    def __init__(self, tell: Callable[[Refusal], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` is called with one, or with the last of so many of a kind that were not told."""
        self.counts: Counter[Kind] = Counter()
        self._tell, self._clock = tell, clock
        self._untold: dict[Kind, Refusal] = {}
        self._room, self._since = float(TOLD_AT_ONCE), clock()
        self._lock = threading.Lock()

    def add(self, sender: str, reason: str, kind: Kind) -> None:
        """Something was not let in of a sender."""
        with self._lock:
            self.counts[kind] += 1
            before = self._untold.pop(kind, Refusal())
            refusal = Refusal(sender=sender, reason=reason, kind=kind, count=before.count + 1)
            if not self._has_room():
                self._untold[kind] = refusal
                return
        self._tell(refusal)

    def flush(self) -> None:
        """Tell what was not told."""
        with self._lock:
            left, self._untold = list(self._untold.values()), {}
        for refusal in left:
            self._tell(refusal)

    def _has_room(self) -> bool:
        now = self._clock()
        self._room = min(self._room + (now - self._since) / SECONDS_BETWEEN, float(TOLD_AT_ONCE))
        self._since = now
        if self._room < 1:
            return False
        self._room -= 1
        return True
