"""What a run is made of: replicas, their stages, and the links between them. Data only.

A *member* is one process of the run: `exchange`, a datacenter replica (`dc`), or one stage of a participant
group (`home.0`). A *link* joins two members: neighbouring stages (`home.0-1`), or a member and the exchange
(`home.0-exchange`). Every link has two directions, `forward` (from the first named to the second) and `backward`.
What all links of a machine share is its *line* (hetero_pp.lines).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hetero_pp.ablations import AblationSettings
from hetero_pp.engine_settings import DEEPSPEED_OWNED, EngineName, TorchtitanSettings
from hetero_pp.errors import ConfigError
from hetero_pp.lines import LineSettings, LineSpec, SiteSettings, check_kind, check_sites
from hetero_pp.settings import Bandwidth, Duration, NotPartOf, Settings
from hetero_pp.units import parse_fraction

EXCHANGE = "exchange"
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


def _parse_rank(value: Any) -> Any:
    """`full`, a number of dimensions (8), or a ratio of the model's width (`1/8`)."""
    if value == "full" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    ratio = parse_fraction(value)
    if ratio >= 1 and ratio == int(ratio):
        return int(ratio)
    if not 0 < ratio < 1:
        raise ValueError(f"found `{value}`, expected `full`, a whole number such as `8`, or a ratio such as `1/8`")
    return ratio


Rank = Annotated[
    Literal["full"] | int | float,
    BeforeValidator(_parse_rank),
    WithJsonSchema({"type": ["integer", "number", "string"], "examples": ["full", 8, "1/8"]}),
]


def _parse_address(value: Any) -> Any:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"found `{value}`, expected HOST:PORT such as `127.0.0.1:47500`")
    return value


Address = Annotated[str, BeforeValidator(_parse_address)]


class BoundarySettings(Settings):
    """What crosses between neighbouring stages (k in the paper is `rank`)."""

    rank: Rank = "full"
    dtype: Literal["fp32", "bf16"] = "bf16"
    ablations: AblationSettings = AblationSettings()
    bits: int | None = Field(None, ge=2, le=8, description="send each number in so few bits, instead of `dtype`")

    def dimensions(self, width: int) -> int | None:
        """k for a model of this width d; None if the boundary is not compressed."""
        if self.rank == "full":
            return None
        if isinstance(self.rank, float):
            return max(1, round(self.rank * width))
        return self.rank


class StageSettings(Settings):
    """One stage of a participant group, on one machine."""

    layers: int = Field(ge=1, description="how many consecutive layers this stage owns")
    listen: Annotated[Address | None, NotPartOf.EITHER] = Field(
        None, description="HOST:PORT to listen on; by default a free port on loopback"
    )
    uplink: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="the kind of link to the exchange; by default that of the group"
    )
    hardware: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="for predictions; by default that of the group"
    )
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="the kind of line of its machine, from `lines`; by default that of the group"
    )


class StagesSettings(Settings):
    """Stages of machines that are alike; layers are split evenly."""

    count: int = Field(ge=1)
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="the kind of line of each machine, from `lines`; by default that of the group"
    )


class _Replica(Settings):
    name: str = Field(description="unique in the run; letters, digits, `-` and `_`")
    batch_size: int = Field(8, ge=1, description="sequences per inner step")
    micro_batches: int = Field(1, ge=1, description="equal parts that an inner step's batch is cut into")
    uplink: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="the kind of link to the exchange, from `links`"
    )
    hardware: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="for predictions: from the catalog, or from `simulate.hardware`"
    )
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="the kind of line of each of its machines to all others, from `lines`"
    )

    @property
    def members(self) -> list[str]:
        raise NotImplementedError

    @property
    def accelerators_of_member(self) -> int:
        """How many accelerators compute as one member."""
        raise NotImplementedError


