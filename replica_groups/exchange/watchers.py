"""What was told of a run, for whoever watches it: now, and from its start on."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from hetero_pp.messages.messages_pb2 import Report

REMEMBERED_REPORTS = 10_000
"""How far back a watcher that comes late can see."""

_CONCERN_ALL = ("joined", "waiting", "begun", "reading", "failure", "standing")


class Watchers:
    """Hands every report to everybody who watches. Safe to use from many threads."""

    def __init__(self) -> None:
        self.reported = 0
        """How many reports there were."""
        self._lock = threading.Lock()
        self._watchers: list[queue.SimpleQueue[Report | None]] = []
        self._reports: deque[bytes] = deque(maxlen=REMEMBERED_REPORTS)  # as messages they would take five times as much
        self._ended = False

    def tell(self, reports: Sequence[Report]) -> None:
        """To all of them, in this order."""
        with self._lock:
            self._reports.extend(report.SerializeToString() for report in reports)
            self.reported += len(reports)
            for report in reports:
                for watcher in self._watchers:
                    watcher.put(report)

    def watch(self, members: Collection[str] = ()) -> Iterator[Report]:
        """Every report from the start of the run on, until there are no more.

        Of some members only what they tell, and what concerns everybody: who joins, waits, is gone; failures.
        """
        watcher: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        with self._lock:
            for report in self._reports:
                watcher.put(Report.FromString(report))
            if self._ended:
                watcher.put(None)
            self._watchers.append(watcher)
        try:
            while (one := watcher.get()) is not None:
                if not members or one.member in members or one.WhichOneof("event") in _CONCERN_ALL:
                    yield one
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def end(self) -> None:
        """No report will come any more."""
        with self._lock:
            self._ended = True
            for watcher in self._watchers:
                watcher.put(None)
