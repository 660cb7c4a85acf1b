"""Refused messages: counted by kind and reported at a bounded rate, so that a flood of them costs little."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from hetero_pp.messages.messages_pb2 import Refusal

TOLD_AT_ONCE = 20
SECONDS_BETWEEN = 1.0  # seconds between reports after the first TOLD_AT_ONCE, for all kinds together


class Kind(StrEnum):
    """Reason of a refusal."""

    STRANGER = "of a stranger"  # the sender is not authenticated
    FORBIDDEN = "forbidden"  # the sender may not make this request or report
    MALFORMED = "malformed"  # no honest peer sends it
    UNEXPECTED = "unexpected"
    """It does not fit the run or its round: another configuration, version or generation, or a second contribution."""


class Refusals:
    """Refusals of one process. Thread-safe."""

    def __init__(self, tell: Callable[[Refusal], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty count. `tell` receives one refusal, or the last of several of its kind with their count."""
        self.counts: Counter[Kind] = Counter()
        self._tell, self._clock = tell, clock
        self._untold: dict[Kind, Refusal] = {}
        self._room, self._since = float(TOLD_AT_ONCE), clock()
        self._lock = threading.Lock()

    def add(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a refusal of a sender's message, and report it if the rate allows."""
        with self._lock:
            self.counts[kind] += 1
            before = self._untold.pop(kind, Refusal())
            refusal = Refusal(sender=sender, reason=reason, kind=kind, count=before.count + 1)
            if not self._has_room():
                self._untold[kind] = refusal
                return
        self._tell(refusal)

    def flush(self) -> None:
        """Report the refusals that were held back."""
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
