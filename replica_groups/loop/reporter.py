"""Sends a member's reports to the exchange in the background, so that training never waits for them."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time

from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.exchange_service import ExchangeService


class Reporter:
    """Sends reports in batches, at least every `interval` seconds."""

    def __init__(self, exchange: ExchangeService, member: str, interval: float = 0.25) -> None:
        self.member = member
        self._exchange = exchange
        self._interval = interval
        self._was_refused = False
        self._queue: queue.SimpleQueue[Report | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"reporter {member}", daemon=True)
        self._thread.start()

    def new(self) -> Report:
        """Return an empty report of this member with the present time, to be filled in and sent."""
        return Report(time=time.time(), member=self.member)

    def tell_device(self, name: str) -> None:
        """Report on which device the member computes."""
        report = self.new()
        report.computes.device = name
        self.send(report)

    def send(self, report: Report) -> None:
        """Queue a report."""
        self._queue.put(report)

    def flush(self, seconds: float = math.inf) -> None:
        """Wait until the exchange has all reports sent so far or is gone, for at most `seconds`."""
        sent, until = threading.Event(), time.monotonic() + seconds
        self._queue.put(sent)
        while not sent.wait(0.1) and self._thread.is_alive() and time.monotonic() < until:
            pass

    def close(self) -> None:
        """Send the queued reports, and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            batch = [self._queue.get()]
            deadline = time.monotonic() + self._interval
            while isinstance(batch[-1], Report) and (left := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self._queue.get(timeout=left))
                except queue.Empty:
                    break
            reports = [one for one in batch if isinstance(one, Report)]
            if reports and not self._deliver(reports):
                return
            if isinstance(batch[-1], threading.Event):
                batch[-1].set()
            over = batch[-1] is None

    def _deliver(self, reports: list[Report]) -> bool:
        for report in reports:
            report.sent = time.time()
        try:
            self._exchange.report(reports)
        except Refused as error:  # one report was out of range; other ones may be accepted
            if not self._was_refused:
                print(f"{self.member}: the exchange refused a report: {error}", file=sys.stderr, flush=True)
            self._was_refused = True
        except HeteroPPError:
            return False  # the exchange is gone; calls that wait for it say so
        return True