class DatacenterReplica(_Replica):
    """A replica that holds the whole model at one well-connected site."""

    kind: Literal["datacenter"]
    engine: EngineName = Field("torch", description="`torch` is one process; the others spread over ranks")
    device: Annotated[Literal["auto", "cpu", "cuda"], NotPartOf.EITHER] = Field(
        "auto", description="`auto`: a GPU where there is one"
    )
    ranks: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="processes on each node, one a GPU; started by torchrun"
    )
    nodes: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="machines of this replica; start it with `launch --only` on each"
    )
    rendezvous: Annotated[Address | None, NotPartOf.EITHER] = Field(
        None, description="HOST:PORT on one of the nodes where they meet"
    )
    accelerators: Annotated[int | None, NotPartOf.EITHER] = Field(
        None, ge=1, description="for predictions: how many it has; by default one for each of its ranks, on all nodes"
    )
    torchtitan: Annotated[TorchtitanSettings, NotPartOf.OUTCOME] = TorchtitanSettings()
    deepspeed: Annotated[dict[str, Any], NotPartOf.OUTCOME] = Field(
        default_factory=dict, description="DeepSpeed's own JSON"
    )

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.ranks * self.nodes

    @property
    def accelerators_of_member(self) -> int:
        """As the YAML says, or one a rank."""
        return self.world if self.accelerators is None else self.accelerators

    @property
    def data_parallel(self) -> int:
        """Into how many parts a micro-batch is cut."""
        return self.world // (self.torchtitan.tensor_parallel if self.engine == "torchtitan" else 1)

    @property
    def members(self) -> list[str]:
        return [self.name]


class ParticipantsReplica(_Replica):
    """A replica held together by S low-bandwidth machines, one pipeline stage each."""

    kind: Literal["participants"]
    stages: int | StagesSettings | list[StageSettings] = Field(
        description="a number of stages, one entry per stage, or `{count: 4, line: dsl}`"
    )
    link: Annotated[str | list[str] | None, NotPartOf.OUTCOME] = Field(
        None, description="the kind of link between neighbours: one for all, or one per hop"
    )
    boundary: BoundarySettings = BoundarySettings()
    extra_in_flight: int = Field(1, ge=0, description="warm-up micro-batches per remaining hop beyond 1F1B's own")
    accelerators: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="for predictions: how many each stage has"
    )

    @property
    def accelerators_of_member(self) -> int:
        """Of every stage."""
        return self.accelerators

    @property
    def stage_count(self) -> int:
        match self.stages:
            case int():
                return self.stages
            case StagesSettings():
                return self.stages.count
        return len(self.stages)

    @property
    def members(self) -> list[str]:
        return [f"{self.name}.{stage}" for stage in range(self.stage_count)]

    def stage_settings(self, stage: int) -> StageSettings | None:
        return self.stages[stage] if isinstance(self.stages, list) else None

    def line_of(self, stage: int) -> str | None:
        """The kind of line of a stage's machine."""
        own = self.stages if isinstance(self.stages, StagesSettings) else self.stage_settings(stage)
        return self.line if own is None or own.line is None else own.line

    def layer_ranges(self, layers: int) -> list[range]:
        """The layers of each stage: as the YAML says, or split evenly with earlier stages taking the remainder."""
        if isinstance(self.stages, list):
            counts = [stage.layers for stage in self.stages]
        else:
            share, more = divmod(layers, self.stage_count)
            counts = [share + (stage < more) for stage in range(self.stage_count)]
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


ReplicaSettings = Annotated[DatacenterReplica | ParticipantsReplica, Field(discriminator="kind")]


class ExchangeSettings(Settings):
    """Where contributions are exchanged."""

    listen: Address = Field("127.0.0.1:0", description="HOST:PORT to listen on; port 0 takes any free one")
    timeout: Duration = Field(
        3600.0,
        gt=0,
        description="how long the exchange, its members and the nodes of a replica wait for each other while nothing "
        "comes; then the run ends and names who was waited for",
    )
    line: str | None = Field(None, description="the kind of line that all members reach it by, from `lines`")


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


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model this is: stage `index` of `count`, owning the layers of `layers`."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stage_link_name(replica: str, hop: int) -> str:
    """The link between stages `hop` and `hop + 1` of a group."""
    return f"{replica}.{hop}-{hop + 1}"


