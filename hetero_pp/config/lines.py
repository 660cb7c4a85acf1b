"""Access lines: the connection of a machine, or of all machines of a site, to all others. Data only.

A machine has one line. All that it sends leaves by `up`, and all that it receives comes by `down`: to and from
neighbouring stages and the exchange. A *link* is a path between two members. It passes the lines of both its ends,
except between members of one site, which reach each other without a line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Bandwidth, Duration, Settings

Way = Literal["up", "down"]
WAYS: tuple[Way, Way] = ("up", "down")


class LineSettings(Settings):
    """Kind of access line. `up` and `down` override `bandwidth` in one direction."""

    bandwidth: Bandwidth | None = Field(None, gt=0, description="bandwidth in each direction; unlimited by default")
    up: Bandwidth | None = Field(
        None,
        gt=0,
        description="bandwidth for everything that the line's machines send together; by default `bandwidth`",
    )
    down: Bandwidth | None = Field(
        None, gt=0, description="bandwidth for everything that they receive; by default `bandwidth`"
    )
    latency: Duration = Field(0.0, ge=0, description="latency that the line adds to each message, in either direction")
    jitter: Duration = Field(0.0, ge=0, description="largest additional delay of a message, drawn uniformly")

    def bandwidth_of(self, way: Way) -> float | None:
        """Return the bits per second in one direction; None is unlimited."""
        own = self.up if way == "up" else self.down
        return self.bandwidth if own is None else own


class Line(LineSettings):
    """One line of a run: the settings of its kind, and the members that have it."""

    name: str  # name of its site, or of the only member that has it
    kind: str
    members: tuple[str, ...]


class SiteSettings(Settings):
    """Members that share a line, which replaces their own lines. They need no line between each other."""

    line: str = Field(description="kind of line, from `lines`")
    members: list[str] = Field(min_length=1, description="members, or replicas with all of their members")


def members_at(named: Collection[str], members: Sequence[str]) -> tuple[str, ...]:
    """Return the members of a site, which names them or their replica (`home` is all of `home.0`, `home.1`, ...)."""
    return tuple(member for member in members if member in named or member.rpartition(".")[0] in named)


Rule = tuple[object, tuple[str | int, ...], object, str]
"""Check across fields of the YAML: whether it is broken, the key at fault, what was found there, what was expected."""


def require(rules: Iterable[Rule]) -> None:
    """Raise ConfigError for the first broken rule."""
    for is_broken, key, found, expected in rules:
        if is_broken:
            raise ConfigError(key, f"found {found}, expected {expected}")


def of_kind(kind: str | None, kinds: Collection[str], key: tuple[str | int, ...], section: str = "lines") -> Rule:
    """Return the rule that a kind of line, or of link if the kinds are those of `links`, is known."""
    known = ", ".join(kinds) or "none are defined"
    return kind is not None and kind not in kinds, key, f"`{kind}`", f"one of the kinds under `{section}` ({known})"


# Links between two members: kinds of links, and one link of a run. Data only.


EXCHANGE = "exchange"
LAUNCHER = "launcher"  # name of the launcher, which starts all processes of a run
VALIDATOR = "validator."
"""Begins the name of a validator, which goes on with the name that the operator gave it. No slot has such a name."""
RELAYED = "relay"  # address of a member that cannot be dialled, and is reached through the exchange
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
        bandwidth, latency, jitter = (
            getattr(self, name) if (value := getattr(own, name)) is None else value
            for name in ("bandwidth", "latency", "jitter")
        )
        return LinkShape(bandwidth, latency or 0.0, jitter or 0.0)


@dataclass(frozen=True)
class LinkSpec:
    """One link of a run: its name, its ends, both its shapes, and the lines that it passes."""

    name: str
    source: str
    target: str
    forward: LinkShape  # bandwidth of the link itself; latency and jitter include those of the lines
    backward: LinkShape
    source_line: Line | None = None  # None if the source has no line, or the target is at the same site
    target_line: Line | None = None

    def shape(self, direction: Direction) -> LinkShape:
        return self.forward if direction == "forward" else self.backward

    def lines(self, direction: Direction) -> tuple[Line | None, Line | None]:
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
        limits += [up.bandwidth_of("up")] if up is not None else []
        limits += [down.bandwidth_of("down")] if down is not None else []
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
