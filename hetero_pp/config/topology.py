"""Topology of a run: replicas and their stages. Data only.

A *member* is one process of the run: `exchange`, a datacenter replica (`dc`), or one stage of a participant group
(`home.0`). A *link* joins two members: neighbouring stages (`home.0-1`), or a member and the exchange
(`home.0-exchange`), see hetero_pp.config.lines. All links of a machine share its *line*, see hetero_pp.config.lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hetero_pp.config.lines import RELAYED, is_loopback
from hetero_pp.core.settings import Duration, NotPartOf, Ratio, Settings
from hetero_pp.messages.report_bounds import MOST_STEPS
from hetero_pp.model.part_settings import BoundarySettings, Precision

# Settings of a datacenter replica's engine: its name, and how it distributes the replica over ranks.


EngineName = Literal["torch", "torchtitan", "deepspeed"]
Checkpointing = Literal["none", "selective", "full"]
Recomputation = Literal["none", "layers"]

DEEPSPEED_OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "scheduler",
)
"""Keys of DeepSpeed's JSON that follow from the rest of the YAML."""


class TorchtitanSettings(Settings):
    """Distribution of a replica by torchtitan. Ranks that remain after both degrees shard the parameters (FSDP2)."""

    tensor_parallel: int = Field(1, ge=1, description="ranks that split every matrix product (tensor parallelism)")
    data_parallel_replicate: int = Field(1, ge=1, description="copies of the sharded replica (HSDP)")
    compile: bool = Field(False, description="use torch.compile on every layer")
    activation_checkpointing: Checkpointing = "none"
    precision: Precision = Field(
        "auto", description="precision of the layers' arithmetic; `auto`: bf16 on a GPU, fp32 on a CPU"
    )
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    cpu_offload: bool = Field(False, description="keep parameters, gradients and moments in CPU memory")


# ---- what an exchange may tell a host that joins ----

_DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")


def _numbers(keys: str) -> dict[str, tuple[str, ...]]:
    """Return keys that have no text among their values."""
    return dict.fromkeys(keys.split(), ())


_OFFLOAD: Mapping[str, Any] = {"device": ("none", "cpu"), **_numbers("pin_memory buffer_count buffer_size ratio")}

_DEEPSPEED_TOLD: Mapping[str, Any] = {
    "zero_optimization": {
        **_numbers(
            "stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
            "contiguous_gradients round_robin_gradients sub_group_size cpu_offload stage3_max_live_parameters "
            "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_gather_16bit_weights_on_model_save zero_hpz_partition_size "
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
            "ignore_unused_parameters"
        ),
        "offload_optimizer": _OFFLOAD,
        "offload_param": {**_OFFLOAD, "max_in_cpu": ()},
    },
    "bf16": _numbers("enabled"),
    "fp16": _numbers(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale"
    ),
    "optimizer": {
        "type": ("Adam", "AdamW", "SGD", "Lion", "Lamb"),
        "params": _numbers("lr betas eps weight_decay momentum amsgrad adam_w_mode torch_adam bias_correction"),
    },
    "activation_checkpointing": _numbers(
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary"
    ),
    "data_types": {"grad_accum_dtype": _DTYPES},
    "communication_data_type": _DTYPES,
    **_numbers(
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "wall_clock_breakdown steps_per_print"
    ),
}
"""Keys of DeepSpeed's JSON that name no path, no address and no code, each with its allowed texts.

Every other value is a number, true, false or null, or a list of them. DeepSpeed writes files for other sections, such
as flops_profiler, csv_monitor and aio, and loads code for others. A list of allowed keys stays safe when a later
DeepSpeed adds sections.
"""


def untold_deepspeed_key(settings: object, allowed: Any = _DEEPSPEED_TOLD) -> tuple[str, ...] | None:
    """Return the first key of DeepSpeed's JSON that a host does not accept from an exchange; None if there is none."""
    if isinstance(allowed, Mapping):
        if not isinstance(settings, Mapping):
            return ()
        for key, value in settings.items():
            found = untold_deepspeed_key(value, allowed[key]) if key in allowed else ()
            if found is not None:
                return (str(key), *found)
        return None
    values = settings if isinstance(settings, list) else [settings]
    is_told = all(value is None or isinstance(value, int | float) or value in allowed for value in values)
    return None if is_told else ()


LAST_PORT = 65_535


