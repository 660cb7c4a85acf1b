"""When a run was not under way: from the last that was told of one start of it to where the next one trains again."""

from __future__ import annotations

import math

from hetero_pp.messages.messages_pb2 import Report

_WORK = ("inner_step", "evaluation", "link_use", "member_round", "round_closed", "round_verified")
"""Events that only a run under way tells."""


class Pauses:
    """Follows a run's reports, in the order of their times; times are seconds since the epoch."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._last_work: float | None = None
        self._goes_on_after: int | None = None
        """The round, as long as nobody trains after it."""

    def apply(self, report: Report) -> None:
        """Take in one report."""
        event = report.WhichOneof("event")
        if event == "begun" and report.begun.last_round > 0:
            if self._goes_on_after is None:
                self._found.append((report.time if self._last_work is None else self._last_work, report.time))
            self._goes_on_after = report.begun.last_round
        if self._goes_on_after is not None:
            start, end = self._found[-1]
            self._found[-1] = start, max(end, report.time)
            if _trains_after(self._goes_on_after, report):
                self._goes_on_after = None
        if event in _WORK:
            self._last_work = report.time if self._last_work is None else max(self._last_work, report.time)

    def between(self, start: float, end: float) -> float:
        """Seconds from `start` to `end` in which the run paused; a pause that is not over lasts."""
        total = 0.0
        for index, (began, ended) in enumerate(self._found):
            is_open = self._goes_on_after is not None and index == len(self._found) - 1
            total += max(0.0, min(end, math.inf if is_open else ended) - max(start, began))
        return total


def _trains_after(round_: int, report: Report) -> bool:
    """Whether a report says so: a replica has evaluated what it goes on from, or has never stopped."""
    match report.WhichOneof("event"):
        case "evaluation":
            return report.evaluation.round >= round_
        case "inner_step":
            return report.inner_step.round > round_
    return False