def exchange_link_name(member: str) -> str:
    return f"{member}-{EXCHANGE}"


def link_specs(
    replicas: Sequence[ReplicaSettings], kinds: Mapping[str, LinkSettings], lines: Mapping[str, LineSpec]
) -> Iterator[LinkSpec]:
    """Every link of the run, stage links first within each replica. `lines` has that of each member which has one."""

    def spec(name: str, source: str, target: str, kind: str | None) -> LinkSpec:
        settings = LinkSettings() if kind is None else kinds[kind]
        both = lines.get(source), lines.get(target)
        passed = [None, None] if both[0] == both[1] else both
        forward, backward = (_with_lines(settings.shape(way), passed) for way in DIRECTIONS)
        return LinkSpec(name, source, target, forward, backward, *passed)

    for replica in replicas:
        if isinstance(replica, ParticipantsReplica):
            for hop in range(replica.stage_count - 1):
                kind = replica.link[hop] if isinstance(replica.link, list) else replica.link
                yield spec(stage_link_name(replica.name, hop), replica.members[hop], replica.members[hop + 1], kind)
        for stage, member in enumerate(replica.members):
            kind = replica.uplink
            if isinstance(replica, ParticipantsReplica):
                own = replica.stage_settings(stage)
                kind = own.uplink if own is not None and own.uplink is not None else kind
            yield spec(exchange_link_name(member), member, EXCHANGE, kind)


def _with_lines(shape: LinkShape, lines: Sequence[LineSpec | None]) -> LinkShape:
    """With the latency and jitter of the lines that the link passes."""
    passed = [line for line in lines if line is not None]
    latency, jitter = sum(line.latency for line in passed), sum(line.jitter for line in passed)
    return LinkShape(shape.bandwidth, shape.latency + latency, shape.jitter + jitter)


def lines_of_members(replicas: Sequence[ReplicaSettings], exchange: ExchangeSettings) -> dict[str, str | None]:
    """The kind of line that each member says it has, in the order of the run, the exchange last."""
    found = {
        member: replica.line_of(stage) if isinstance(replica, ParticipantsReplica) else replica.line
        for replica in replicas
        for stage, member in enumerate(replica.members)
    }
    return found | {EXCHANGE: exchange.line}


def check_lines(
    replicas: Sequence[ReplicaSettings],
    exchange: ExchangeSettings,
    sites: Mapping[str, SiteSettings],
    kinds: Mapping[str, LineSettings],
) -> None:
    """Raise ConfigError for kinds of lines that there are not, and for members that no site can have."""
    check_kind(exchange.line, kinds, ("exchange", "line"))
    for index, replica in enumerate(replicas):
        here = ("replicas", index)
        check_kind(replica.line, kinds, (*here, "line"))
        stages = replica.stages if isinstance(replica, ParticipantsReplica) else 0
        if isinstance(stages, StagesSettings):
            check_kind(stages.line, kinds, (*here, "stages", "line"))
        for stage, own in enumerate(stages if isinstance(stages, list) else []):
            check_kind(own.line, kinds, (*here, "stages", stage, "line"))
    check_sites(sites, list(lines_of_members(replicas, exchange)), kinds)


def check_topology(
    replicas: Sequence[ReplicaSettings], kinds: Mapping[str, LinkSettings], width: int, layers: int
) -> None:
    """Raise ConfigError for what no single field can see: names, ranks, splits and kinds of links."""
    seen: set[str] = set()
    for index, replica in enumerate(replicas):
        here = ("replicas", index)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", replica.name) or replica.name == EXCHANGE:
            raise ConfigError(
                (*here, "name"),
                f"found `{replica.name}`, expected letters, digits, `-` and `_`, and not `{EXCHANGE}`",
            )
        if replica.name in seen:
            raise ConfigError((*here, "name"), f"found a second replica named `{replica.name}`, expected unique names")
        seen.add(replica.name)
        if replica.batch_size % replica.micro_batches:
            raise ConfigError(
                (*here, "micro_batches"),
                f"found {replica.micro_batches}, expected a divisor of batch_size {replica.batch_size}",
            )
        _check_kind(replica.uplink, kinds, (*here, "uplink"))
        if isinstance(replica, ParticipantsReplica):
            _check_group(replica, here, kinds, width, layers)
        else:
            _check_engine(replica, here)