def parse_address(value: Any) -> str:
    """Return HOST:PORT, or [IPV6]:PORT, unchanged. Raises ValueError for another value."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"found `{value}`, expected HOST:PORT such as `127.0.0.1:47500` or `[::1]:47500`")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not (_is_ipv6(host[1:-1]) if in_brackets else not set(host) & set("[]:")):
        bare = host.strip("[]")
        form = f"[{bare}]:{port}" if _is_ipv6(bare) else "[::1]:47500"
        raise ValueError(f"found `{value}`, expected an IPv6 address in brackets such as `{form}`")
    return str(value)


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


def parse_device(value: Any) -> str:
    """Return the name of a device, unchanged. Raises ValueError for another value."""
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(f"found `{value}`, expected `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`")
    return value


_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:(0|[1-9][0-9]{0,2}))?")

Address = Annotated[str, BeforeValidator(parse_address)]
StageAddress = Annotated[str, BeforeValidator(lambda value: value if value == RELAYED else parse_address(value))]
Device = Annotated[
    str,
    BeforeValidator(parse_device),
    WithJsonSchema({"type": "string", "pattern": f"^({_DEVICE.pattern})$", "examples": ["auto", "cpu", "cuda:1"]}),
]


Devices = Annotated[list[Device], Field(min_length=1)]
_DEVICES_OF_A_STAGE = (
    "device that computes a stage; by default the group's. With a list, such as `[cuda:0, cuda:1]`, its layers lie on "
    "several devices of the host in this order, about as many parameters on each, and one after the other computes"
)


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
    device: Annotated[Device | Devices | None, NotPartOf.EITHER] = Field(None, description=_DEVICES_OF_A_STAGE)


class StagesSettings(Settings):
    """Stages of equal machines; layers are split evenly."""

    count: int = Field(ge=1)
    device: Annotated[Device | Devices | None, NotPartOf.EITHER] = Field(None, description=_DEVICES_OF_A_STAGE)
    line: Annotated[str | None, NotPartOf.EITHER] = Field(
        None, description="kind of access line of each machine, from `lines`; by default the group's"
    )


class _AnyReplica(Settings):
    name: str = Field(description="unique name; letters, digits, `-` and `_`")
    batch_size: int = Field(8, ge=1, description="sequences per inner step")
    micro_batches: int = Field(1, ge=1, description="number of equal parts of an inner step's batch")
    steps: int | None = Field(
        None,
        ge=1,
        le=MOST_STEPS,
        description="inner steps of this replica in a round, so that no other waits for a slow one; by default "
        "`inner.steps`. Its learning rate follows the share of the round",
    )
    precision: Precision = Field(
        "auto",
        description="precision of the layers' arithmetic with engine `torch` and in stages; parameters, gradients, "
        "moments and the loss are fp32. `auto`: bf16 on an accelerator that has it, fp32 on a CPU",
    )
    recompute: Annotated[Recomputation, NotPartOf.EITHER] = Field(
        "none",
        description="activations that the backward computes again, with engine `torch` and in stages; `layers`: those "
        "inside of layers, which saves memory and costs a second forward",
    )
    compile: Annotated[bool, NotPartOf.OUTCOME] = Field(
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

    def setting(self, stage: int, key: str) -> tuple[Any, tuple[str | int, ...]]:
        """Return the value that a key has for one stage's machine, its own or the replica's, and the key's path."""
        return getattr(self, key), (key,)


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

    def devices_of(self, stage: int) -> int:
        """Return over how many accelerators the memory of the replica is divided; `stage` is 0."""
        return self.accelerators_of_member

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

    def setting(self, stage: int, key: str) -> tuple[Any, tuple[str | int, ...]]:
        own: Any = self.stages
        path: tuple[str | int, ...] = ("stages", key)
        if isinstance(own, list):
            own, path = own[stage], ("stages", stage, key)
        value = getattr(own, key, None)
        return (getattr(self, key, None), (key,)) if value is None else (value, path)

    def devices_of(self, stage: int) -> int:
        """Return over how many accelerators the memory of a stage is divided."""
        device = self.setting(stage, "device")[0]
        return self.accelerators if isinstance(device, str) else max(self.accelerators, len(device))

    def listen_of(self, stage: int) -> str | None:
        """Return the address at which a stage's neighbours dial it; None if the YAML names none."""
        found: str | None = self.setting(stage, "listen")[0]
        return found

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
    hosts: list[Address] = Field(
        [],
        description="HOST:PORT of each host that may serve the exchange, as other hosts dial it: the one that serves, "
        "and those that wait to take its place (`serve --standby`). They share `store.url`",
    )
    takeover: Duration = Field(
        10.0,
        gt=0,
        description="time without a heartbeat in the store after which another host may take the exchange over; three "
        "heartbeats are written in this time",
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
    def address(self) -> str:
        """HOST:PORT of each host that may serve it, with commas between them; without `hosts` where it listens."""
        return ",".join(self.hosts) or self.listen

    @property
    def relays_at(self) -> str:
        """Return HOST:PORT of the relay."""
        if self.relay is not None:
            return self.relay
        host, _, port = self.listen.rpartition(":")
        if is_loopback(self.listen) or int(port) == 0:
            return f"{host}:0"
        return f"{host}:{int(port) + (1 if int(port) < LAST_PORT else -1)}"
