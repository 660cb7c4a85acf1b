"""Calls that wait for changes of the run's state. A change wakes only the calls that wait for its subject.

With one condition for all, each heartbeat would wake every waiting call: a million switches of threads per second with
a thousand members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

SECONDS_BETWEEN_LOOKS = 5.0
"""Interval at which a waiting call checks whether its caller is there; shorter than the calls' own time limit."""

EVERYBODY = ""
"""Subject of changes that wake all calls: the run begins, a round closes, the run fails or is through."""

CLOCK = " "
"""Subject of a change of the time at which something is due. No slot has such a name."""


class Notifier:
    """Waiting calls by subject: the name of a slot, or another text. All share one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """The lock, and the wait for a change of any subject."""
        self._waiting: dict[str, set[threading.Condition]] = {}

    def wait_for(self, subject: str, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, called with the lock held, returns True. The caller holds the lock."""
        while not is_so():
            self.pause(subject, SECONDS_BETWEEN_LOOKS)

    def pause(self, subject: str, seconds: float) -> None:
        """Wait until the subject changes, or for so many seconds. The caller holds the lock."""
        own = threading.Condition(self.lock)
        waiting = self._waiting.setdefault(subject, set())
        waiting.add(own)
        own.wait(seconds)
        waiting.discard(own)

    def wake(self, subjects: Iterable[str]) -> None:
        """Wake the calls that wait for these subjects, and those that wait for any change."""
        with self.lock:
            for subject in subjects:
                for one in self._waiting.get(subject, ()):
                    one.notify()
            self.changed.notify_all()

    def wake_all(self) -> None:
        self.wake(self._waiting)
