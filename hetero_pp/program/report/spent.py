"""Seconds that a member spent in its rounds, by part, each round counted once."""

from __future__ import annotations

from collections import Counter

from hetero_pp.config.links import EXCHANGE, Direction, LinkSpec
from hetero_pp.messages.messages_pb2 import MemberRound
from hetero_pp.program.report.replica_state import STILL_TOLD

PARTS = ("compute", "wait", "outer", "blocked", "evaluation")
"""Parts of a round. `blocked` is waiting for the exchange, and `outer` is the rest of the outer round."""
NEIGHBOURS = ("previous", "next")
"""Parts of `wait`: for messages of the previous stage, and of the next one."""


class Spent:
    """Seconds of one member. A round that is reported again replaces its earlier report."""

    def __init__(self) -> None:
        self.last_round = 0
        """Last finished round; 0 if there is none."""
        self.rounds = 0
        """Number of finished rounds."""
        self._recent: dict[int, dict[str, float]] = {}
        self._settled: Counter[str] = Counter()

    def apply(self, told: MemberRound) -> None:
        """Take in a finished round. Rounds that are long over are ignored, because they get no further report."""
        if told.round <= self.last_round - STILL_TOLD:
            return
        self.last_round = max(self.last_round, told.round)
        self.rounds += told.round not in self._recent
        self._recent[told.round] = split(told) | _by_neighbour(told)
        for round_ in [one for one in self._recent if one <= self.last_round - STILL_TOLD]:
            self._settled.update(self._recent.pop(round_))

    def seconds(self, part: str) -> float:
        """Return the seconds of one of PARTS or NEIGHBOURS over all rounds. An older version tells no neighbour."""
        return self._settled[part] + sum(one.get(part, 0.0) for one in self._recent.values())

    def share(self, part: str) -> float | None:
        """Return the share of one of PARTS or NEIGHBOURS in the last finished round; None if it is not known."""
        last = self._recent.get(self.last_round, {})
        whole = sum(last.get(one, 0.0) for one in PARTS)
        return last[part] / whole if part in last and whole > 0 else None


def awaiting(link: LinkSpec, way: Direction) -> tuple[str, str]:
    """Return the receiver of a direction of a link, and the part of its rounds in which it waits for messages of it.

    The part contains the time in which the sender computes: a receiver cannot tell a late sender from a late link.
    """
    sender, receiver = (link.source, link.target) if way == "forward" else (link.target, link.source)
    return receiver, "blocked" if sender == EXCHANGE else "previous" if way == "forward" else "next"


def split(told: MemberRound) -> dict[str, float]:
    """Return the seconds of a round by part."""
    blocked = min(told.blocked_seconds, told.outer_seconds)
    outer = told.outer_seconds - blocked
    parts = (told.compute_seconds, told.wait_seconds, outer, blocked, told.evaluation_seconds)
    return dict(zip(PARTS, parts, strict=True))


def _by_neighbour(told: MemberRound) -> dict[str, float]:
    fields = {part: f"wait_{part}_seconds" for part in NEIGHBOURS}
    return {part: getattr(told, name) for part, name in fields.items() if told.HasField(name)}
