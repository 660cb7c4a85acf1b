"""Seconds that a member spent in its rounds, by part, each round counted once."""

from __future__ import annotations

from collections import Counter

from hetero_pp.messages.messages_pb2 import MemberRound
from hetero_pp.program.report.replica_state import STILL_TOLD

PARTS = ("compute", "wait", "outer", "blocked", "evaluation")
"""Parts of a round. `blocked` is waiting for the exchange, and `outer` is the rest of the outer round."""


class Spent:
    """Seconds of one member. A round that is reported again replaces its earlier report."""

    def __init__(self) -> None:
        self.last_round = 0
        """Last finished round; 0 if there is none."""
        self._recent: dict[int, dict[str, float]] = {}
        self._settled: Counter[str] = Counter()

    def apply(self, told: MemberRound) -> None:
        """Take in a finished round. Rounds that are long over are ignored, because they get no further report."""
        if told.round <= self.last_round - STILL_TOLD:
            return
        self.last_round = max(self.last_round, told.round)
        self._recent[told.round] = split(told)
        for round_ in [one for one in self._recent if one <= self.last_round - STILL_TOLD]:
            self._settled.update(self._recent.pop(round_))

    def seconds(self, part: str) -> float:
        """Return the seconds of one of PARTS over all rounds."""
        return self._settled[part] + sum(one[part] for one in self._recent.values())


def split(told: MemberRound) -> dict[str, float]:
    """Return the seconds of a round by part."""
    blocked = min(told.blocked_seconds, told.outer_seconds)
    outer = told.outer_seconds - blocked
    parts = (told.compute_seconds, told.wait_seconds, outer, blocked, told.evaluation_seconds)
    return dict(zip(PARTS, parts, strict=True))
