"""Parts of a followed run beyond its state: members, times of rounds, curves. Old rounds are kept as means."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from hetero_pp.messages.messages_pb2 import Doing, MemberRound
from hetero_pp.program.report.replica_state import STILL_TOLD
from hetero_pp.program.report.spent import PARTS, split

MOST_POINTS = 1000
"""Points of a curve, after thinning."""


@dataclass
class MemberDetails:
    """One member, from its own reports and those about it. Times are seconds since the epoch."""

    device: str | None = None
    round: int | None = None
    heard: float | None = None
    doing: Doing = Doing.DOING_UNSPECIFIED
    """Its last reported activity."""
    since: float | None = None
    """Time of the last event that changed whether it takes part."""
    is_suspended: bool = False


class Curve:
    """Loss over the steps of one replica: at most twice MOST_POINTS points [time, step, loss]."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self._every = 1
        self._unsent = 0
        """Number of the first step that `take_new` has not returned."""

    def add(self, time: float, step: int, loss: float) -> None:
        """Add a point. A step that is trained again replaces its point and those after it."""
        while self.points and self.points[-1][1] >= step:
            self.points.pop()
            self._unsent = min(self._unsent, step)
        if step % self._every == 0:
            self.points.append([time, step, loss])
        if len(self.points) >= 2 * MOST_POINTS:
            self._every *= 2
            self.points = [point for point in self.points if point[1] % self._every == 0]

    def take_new(self) -> list[list[float]]:
        """Return the points since the last call."""
        found = self.points[bisect_left([point[1] for point in self.points], self._unsent) :]
        if found:
            self._unsent = int(found[-1][1]) + 1
        return found


@dataclass
class RoundTimes:
    """Seconds of each round by replica: of each member while a round is reported on, then their means."""

    recent: defaultdict[int, defaultdict[str, dict[str, list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    settled: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, replica: str, member: str, told: MemberRound) -> None:
        """Take in a member's times of a round. A repeated report replaces the earlier one."""
        if told.round not in self.settled:
            self.recent[told.round][replica][member] = list(split(told).values())

    def settle(self, closed: int) -> None:
        """Keep only the means of rounds long before the one that closed."""
        for round_ in [one for one in self.recent if one <= closed - STILL_TOLD]:
            self.settled[round_] = {replica: _means(found) for replica, found in self.recent.pop(round_).items()}

    def of(self, round_: int, replica: str) -> dict[str, float | None]:
        """Return the mean over a replica's members of the seconds of each part; None if none was reported."""
        if round_ in self.settled:
            means = self.settled[round_].get(replica)
        else:
            members = self.recent[round_].get(replica) if round_ in self.recent else None
            means = _means(members) if members else None
        return dict.fromkeys(PARTS) if means is None else dict(zip(PARTS, means, strict=True))


def _means(members: dict[str, list[float]]) -> list[float]:
    return [fmean(times) for times in zip(*members.values(), strict=True)]
