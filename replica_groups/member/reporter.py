"""Sends a member's reports to the exchange in the background, so that training never waits for them."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.messages.messages_pb2 import Activity, Doing, LinkUse, Report, StateSaving
from hetero_pp.rpc.exchange_service import ExchangeService
from replica_groups.member.session import LedgerOf

SECONDS_BETWEEN_SAMPLES = 0.5
SECONDS_BETWEEN_LINK_REPORTS = 0.5

_SECONDS_BETWEEN_LOOKS = 0.5

SECONDS_TO_REPORT = 2.0  # time that a member that was asked to stop waits for the delivery of its reports


class Reporter:
    """Sends reports in batches, at least every `interval` seconds."""

    def __init__(self, exchange: ExchangeService, member: str, interval: float = 0.25) -> None:
        self.member = member
        self._exchange = exchange
        self._interval = interval
        self._was_refused = False
        self.unsaved = 0  # number of consecutive states that could not be saved
        self._doing: Callable[[], Doing] | None = None
        self._told = Doing.DOING_UNSPECIFIED
        self._sampled = self._reported_links = -math.inf
        self._queue: queue.SimpleQueue[Report | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"reporter {member}", daemon=True)
        self._thread.start()

    def tell(self, **event: Any) -> None:
        """Report an event, given by its field of Report. It may be changed afterwards."""
        self._queue.put(Report(time=time.time(), member=self.member, **event))

    def say(self, line: str) -> None:
        print(f"{self.member}: {line}", file=sys.stderr, flush=True)

    def links(self, ledgers: Iterable[LedgerOf], round_: int, every: float = 0.0) -> None:
        """Report the use of links in a round, unless they were reported less than `every` seconds ago."""
        if time.monotonic() < self._reported_links + every:
            return
        self._reported_links = time.monotonic()
        for link, direction, ledger in ledgers:
            count = asdict(ledger.of_round(round_))
            self.tell(link_use=LinkUse(link=link, direction=direction, round=round_, **count))

    def saved(self, round_: int, failure: str, is_first: bool) -> None:
        """Report the 1st, 2nd, 4th, 8th, ... consecutive state that could not be saved, and the next one that was.

        `is_first`: whether this is the first rank, which speaks for all.
        """
        had_failed, self.unsaved = self.unsaved, self.unsaved + 1 if failure else 0
        is_told = had_failed > 0
        if failure:
            is_told = self.unsaved & (self.unsaved - 1) == 0
            self.say(f"its state after round {round_} was not saved: {failure}")
        if is_told and is_first:
            self.tell(state_saving=StateSaving(round=round_, failure=failure))

    def does(self, doing: Doing | Callable[[], Doing]) -> None:
        """Note what the member does from now on. It is sampled, so that no step waits and none is reported alone."""
        self._doing = doing if callable(doing) else lambda: doing

    def flush(self, is_asked: Callable[[], bool] = lambda: False) -> None:
        """Wait until the exchange has all reports sent so far.

        If the exchange is gone, wait until it is back. Once `is_asked` returns True, because the member was asked to
        stop, wait for SECONDS_TO_REPORT at most.
        """
        sent, until = threading.Event(), math.inf
        self._queue.put(sent)
        while not sent.wait(0.1) and self._thread.is_alive() and time.monotonic() < until:
            if is_asked():
                until = min(until, time.monotonic() + SECONDS_TO_REPORT)

    def close(self) -> None:
        """Send the queued reports, and stop."""
        self._queue.put(None)
        while self._thread.is_alive():  # a wait without a limit may sleep through a signal that arrives as it begins
            self._thread.join(_SECONDS_BETWEEN_LOOKS)

    def _run(self) -> None:
        over = False
        while not over:
            batch: list[Report | threading.Event | None] = []
            while not batch:  # wait for something to send, and sample meanwhile what the member does
                try:
                    batch.append(self._queue.get(timeout=SECONDS_BETWEEN_SAMPLES))
                except queue.Empty:
                    batch += self._sample()
            deadline = time.monotonic() + self._interval
            while isinstance(batch[-1], Report) and (left := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self._queue.get(timeout=left))
                except queue.Empty:
                    break
            reports = [one for one in batch if isinstance(one, Report)]
            # After the reports before it, because the exchange orders a member's reports by arrival.
            reports += self._sample() if reports else []
            for report in reports:
                report.sent = time.time()
            try:
                if reports:
                    self._exchange.report(reports)
            except Refused as error:  # one report was out of range; other ones may be accepted
                if not self._was_refused:
                    self.say(f"the exchange refused a report: {error}")
                self._was_refused = True
            except HeteroPPError:
                return  # the exchange is gone; calls that wait for it say so
            if isinstance(batch[-1], threading.Event):
                batch[-1].set()
            over = batch[-1] is None

    def _sample(self) -> list[Report]:
        """Return a report of what the member does now; none if that is not new, or was asked a moment ago."""
        now = time.monotonic()
        if self._doing is None or now < self._sampled + SECONDS_BETWEEN_SAMPLES:
            return []
        self._sampled, found = now, self._doing()
        if found == self._told:
            return []
        self._told = found
        return [Report(time=time.time(), member=self.member, activity=Activity(doing=found))]
