"""Topology of a run: replicas and their stages. Data only.

A *member* is one process of the run: `exchange`, a datacenter replica (`dc`), or one stage of a participant group
(`home.0`). A *link* joins two members: neighbouring stages (`home.0-1`), or a member and the exchange
(`home.0-exchange`), see hetero_pp.config.links. All links of a machine share its *line*, see hetero_pp.config.lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_pp.config.engine_settings import EngineName, Precision, Recomputation, TorchtitanSettings
from hetero_pp.config.links import RELAYED, is_loopback
from hetero_pp.config.settings import AddedLater, Duration, NotPartOf, Ratio, Settings
from hetero_pp.core.units import parse_fraction


def _parse_rank(value: Any) -> Any:
    """Parse `full`, a number of dimensions (8), or a ratio of the model's width (`1/8`)."""
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


def dimensions_of(rank: Literal["full"] | int | float, width: int) -> int | None:
    """Return a rank in dimensions for a model of this width; None if it is full."""
    if rank == "full":
        return None
    return max(1, round(rank * width)) if isinstance(rank, float) else rank


LAST_PORT = 65_535


def parse_address(value: Any) -> str:
    """Return HOST:PORT, or [IPV6]:PORT, unchanged. Raises ValueError for another value."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"found `{value}`, expected HOST:PORT such as `127.0.0.1:47500` or `[::1]:47500`")
    if not _is_host(host):
        bare = host.strip("[]")
        form = f"[{bare}]:{port}" if _is_ipv6(bare) else "[::1]:47500"
        raise ValueError(f"found `{value}`, expected an IPv6 address in brackets such as `{form}`")
    return str(value)


def _is_host(host: str) -> bool:
    """Return whether it is an IPv6 address in brackets, or a name or IPv4 address without brackets and colons."""
    in_brackets = host.startswith("[") and host.endswith("]")
    return _is_ipv6(host[1:-1]) if in_brackets else not set(host) & set("[]:")


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


def _parse_stage_address(value: Any) -> Any:
    return value if value == RELAYED else parse_address(value)


def parse_device(value: Any) -> str:
    """Return the name of a device, unchanged. Raises ValueError for another value."""
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(f"found `{value}`, expected `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`")
    return value


_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:(0|[1-9][0-9]{0,2}))?")

Address = Annotated[str, BeforeValidator(parse_address)]
StageAddress = Annotated[str, BeforeValidator(_parse_stage_address)]
Device = Annotated[
    str,
    BeforeValidator(parse_device),
    WithJsonSchema({"type": "string", "pattern": f"^({_DEVICE.pattern})$", "examples": ["auto", "cpu", "cuda:1"]}),
]


class AnchorSettings(Settings):
    """Tables by token that receivers of boundaries learn locally, and that are never sent (stages/anchors.py)."""

    rank: Rank = Field(description="columns of a table; `full`: the width of the model")
    fade: tuple[Ratio, Ratio] | None = Field(
        None,
        description="start and end of fading out, as shares of the run's rounds. Faded anchors add "
        "nothing, so the model can then be used without them",
    )

    @model_validator(mode="after")
    def _fades_forward(self) -> AnchorSettings:
        if self.fade is not None and self.fade[0] >= self.fade[1]:
            raise ValueError(f"found fade {list(self.fade)}, expected an end after the beginning")
        return self

    def weight(self, round_: int, rounds: int) -> float:
        """Return the weight of anchors in a round and in the evaluation after it: 1 before they fade, 0 after."""
        if self.fade is None:
            return 1.0
        begin, end = (share * rounds for share in self.fade)
        return min(1.0, max(0.0, (end - round_) / (end - begin)))

    def dimensions(self, width: int) -> int | None:
        """Return the columns of a table for a model of this width; None if they equal the width."""
        return dimensions_of(self.rank, width)

    def numbers(self, vocabulary: int, width: int) -> int:
        """Return the numbers of one boundary's anchors: the table, and the matrix that widens its rows."""
        rank = self.dimensions(width)
        return vocabulary * width if rank is None else rank * (vocabulary + width)


EmbeddingTraining = Literal["free", "coefficients", "projected"]


class BoundarySettings(Settings):
    """Content of messages between neighbouring stages (k in the paper is `rank`)."""

    rank: Rank = Field(
        "full", description="dimensions that cross: a whole number is k, a ratio is k/d, `full` is all d; 1 is one"
    )
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="type of each coefficient on the wire, without `bits`")
    bits: int | None = Field(None, ge=2, le=8, description="bits of each coefficient on the wire, instead of `dtype`")
    embedding: Annotated[EmbeddingTraining, AddedLater()] = Field(
        "free",
        description="training of the embedding's part T_S between rounds, if the rank is not full: `free` (leaves the "
        "subspace until the next split), `coefficients` (C of T_S = C U^T, which stays in it as in Het-PP 2.4), or "
        "`projected` (back onto the subspace after each step)",
    )
    anchors: AnchorSettings | None = Field(
        None, description="components that receivers learn in place of the dropped ones"
    )

    def dimensions(self, width: int) -> int | None:
        """Return k for a model of this width d; None if the boundary is not compressed."""
        return dimensions_of(self.rank, width)


