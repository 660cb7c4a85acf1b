"""Links between two members: kinds of links, and one link of a run. Data only.

Every link has two directions, `forward` (from the first named to the second) and `backward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from hetero_pp.config.lines import LineSpec
from hetero_pp.config.settings import Bandwidth, Duration, Settings

EXCHANGE = "exchange"
LAUNCHER = "launcher"
"""Name of the launcher, which starts all processes of a run."""
VALIDATOR = "validator."
"""Begins the name of a validator, which goes on with the name that the operator gave it. No slot has such a name."""
RELAYED = "relay"
"""Address of a member that cannot be dialled, and is reached through the exchange."""
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class LinkShape:
    """Behaviour of one direction of a link: bits per second (None: unlimited), seconds, seconds."""

    bandwidth: float | None = None
    latency: float = 0.0
    jitter: float = 0.0

    @property
    def is_unlimited(self) -> bool:
        return self.bandwidth is None and self.latency == 0 and self.jitter == 0


class DirectionSettings(Settings):
    """Settings that may differ in one direction of a link."""

    bandwidth: Bandwidth | None = Field(None, gt=0)
    latency: Duration | None = None
    jitter: Duration | None = None


class LinkSettings(DirectionSettings):
    """Kind of link. `forward` and `backward` override single values in one direction."""

    forward: DirectionSettings = DirectionSettings()
    backward: DirectionSettings = DirectionSettings()

    def shape(self, direction: Direction) -> LinkShape:
        """Return the shape of one direction, after the overrides."""
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
    """Bandwidth of the link itself; latency and jitter include those of the lines."""
    backward: LinkShape
    source_line: LineSpec | None = None
    """None if the source has no line, or the target is at the same site."""
    target_line: LineSpec | None = None

    def shape(self, direction: Direction) -> LinkShape:
        return self.forward if direction == "forward" else self.backward

    def counted_by(self, direction: Direction) -> str:
        """Return the member that counts a direction's bytes: the sender; on links to the exchange, the member."""
        return self.source if direction == "forward" or self.target == EXCHANGE else self.target

    def lines(self, direction: Direction) -> tuple[LineSpec | None, LineSpec | None]:
        """Return the lines by which this direction leaves (`up`) and arrives (`down`)."""
        both = (self.source_line, self.target_line)
        return both if direction == "forward" else both[::-1]

    @property
    def has_lines(self) -> bool:
        return self.source_line is not None or self.target_line is not None

    def bottleneck(self, direction: Direction) -> float | None:
        """Return the bits per second of a message that has the link and both lines alone; None is unlimited."""
        up, down = self.lines(direction)
        limits = [self.shape(direction).bandwidth]
        limits += [up.up] if up is not None else []
        limits += [down.down] if down is not None else []
        return min((one for one in limits if one is not None), default=None)


def stage_link_name(replica: str, hop: int) -> str:
    return f"{replica}.{hop}-{hop + 1}"


def exchange_link_name(member: str) -> str:
    return f"{member}-{EXCHANGE}"


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")
"""Names of this machine for itself, as a browser sends them in a `Host` header."""


def is_loopback(address: str) -> bool:
    """Return whether a HOST:PORT can be reached only from its own machine."""
    return address.startswith(("127.", "localhost:", "[::1]:"))
