"""Bytes that links and lines have carried, from the reports of the sending members."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_pp.config.lines import EXCHANGE, WAYS, Direction, LineSpec, LinkSpec, Way
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import LinkUse

STILL_TOLD = 8  # rounds after which a round is no longer reported on
RECENT_SECONDS = 5.0  # length of the window over which current rates are measured, in seconds


@dataclass
class DirectionState:
    """Traffic of one direction of a link."""

    bandwidth: float | None
    unreported_bytes: int = 0  # bytes on the wire of which no report is known, only the sum
    rounds: dict[int, LinkUse] = field(default_factory=dict)
    """Latest count of every round that may still be reported; round 0 is the traffic before the first inner step."""
    _payload: array[int] = field(default_factory=lambda: array("Q"))  # bytes of every earlier round, from round 1 on
    _wire: array[int] = field(default_factory=lambda: array("Q"))
    _sums: LinkUse = field(default_factory=LinkUse)  # of these rounds
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def apply(self, time: float, use: LinkUse, since: float) -> None:
        """Replace the count of a round, reported at `time`. The first count of all has grown since `since`."""
        if not self._recent:
            self._recent.append((since, 0))
        if not 0 < use.round <= len(self._wire):
            self.rounds[use.round] = use
        self._recent.append((time, self._sums.wire_bytes + sum([count.wire_bytes for count in self.rounds.values()])))
        while len(self._recent) > 2 and self._recent[1][0] <= time - RECENT_SECONDS:
            self._recent.popleft()

    def settle(self, closed: int) -> None:
        """Keep only the bytes of rounds long before the round that closed, because they get no further report."""
        for round_ in range(len(self._wire) + 1, closed - STILL_TOLD + 1):
            use = self.rounds.pop(round_, LinkUse())
            self._payload.append(use.payload_bytes)
            self._wire.append(use.wire_bytes)
            self._sums.payload_bytes += use.payload_bytes
            self._sums.wire_bytes += use.wire_bytes
            self._sums.busy_seconds += use.busy_seconds

    def payload_bytes_of_round(self, round_: int) -> int:
        """Return the payload bytes of a round; 0 if none were reported."""
        if round_ in self.rounds:
            return self.rounds[round_].payload_bytes
        return self._payload[round_ - 1] if 0 < round_ <= len(self._payload) else 0

    def wire_bytes_of_round(self, round_: int) -> int:
        """Return the bytes on the wire of a round; 0 if none were reported."""
        if round_ in self.rounds:
            return self.rounds[round_].wire_bytes
        return self._wire[round_ - 1] if 0 < round_ <= len(self._wire) else 0

    @property
    def payload_bytes(self) -> int:
        return self._sums.payload_bytes + sum(use.payload_bytes for use in self.rounds.values())

    @property
    def wire_bytes(self) -> int:
        return self.unreported_bytes + (self._recent[-1][1] if self._recent else 0)

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the direction was busy since the first inner step."""
        return self._sums.busy_seconds + sum(use.busy_seconds for round_, use in self.rounds.items() if round_ > 0)

    def busy_share(self, training_seconds: float) -> float | None:
        """Return the busy share of the time since the first inner step; None without a bandwidth limit."""
        return None if self.bandwidth is None else _share(self.busy_seconds, training_seconds)

    def recent_bytes_per_second(self, now: float) -> float:
        """Return the bytes per second on the wire over about the last RECENT_SECONDS."""
        if not self._recent:
            return 0.0
        time, count = self._recent[0]
        for sample in self._recent:  # in order of time; mostly one step
            if sample[0] > now - RECENT_SECONDS:
                break
            time, count = sample
        return (self._recent[-1][1] - count) / (now - time) if now > time else 0.0


@dataclass
class LinkState:
    """Traffic of both directions of one link."""

    spec: LinkSpec
    directions: dict[Direction, DirectionState]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def reaches_exchange(self) -> bool:
        return self.spec.target == EXCHANGE

    @property
    def wire_bytes(self) -> int:
        return sum(direction.wire_bytes for direction in self.directions.values())


@dataclass
class LineState:
    """Traffic of one line, up and down: the sum over all links that pass it."""

    spec: LineSpec
    carried: Mapping[Way, Sequence[DirectionState]]

    @property
    def name(self) -> str:
        return self.spec.name

    def wire_bytes(self, way: Way) -> int:
        return sum(direction.wire_bytes for direction in self.carried[way])

    def wire_bytes_of_round(self, way: Way, round_: int) -> int:
        return sum(direction.wire_bytes_of_round(round_) for direction in self.carried[way])

    def payload_bytes(self, way: Way) -> int:
        return sum(direction.payload_bytes for direction in self.carried[way])

    def busy_share(self, way: Way, training_seconds: float) -> float | None:
        """Return the busy share of the time since the first inner step; None without a bandwidth limit."""
        busy = self.busy_seconds(way)
        return None if busy is None else _share(busy, training_seconds)

    def busy_seconds(self, way: Way) -> float | None:
        """Return the seconds that the bytes since the first inner step take; None without a bandwidth limit."""
        rate = self.spec.bandwidth(way)
        carried = self.wire_bytes(way) - self.wire_bytes_of_round(way, 0)
        return None if rate is None else 8 * carried / rate

    def recent_bytes_per_second(self, way: Way, now: float) -> float:
        """Return the bytes per second on the wire over about the last RECENT_SECONDS."""
        return sum(direction.recent_bytes_per_second(now) for direction in self.carried[way])


def _share(busy: float, seconds: float) -> float:
    return min(1.0, busy / seconds) if seconds > 0 else 0.0


def lines_of(spec: RunSpec, links: Mapping[str, LinkState]) -> dict[str, LineState]:
    """Return the state of each line, with the link directions that pass it up and down."""
    carried: dict[str, dict[Way, list[DirectionState]]] = {name: {"up": [], "down": []} for name in spec.lines}
    for link in links.values():
        for direction, state in link.directions.items():
            for way, line in zip(WAYS, link.spec.lines(direction), strict=True):
                if line is not None:
                    carried[line.name][way].append(state)
    return {name: LineState(line, carried[name]) for name, line in spec.lines.items()}
