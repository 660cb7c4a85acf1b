"""Distribution of reports to watchers, from the start of the run."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from hetero_pp.core.errors import TooMuch
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.exchange_service import IsAsked, always

REMEMBERED_REPORTS = 10_000
"""Number of past reports that a new watcher receives."""

SECONDS_BETWEEN_LOOKS = 0.5
"""Interval at which it is checked whether a watcher is still there."""

_CONCERN_ALL = ("joined", "waiting", "begun", "reading", "failure", "standing", "over")


class _Watcher:
    """Reports on their way to one watcher: a bounded number. A watcher that reads too slowly is cut."""

    def __init__(self, most: float) -> None:
        self.is_cut = False
        self._most = most
        self._reports: queue.SimpleQueue[Report | bytes | None] = queue.SimpleQueue()

    def put(self, report: Report | bytes | None) -> None:
        """Queue a report; None: the last one."""
        if self._reports.qsize() >= self._most:
            self.is_cut = True
        if not self.is_cut:
            self._reports.put(report)

    def get(self) -> Report | None:
        """Return a report. Raises queue.Empty after a while, TooMuch if the watcher is cut."""
        if self.is_cut:
            raise TooMuch(f"found {self._most} unread reports, expected fewer")
        found = self._reports.get(timeout=SECONDS_BETWEEN_LOOKS)
        return Report.FromString(found) if isinstance(found, bytes) else found


class Watchers:
    """Distributes every report to all watchers. Thread-safe."""

    def __init__(self) -> None:
        self.reported = 0
        """Number of reports so far."""
        self._lock = threading.Lock()
        self._watchers: list[_Watcher] = []
        self._reports: deque[bytes] = deque(maxlen=REMEMBERED_REPORTS)  # as messages they would take five times as much
        self._ended = False

    def tell(self, reports: Sequence[Report]) -> None:
        """Pass reports to all watchers, in this order."""
        with self._lock:
            self._reports.extend(report.SerializeToString() for report in reports)
            self.reported += len(reports)
            for report in reports:
                for watcher in self._watchers:
                    watcher.put(report)

    def watch(
        self, members: Collection[str] = (), is_asked: IsAsked = always, most_unread: float = math.inf
    ) -> Iterator[Report]:
        """Yield every report since the start of the run, until there are no more or the watcher is gone.

        With `members` only theirs, and those that concern all members. Raises TooMuch for a watcher that leaves
        `most_unread` reports unread.
        """
        watcher = _Watcher(most_unread)
        with self._lock:
            for report in self._reports:
                watcher.put(report)  # as bytes, which is all that a watcher that does not read occupies
            if self._ended:
                watcher.put(None)
            self._watchers.append(watcher)
        try:
            while is_asked():
                try:
                    one = watcher.get()
                except queue.Empty:
                    continue
                if one is None:
                    return
                if not members or one.member in members or one.WhichOneof("event") in _CONCERN_ALL:
                    yield one
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def end(self) -> None:
        """End all streams: no report follows."""
        with self._lock:
            self._ended = True
            for watcher in self._watchers:
                watcher.put(None)