class StageSettings(Settings):
    """One stage of a participant group, on one machine."""

    layers: int | None = Field(
        None,
        ge=1,
        description="number of consecutive layers of this stage; an even split if no stage has one",
    )
    listen: Annotated[StageAddress | None, NotPartOf.EITHER] = Field(
        None,
        description="HOST:PORT to listen on for the neighbouring stages, or `relay`: do not listen, "
        "and dial the neighbours, through the exchange if necessary. By default a free "
        "port on loopback; the first stage does not listen",
    )
    uplink: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="kind of link to the exchange; by default the group's"
    )
    hardware: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="hardware for predictions; by default the group's"
    )
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="kind of access line of the machine, from `lines`; by default the group's"
    )
    device: Annotated[Device | None, NotPartOf.EITHER] = Field(
        None, description="device that computes this stage; by default the group's"
    )


class StagesSettings(Settings):
    """Stages of equal machines; layers are split evenly."""

    count: int = Field(ge=1)
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="kind of access line of each machine, from `lines`; by default the group's"
    )


class _AnyReplica(Settings):
    name: str = Field(description="unique name; letters, digits, `-` and `_`")
    batch_size: int = Field(8, ge=1, description="sequences per inner step")
    micro_batches: int = Field(1, ge=1, description="number of equal parts of an inner step's batch")
    precision: Annotated[Precision, AddedLater()] = Field(
        "auto",
        description="precision of the layers' arithmetic with engine `torch` and in stages; parameters, gradients, "
        "moments and the loss are fp32. `auto`: bf16 on an accelerator that has it, fp32 on a CPU",
    )
    recompute: Annotated[Recomputation, NotPartOf.EITHER] = Field(
        "none",
        description="activations that the backward computes again, with engine `torch` and in stages; `layers`: those "
        "inside of layers, which saves memory and costs a second forward",
    )
    compile: Annotated[bool, AddedLater(), NotPartOf.OUTCOME] = Field(
        False,
        description="use torch.compile on every layer, with engine `torch` and in stages; needs a C++ compiler on a "
        "CPU, Triton on a GPU",
    )
    uplink: Annotated[str | None, NotPartOf.OUTCOME] = Field(
        None, description="kind of link to the exchange, from `links`"
    )
    hardware: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="hardware for predictions, from the catalog or from `simulate.hardware`"
    )
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="kind of access line of each machine, from `lines`"
    )
    device: Annotated[Device, NotPartOf.EITHER] = Field(
        "auto",
        description="device that computes: `auto`, `cpu`, `cuda`, `mps`, `xpu`, or one with a number such as `cuda:1`. "
        "`auto` takes the accelerators of a host in turn, one for each member, or the CPU if there are none",
    )
    optional: bool = Field(
        False, description="start and continue the run without this replica; include it while all of its slots are held"
    )


class DatacenterReplica(_AnyReplica):
    """Replica that holds the whole model at one well-connected site."""

    kind: Literal["datacenter"]
    engine: EngineName = Field(
        "torch", description="training engine; `torch` uses one process, the others distribute a replica over ranks"
    )
    ranks: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="processes per node, one per GPU; torchrun starts them"
    )
    nodes: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="machines of this replica; start it with `launch --only` on each"
    )
    rendezvous: Annotated[Address | None, NotPartOf.EITHER] = Field(
        None, description="HOST:PORT on one of the nodes, for the rendezvous of the nodes"
    )
    accelerators: Annotated[int | None, NotPartOf.EITHER] = Field(
        None, ge=1, description="accelerators for predictions; by default one per rank, on all nodes"
    )
    torchtitan: Annotated[TorchtitanSettings, NotPartOf.OUTCOME] = TorchtitanSettings()
    deepspeed: Annotated[dict[str, Any], NotPartOf.OUTCOME] = Field(
        default_factory=dict, description="settings in DeepSpeed's own JSON format"
    )

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.ranks * self.nodes

    @property
    def accelerators_of_member(self) -> int:
        """Number of accelerators that compute as one member: the number in the YAML, or one per rank."""
        return self.world if self.accelerators is None else self.accelerators

    @property
    def data_parallel(self) -> int:
        """Number of parts that a micro-batch is split into."""
        return self.world // (self.torchtitan.tensor_parallel if self.engine == "torchtitan" else 1)

    @property
    def members(self) -> list[str]:
        return [self.name]


