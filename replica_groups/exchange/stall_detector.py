"""Stall monitor: reports members that the exchange waits for, at growing intervals, and gives up after a limit.

While reads or writes of the exchange fail, these are reported instead: no member is blamed for the delay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hetero_pp.core.units import format_names, format_seconds
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, JOINING, STORING, Awaited, Missing, Waiting
from hetero_pp.rpc.exchange_service import FIRST_TOLD, MOST_BETWEEN

NAMED = 8  # number of members that a line names

_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Expected:
    """Members and progress that an exchange waits for at a moment."""

    awaited: Awaited
    round: int
    missing: Sequence[str]  # members that are waited for; empty if the exchange waits for nobody
    progress: Hashable  # a value that changes with every progress
    heard: Mapping[str, float] = field(default_factory=dict)
    """Member -> time of its last sign of life, by the monotonic clock."""
    is_bounded: bool = True
    """Whether to give up at the limit. A run that has begun continues without the member, or pauses."""
    computing: Collection[str] = ()
    """Members that are busy and wait for no other member, by their last heartbeat: a slow step is no stall."""
    store_error: tuple[str, float] | None = None
    """File that cannot be read or written and why, and for how many seconds; no member is blamed meanwhile."""


class StallDetector:
    """Decides when to report that there is no progress, and when to give up. Pure: every time is an argument.

    A wait that ended was harmless, so afterwards only one that is twice as long is reported. A run of slow rounds
    therefore reports a few lines in all, and not in every round.
    """

    def __init__(self, limit: float) -> None:
        """`limit`: seconds without progress of any awaited member."""
        self._limit = limit
        self._expected: Expected | None = None
        self._since = 0.0
        self._due = FIRST_TOLD
        self._longest = 0.0
        self._told = False
        self._blocked: float | None = None
        """Seconds for which the present store error has existed; None if there is none."""
        self._blocked_due = 0.0
        self._blocked_told = False
        self._short = 0.0  # seconds below which a store error is not reported, because a longer one was reported before

    def look(self, expected: Expected, now: float) -> Waiting | None:
        """Return the report that is due, if any. It names no member and no store error once a reported wait is over."""
        if expected.store_error is not None:
            return self._stored(expected, *expected.store_error)
        if self._blocked is not None:
            # The store works again: the wait for members restarts, and the end of a reported failure is reported.
            seconds, self._blocked, self._expected = self._blocked, None, None
            if not self._blocked_told:
                return None
            self._short = min(max(FIRST_TOLD, 2 * self._short), MOST_BETWEEN)
            return Waiting(awaited=STORING, round=expected.round, seconds=seconds or 0.0)
        before, self._expected = self._expected, expected
        if before is None or (expected.awaited, expected.progress) != (before.awaited, before.progress):
            is_other = before is None or before.awaited != expected.awaited
            self._longest = 0.0 if is_other else max(self._longest, now - self._since)
            self._since, self._due = now, min(max(FIRST_TOLD, 2 * self._longest), MOST_BETWEEN)
            was_told, self._told = self._told, False
            return Waiting(awaited=expected.awaited, round=expected.round) if was_told else None
        if not expected.missing or now - self._since < self._due:
            return None
        self._due = min(2 * self._due, self._due + MOST_BETWEEN)
        self._told = True
        return self._waiting(expected, now)

    def _stored(self, expected: Expected, why: str, seconds: float) -> Waiting | None:
        """Return the report that a file cannot be read or written: at once, then at growing intervals."""
        if self._blocked is None:
            self._blocked_due, self._blocked_told = self._short, False
        elif seconds < self._blocked:  # the file that failed first is written now, and another one is not
            self._blocked_due = self._short
        self._blocked = seconds
        if seconds < self._blocked_due:
            return None
        self._blocked_due = seconds + min(max(FIRST_TOLD, self._blocked_due), MOST_BETWEEN)
        self._blocked_told = True
        return Waiting(awaited=STORING, round=expected.round, seconds=seconds, store_error=why)

    def lost(self, expected: Expected, now: float) -> str | None:
        """Return the cause to give up, if no awaited member made progress within the limit."""
        if (
            not expected.missing
            or not expected.is_bounded
            or expected.store_error is not None
            or self._expected is None
        ):
            return None
        last = max([self._since, *(expected.heard[one] for one in expected.missing if one in expected.heard)])
        if now - last < self._limit:
            return None
        waiting = self._waiting(expected, now)
        return f"gave up {whom(waiting)}: received nothing for {format_seconds(self._limit)} (`exchange.timeout`)"

    def _waiting(self, expected: Expected, now: float) -> Waiting:
        waiting = Waiting(awaited=expected.awaited, round=expected.round, seconds=now - self._since)
        for member in expected.missing:
            missing = waiting.missing.add(member=member, computes=member in expected.computing)
            if member in expected.heard:
                missing.silent_seconds = now - expected.heard[member]
        return waiting


def whom(waiting: Waiting) -> str:
    """Return `waiting for 2 members to join: home.0, home.1`, for a line or the cause of a run that gave up.

    While a file cannot be written or read: `paused: FILE: cannot be written (...)`.
    """
    names = listed([_named(one) for one in waiting.missing])
    if waiting.awaited == JOINING:
        count = len(waiting.missing)
        return f"waiting for {count} member{'' if count == 1 else 's'} to join: {names}"
    if waiting.awaited == STORING:
        return f"paused: {waiting.store_error}"
    if waiting.awaited == CONTRIBUTING:
        return f"waiting for contributions to round {waiting.round} from {names}"
    return f"all rounds are closed; waiting for {names} to finish"


def listed(names: Sequence[str]) -> str:
    """List the first names, and say how many more there are."""
    return format_names(names, NAMED)


def _named(missing: Missing) -> str:
    if not missing.HasField("silent_seconds"):
        return missing.member
    return f"{missing.member} (last heartbeat {format_seconds(max(1, round(missing.silent_seconds)))} ago)"


@contextmanager
def watched(
    expected: Callable[[], Expected], tell: Callable[[Waiting], None], fail: Callable[[str], None], limit: float
) -> Iterator[None]:
    """Check once a second while the block runs: `tell` receives reports, `fail` the cause to give up.

    A block that ends without an error is checked once more, so that the end of a reported store error is reported too.
    """
    ended, detector = threading.Event(), StallDetector(limit)

    def watch() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            now, found = time.monotonic(), expected()
            waiting = detector.look(found, now)
            if waiting is not None:
                tell(waiting)
            cause = detector.lost(found, now)
            if cause is not None:
                fail(cause)
                return

    thread = threading.Thread(target=watch, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    waiting = detector.look(expected(), time.monotonic())
    if waiting is not None and not waiting.missing and not waiting.store_error:
        tell(waiting)
