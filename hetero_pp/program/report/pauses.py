"""Pauses of a run: from the last report of one start until the next start trains again."""

from __future__ import annotations

import math

from hetero_pp.messages.messages_pb2 import Report

_WORK = ("inner_step", "evaluation", "link_use", "member_round", "round_closed", "round_verified")
"""Events that only a training run reports."""


class Pauses:
    """Follows a run's reports in the order of their times, in seconds since the epoch."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._last_work: float | None = None
        self._goes_on_after: int | None = None
        """Round after which the run resumed, until a replica trains again; else None."""

    def apply(self, report: Report) -> None:
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

    def __len__(self) -> int:
        return len(self._found)

    def between(self, start: float, end: float) -> float:
        """Return the seconds from `start` to `end` in which the run paused.

        A pause without an end lasts until `end`.
        """
        total = 0.0
        for index, (began, ended) in enumerate(self._found):
            is_open = self._goes_on_after is not None and index == len(self._found) - 1
            total += max(0.0, min(end, math.inf if is_open else ended) - max(start, began))
        return total


def _trains_after(round_: int, report: Report) -> bool:
    """Return whether a report shows that a replica trains after a round.

    Either the replica has evaluated the parameters that it resumes from, or it never stopped.
    """
    match report.WhichOneof("event"):
        case "evaluation":
            return report.evaluation.round >= round_
        case "inner_step":
            return report.inner_step.round > round_
    return False