def _check_engine(replica: DatacenterReplica, here: tuple[str | int, ...]) -> None:
    if replica.engine == "torch" and replica.world > 1:
        raise ConfigError(
            (*here, "engine"), f"found `torch` with {replica.world} ranks, expected `torchtitan` or `deepspeed`"
        )
    if replica.nodes > 1 and replica.rendezvous is None:
        raise ConfigError((*here, "rendezvous"), f"expected HOST:PORT, as the replica has {replica.nodes} nodes")
    titan = replica.torchtitan
    if replica.engine == "torchtitan" and replica.world % (titan.tensor_parallel * titan.data_parallel_replicate):
        raise ConfigError(
            (*here, "torchtitan"),
            f"found tensor_parallel {titan.tensor_parallel} and data_parallel_replicate "
            f"{titan.data_parallel_replicate}, expected a product that divides {replica.world} ranks",
        )
    rows = replica.batch_size // replica.micro_batches
    if rows % replica.data_parallel:
        raise ConfigError(
            (*here, "batch_size"),
            f"found micro-batches of {rows} sequences, expected a multiple of {replica.data_parallel}: "
            "every rank takes equal parts",
        )
    stage = replica.deepspeed.get("zero_optimization", {}).get("stage", 0)
    if any(replica.deepspeed.get(kind, {}).get("enabled") for kind in ("bf16", "fp16")) and stage == 0:
        raise ConfigError(
            (*here, "deepspeed", "zero_optimization"),
            "found stage 0 with 16 bits, expected 1, 2 or 3: without fp32 master weights replicas cannot be equal",
        )
    for key in DEEPSPEED_OWNED:
        if key in replica.deepspeed:
            raise ConfigError((*here, "deepspeed", key), "follows from the rest of this file; leave it out")


def _check_kind(kind: str | None, kinds: Mapping[str, LinkSettings], key: tuple[str | int, ...]) -> None:
    if kind is not None and kind not in kinds:
        known = ", ".join(kinds) or "none are defined"
        raise ConfigError(key, f"found `{kind}`, expected one of the kinds under `links` ({known})")


def _check_group(
    replica: ParticipantsReplica,
    here: tuple[str | int, ...],
    kinds: Mapping[str, LinkSettings],
    width: int,
    layers: int,
) -> None:
    count = replica.stage_count
    if not 1 <= count <= layers:
        raise ConfigError((*here, "stages"), f"found {count} stages, expected from 1 to the model's {layers} layers")
    total = sum(map(len, replica.layer_ranges(layers)))
    if total != layers:
        raise ConfigError(
            (*here, "stages"), f"found {total} layers over all stages, expected the model's {layers} layers"
        )
    rank = replica.boundary.dimensions(width)
    if rank is not None and rank > width:
        raise ConfigError(
            (*here, "boundary", "rank"),
            f"found {rank}, expected at most the model's width {width}, or `full`",
        )
    hops = replica.link if isinstance(replica.link, list) else [replica.link]
    if isinstance(replica.link, list) and len(hops) != count - 1:
        raise ConfigError((*here, "link"), f"found {len(hops)} entries, expected one per hop: {count - 1}")
    for hop, kind in enumerate(hops):
        _check_kind(kind, kinds, (*here, "link", hop) if isinstance(replica.link, list) else (*here, "link"))
    for stage in range(count):
        own = replica.stage_settings(stage)
        if own is not None:
            _check_kind(own.uplink, kinds, (*here, "stages", stage, "uplink"))