class ParticipantsReplica(_AnyReplica):
    """Replica of S low-bandwidth machines with one pipeline stage each."""

    kind: Literal["participants"]
    count: str | int | None = Field(
        None,
        description="number of groups with these settings, named home-1, home-2, ... A range "
        "`2..50`: two required groups, and up to 48 more that form when enough hosts join",
    )
    stages: int | StagesSettings | list[StageSettings] = Field(
        description="number of stages, a list with one entry per stage, or `{count: 4, line: dsl}`"
    )
    link: Annotated[str | list[str] | None, NotPartOf.OUTCOME] = Field(
        None, description="kind of link between neighbours: one for all, or one per hop"
    )
    boundary: BoundarySettings = BoundarySettings()
    extra_in_flight: int = Field(
        1, ge=0, description="additional warm-up micro-batches per remaining hop, beyond those of 1F1B"
    )
    accelerators: Annotated[int, NotPartOf.EITHER] = Field(
        1, ge=1, description="accelerators of each stage, for predictions"
    )

    @property
    def accelerators_of_member(self) -> int:
        """Number of accelerators of every stage."""
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

    def listen_of(self, stage: int) -> str | None:
        """Return the address at which a stage's neighbours dial it; None if the YAML names none."""
        own = self.stage_settings(stage)
        return None if own is None else own.listen

    def line_of(self, stage: int) -> str | None:
        """Return the kind of line of a stage's machine."""
        own = self.stages if isinstance(self.stages, StagesSettings) else self.stage_settings(stage)
        return self.line if own is None or own.line is None else own.line

    def device_of(self, stage: int) -> str:
        """Return the setting for the device of a stage."""
        own = self.stage_settings(stage)
        return self.device if own is None or own.device is None else own.device

    def layer_ranges(self, layers: int) -> list[range]:
        """Return the layers of each stage: as in the YAML, or split evenly with earlier stages taking the remainder."""
        if isinstance(self.stages, list):
            counts = [stage.layers or 0 for stage in self.stages]
        if not isinstance(self.stages, list) or not any(counts):
            share, more = divmod(layers, self.stage_count)
            counts = [share + (stage < more) for stage in range(self.stage_count)]
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


ReplicaSettings = Annotated[DatacenterReplica | ParticipantsReplica, Field(discriminator="kind")]


class GraceSettings(Settings):
    """Wait for the other replicas after a quorum has contributed: `factor` times their recent delays."""

    factor: float = Field(3.0, gt=0)
    least: Duration = Field(10.0, gt=0)
    most: Duration = Field(600.0, gt=0, description="longest wait; also the wait while no delays are known yet")


class LeaseSettings(Settings):
    """Longest allowed silence of a member: `factor` times its longest recent silence."""

    factor: float = Field(5.0, gt=0)
    least: Duration = Field(15.0, gt=0)
    most: Duration = Field(300.0, gt=0)


class HangSettings(Settings):
    """Longest time of a member without progress: `factor` times its longest recent one."""

    factor: float = Field(20.0, gt=0)
    least: Duration = Field(300.0, gt=0)
    most: Duration = Field(3600.0, gt=0)


class MagnitudeSettings(Settings):
    """Largest size of a contribution, relative to others of its round and to earlier ones of its replica."""

    scale: float = Field(
        5.0,
        gt=1,
        description="size above which a contribution is scaled down to this size, as a multiple of the usual size",
    )
    leave_out: float = Field(
        50.0, gt=1, description="size above which a contribution is excluded, as a multiple of the usual size"
    )


class ExchangeSettings(Settings):
    """Address of the exchange, and the conditions under which a round closes."""

    listen: Address = Field("127.0.0.1:0", description="HOST:PORT to listen on; port 0: any free port")
    relay: Address | None = Field(
        None,
        description="HOST:PORT to listen on for links between stages that cannot dial each other. By default the host "
        "of `listen` and the port after its own (on loopback any free port). Other hosts dial this port, too, so it "
        "must be open. Without TLS there is no relay",
    )
    insecure: bool = Field(
        False, description="do not use TLS, not even between machines; only for a network that you control"
    )
    timeout: Duration = Field(
        3600.0,
        gt=0,
        description="longest wait for members that have not joined, before a run starts; for an "
        "exchange that does not answer; and for the nodes of a replica",
    )
    line: str | None = Field(None, description="kind of access line of the exchange, from `lines`")
    quorum: Ratio = Field(0.5, gt=0, le=1, description="smallest share of the replicas that closes a round")
    grace: GraceSettings = GraceSettings()
    limit: Duration = Field(
        6 * 3600.0, gt=0, description="time after which a round closes as soon as a quorum has contributed"
    )
    lease: LeaseSettings = LeaseSettings()
    hang: HangSettings = HangSettings()
    magnitudes: MagnitudeSettings = MagnitudeSettings()

    @property
    def relays_at(self) -> str:
        """Return HOST:PORT of the relay."""
        if self.relay is not None:
            return self.relay
        host, port = self.listen.rsplit(":", 1)
        return f"{host}:{0 if is_loopback(self.listen) else _next_port(int(port))}"


def _next_port(port: int) -> int:
    """Return the next port, or the one before if `port` is the last; 0, which means any free port, for 0."""
    if port == 0:
        return 0
    return port + 1 if port < LAST_PORT else port - 1


@dataclass(frozen=True)
class StageSpec:
    """Part of the model of one stage: stage `index` of `count`, with the layers `layers`."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1
