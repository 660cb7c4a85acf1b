"""What joins two members: kinds of links, and one link of a run. Data only.

Every link has two directions, `forward` (from the first named to the second) and `backward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hetero_pp.lines import LineSpec
from hetero_pp.settings import Bandwidth, Duration, Settings

EXCHANGE = "exchange"
LAUNCHER = "launcher"
"""Who has started all processes of a run."""
RELAYED = "relay"
"""The address of a member that nobody can dial: through the exchange."""
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class LinkShape:
    """How one direction of a link behaves: bits per second (None: unlimited), seconds, seconds."""

    bandwidth: float | None = None
    latency: float = 0.0
    jitter: float = 0.0

    @property
    def is_unlimited(self) -> bool:
        return self.bandwidth is None and self.latency == 0 and self.jitter == 0


class DirectionSettings(Settings):
    """What differs in one direction of a link."""

    bandwidth: Bandwidth | None = Field(None, gt=0)
    latency: Duration | None = None
    jitter: Duration | None = None


class LinkSettings(DirectionSettings):
    """A kind of link. `forward` and `backward` override single values in one direction."""

    forward: DirectionSettings = DirectionSettings()
    backward: DirectionSettings = DirectionSettings()

    def shape(self, direction: Direction) -> LinkShape:
        """The shape of one direction, after the overrides."""
        own = self.forward if direction == "forward" else self.backward

        def pick(name: str, otherwise: float | None) -> Any:
            value = getattr(own, name)
            value = getattr(self, name) if value is None else value
            return otherwise if value is None else value

        return LinkShape(pick("bandwidth", None), pick("latency", 0.0), pick("jitter", 0.0))


@dataclass(frozen=True)
class LinkSpec:
    """One link of a run: its name, its ends, both its shapes, and the lines that it passes."""

    name: str
    source: str
    target: str
    forward: LinkShape
    """The bandwidth of the link itself; latency and jitter with those of the lines."""
    backward: LinkShape
    source_line: LineSpec | None = None
    """None if the source has none, or the target is at the same site."""
    target_line: LineSpec | None = None

    def shape(self, direction: Direction) -> LinkShape:
        return self.forward if direction == "forward" else self.backward

    def counted_by(self, direction: Direction) -> str:
        """The member that counts what goes in a direction: who sends it, and of the exchange's links both."""
        return self.source if direction == "forward" or self.target == EXCHANGE else self.target

    def lines(self, direction: Direction) -> tuple[LineSpec | None, LineSpec | None]:
        """The line by which this direction leaves (`up`) and that by which it comes (`down`)."""
        both = (self.source_line, self.target_line)
        return both if direction == "forward" else both[::-1]

    @property
    def has_lines(self) -> bool:
        return self.source_line is not None or self.target_line is not None

    def bottleneck(self, direction: Direction) -> float | None:
        """Bits per second that a message gets if it has the link and both lines alone; None: unlimited."""
        up, down = self.lines(direction)
        limits = [self.shape(direction).bandwidth]
        limits += [up.up] if up is not None else []
        limits += [down.down] if down is not None else []
        return min((one for one in limits if one is not None), default=None)


def stage_link_name(replica: str, hop: int) -> str:
    """The link between stages `hop` and `hop + 1` of a group."""
    return f"{replica}.{hop}-{hop + 1}"


def exchange_link_name(member: str) -> str:
    return f"{member}-{EXCHANGE}"


def is_loopback(address: str) -> bool:
    """Whether nobody but its own machine reaches who listens at a HOST:PORT."""
    return address.startswith(("127.", "localhost:", "[::1]:"))
