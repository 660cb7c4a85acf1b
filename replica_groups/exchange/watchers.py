"""What was told of a run, for whoever watches it: now, and from its start on."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from hetero_pp.errors import TooMuch
from hetero_pp.messages.messages_pb2 import Report
from replica_groups.exchange.decisions import always

REMEMBERED_REPORTS = 10_000
"""How far back a watcher that comes late can see."""

SECONDS_BETWEEN_LOOKS = 0.5
"""Whether who watches is still there."""

_CONCERN_ALL = ("joined", "waiting", "begun", "reading", "failure", "standing", "over")


class _Watcher:
    """Reports on their way to one who watches: at most so many, of who reads too slowly none."""

    def __init__(self, most: float) -> None:
        self.is_cut = False
        self._most = most
        self._reports: queue.SimpleQueue[Report | bytes | None] = queue.SimpleQueue()

    def put(self, report: Report | bytes | None) -> None:
        """None: there will be no more."""
        if self._reports.qsize() >= self._most:
            self.is_cut = True
        if not self.is_cut:
            self._reports.put(report)

    def get(self) -> Report | None:
        """Raises queue.Empty after a while, TooMuch for who is cut."""
        if self.is_cut:
            raise TooMuch(f"found {self._most} unread reports, expected fewer")
        found = self._reports.get(timeout=SECONDS_BETWEEN_LOOKS)
        return Report.FromString(found) if isinstance(found, bytes) else found


class Watchers:
    """Hands every report to everybody who watches. Safe to use from many threads."""

    def __init__(self) -> None:
        self.reported = 0
        """How many reports there were."""
        self._lock = threading.Lock()
        self._watchers: list[_Watcher] = []
        self._reports: deque[bytes] = deque(maxlen=REMEMBERED_REPORTS)  # as messages they would take five times as much
        self._ended = False

    @property
    def watching(self) -> int:
        """How many watch."""
        return len(self._watchers)

    def tell(self, reports: Sequence[Report]) -> None:
        """To all of them, in this order."""
        with self._lock:
            self._reports.extend(report.SerializeToString() for report in reports)
            self.reported += len(reports)
            for report in reports:
                for watcher in self._watchers:
                    watcher.put(report)

    def watch(
        self, members: Collection[str] = (), is_asked: Callable[[], bool] = always, most_unread: float = math.inf
    ) -> Iterator[Report]:
        """Every report from the start of the run on, until there are no more, or nobody asks for them.

        Of some members only what they tell, and what concerns everybody: who joins, waits, is gone; failures.
        Raises TooMuch for who has not read so many.
        """
        watcher = _Watcher(most_unread)
        with self._lock:
            for report in self._reports:
                watcher.put(report)  # as it is kept: of who does not read, nothing else is
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
        """No report will come any more."""
        with self._lock:
            self._ended = True
            for watcher in self._watchers:
                watcher.put(None)
