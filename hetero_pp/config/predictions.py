"""Hardware catalog, and entries of the user: speed and memory of machines."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_pp.config.lines import LineSettings, LinkSettings, Rule, of_kind
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Bandwidth, Count, Duration, Ratio, Settings, Size, Speed, WhomItConcerns
from hetero_pp.core.units import parse_any

ACCELERATOR_FLOPS = 5e12
"""Peak operations per second from which hardware is taken for an accelerator: more than CPUs reach."""


class Hardware(Settings):
    """One accelerator, or one machine that computes as one."""

    flops: Speed = Field(gt=0, description="peak dense bf16 (fp32 for a CPU) operations a second")
    mfu: Ratio = Field(0.4, gt=0, le=1, description="share of the peak that training reaches")
    memory: Size = Field(gt=0)
    memory_bandwidth: Bandwidth = Field(gt=0, description="such as `3.35 TB/s`")
    source: str = ""

    @property
    def achieved_flops(self) -> float:
        """Operations per second in training."""
        return self.flops * self.mfu

    @property
    def is_accelerator(self) -> bool:
        """Whether it computes beside a host with a memory of its own; a CPU has one memory for everything."""
        return self.flops >= ACCELERATOR_FLOPS


def _entry(flops: str, memory: str, memory_bandwidth: str, mfu: float, source: str) -> Hardware:
    return Hardware.model_validate(
        {"flops": flops, "memory": memory, "memory_bandwidth": memory_bandwidth, "mfu": mfu, "source": source}
    )


CATALOG: Mapping[str, Hardware] = {
    "h200": _entry("989 TFLOP/s", "141 GB", "4.8 TB/s", 0.4, "NVIDIA H200 SXM data sheet, without sparsity"),
    "h100": _entry("989 TFLOP/s", "80 GB", "3.35 TB/s", 0.4, "NVIDIA H100 SXM data sheet, without sparsity"),
    "a100": _entry("312 TFLOP/s", "80 GB", "2.039 TB/s", 0.5, "NVIDIA A100 80GB SXM data sheet"),
    "l40s": _entry("362 TFLOP/s", "48 GB", "864 GB/s", 0.35, "NVIDIA L40S data sheet, without sparsity"),
    "rtx-4090": _entry("165 TFLOP/s", "24 GB", "1008 GB/s", 0.4, "NVIDIA Ada white paper, fp32 accumulation"),
    "rtx-3090": _entry("71 TFLOP/s", "24 GB", "936 GB/s", 0.4, "NVIDIA GA102 white paper, fp32 accumulation"),
    "cpu-core": _entry(
        "45 GFLOP/s", "4 GB", "10 GB/s", 0.5, "one core of a 2020s server, fp32; `calibrate` measures yours"
    ),
}
"""Peaks are from the vendors. The MFU is an assumption: what tuned training code reaches at these models' sizes."""

_NO_MODEL = re.compile(r"nvidia|geforce|tesla|gpu|sxm\d*|\d+gb|hbm\d+e?")
"""Words in the name of a device that do not tell its peak."""


def hardware_of(device: str) -> Hardware | None:
    """Return the entry of the catalog for a device as `name_of` calls it; None for a model that it does not have.

    Other words name another model with another peak, such as the one for laptops, or `PCIe` of an H100.
    """
    words = re.findall(r"[a-z0-9]+", device.partition(" ")[2].lower())
    model = "-".join(word for word in words if not _NO_MODEL.fullmatch(word))
    return CATALOG.get("a100" if model == "a100-pcie" else model)  # an A100 computes as fast in either form


ASSUMED = "cpu-core"  # hardware that is assumed if none is named


def hardware_named(name: str, own: Mapping[str, Hardware], key: tuple[str | int, ...]) -> Hardware:
    """Return an entry of the YAML or of the catalog. Raises ConfigError at `key` that lists both."""
    found = own.get(name) or CATALOG.get(name)
    if found is None:
        known = ", ".join([*own, *CATALOG])
        raise ConfigError(key, f"found `{name}`, expected one of {known}, or an entry under simulate.hardware")
    return found


# The `simulate` section: input of predictions beyond the topology. Training does not read it.


class MeasuredCost(Settings):
    """Measured cost of one member, as `calibrate` writes it; replaces the estimate from its hardware."""

    forward: Duration = Field(ge=0, description="one micro-batch, including encoding and decoding of messages")
    backward: Duration = Field(ge=0)
    update: Duration = Field(ge=0, description="one optimizer step")
    contribute: Duration = Field(ge=0, description="compression of the pseudo-gradient")
    apply: Duration = Field(ge=0, description="decoding and application of the other contributions")
    evaluate: Duration = Field(ge=0, description="forward pass of one validation batch")


class FleetSettings(Settings):
    """Many equal replicas in place of one that the topology names."""

    count: int = Field(ge=1)
    churn: Ratio = Field(0.0, ge=0, lt=1, description="share of members that leave within a round")


Figure = Annotated[
    float,
    BeforeValidator(parse_any),
    WithJsonSchema({"type": ["number", "string"], "examples": [163, "94.5 %", "70 s", "5.5 MB"]}),
]


class PublishedNumber(Settings):
    """Number from a paper, shown beside the prediction."""

    what: str = Field(description="number of `--json` to compare: `outer_seconds`, `replicas.home.step_seconds`")
    value: Figure = Field(gt=0)
    bound: Literal["equal", "at least", "at most"] = Field("equal", description="relation that the paper states")
    where: str = Field(description="paper, with table or section")
    when: dict[str, Any] = Field(
        default_factory=dict, description="keys of this file and the values at which the number applies"
    )


ExchangeKind = Literal["gather", "parameter_server", "ring_all_gather", "ring_all_reduce", "sparse_ring"]


class SimulateSettings(Settings):
    """Machines, fleets and the exchange in a prediction."""

    machine: str = Field(ASSUMED, description="hardware of members that name none")
    hardware: dict[str, Hardware] = Field(default_factory=dict, description="additional entries for the catalog")
    measured: Annotated[dict[str, MeasuredCost], WhomItConcerns()] = Field(
        default_factory=dict, description="measured costs, by member"
    )
    fleets: Annotated[dict[str, FleetSettings], WhomItConcerns()] = Field(
        default_factory=dict, description="equal replicas behind a name, by replica"
    )
    exchange: ExchangeKind = Field(
        "gather",
        description="exchange of contributions: `gather` is what `launch` and an object store do; "
        "the others are only predicted",
    )
    published: list[PublishedNumber] = Field(
        default_factory=list, description="numbers from papers, shown beside the prediction"
    )
    rows: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="rows of predictions: values of keys of this file, by name of the row"
    )
    sweep: str | None = Field(None, description="KEY=FROM..TO or KEY=A,B: predict at these values, as --sweep does")
    curves: str | None = Field(None, description="KEY=A,B: draw one curve of the sweep for each, as --curves does")
    tokens: Count | None = Field(None, ge=1, description="token budget; by default the run's")
    seed: int = Field(0, ge=0, description="seed of jitter")

    @model_validator(mode="after")
    def _one_sweep(self) -> SimulateSettings:
        if self.rows and self.sweep is not None:
            raise ValueError("found `rows` and `sweep`, expected only one of them")
        return self


# The `plan` section: participants without a group, and constraints on groups. Training does not read it.


class LooseParticipant(Settings):
    """Machine that is to become a stage of a group."""

    name: str = Field(description="unique; letters, digits, `-` and `_`")
    site: str | None = Field(None, description="name of the site; `pairs` may refer to it")
    hardware: str | None = Field(None, description="hardware, from the catalog or from `simulate.hardware`")
    uplink: str | None = Field(None, description="kind of link to the exchange, from `links`")
    line: str | None = Field(
        None, description="kind of access line of the machine, from `lines`; machines at one site share it"
    )


class PairSettings(LinkSettings):
    """Link between two participants, or between all of one site and all of another (or of the same)."""

    between: tuple[str, str] = Field(description="participants or sites; `forward` is from the first to the second")


class PlanSettings(Settings):
    """Input of `hetero-pp plan` beyond the replicas in the YAML."""

    participants: list[LooseParticipant] = Field([], description="machines to group")
    pairs: list[PairSettings] = Field(
        [], description="links between participants; the entry that names the most participants applies"
    )
    default: LinkSettings | None = Field(
        None, description="link between all other pairs; by default, through the uplinks or access lines of both"
    )
    stages: int = Field(4, ge=1, description="participants per group")
    batch_size: int = Field(8, ge=1, description="sequences per inner step of a group")
    balance: Ratio = Field(
        0.9, gt=0, le=1, description="share of the best speed that must remain when better links are preferred"
    )
    few_bits: bool = Field(True, description="allow boundaries with 4 bits per number; otherwise only the papers' bf16")
    timed_rounds: bool = Field(
        False, description="plan rounds of a given time (`inner.seconds`) if replicas would wait for a slower one"
    )


def rules_of_participants(
    plan: PlanSettings, kinds: Collection[str], lines: Mapping[str, LineSettings], layers: int
) -> Iterator[Rule]:
    """Yield the rules with which participants can be grouped: names, links and numbers."""
    sites = {one.site for one in plan.participants}
    seen: set[str] = set()
    for index, one in enumerate(plan.participants):
        here = ("plan", "participants", index)
        is_name = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", one.name)
        yield not is_name, (*here, "name"), f"`{one.name}`", "letters, digits, `-` and `_`"
        yield one.name in seen or one.name in sites, (*here, "name"), f"`{one.name}` twice", "unique names"
        seen.add(one.name)
        yield of_kind(one.uplink, kinds, (*here, "uplink"), "links")
        yield of_kind(one.line, lines, (*here, "line"))
        first = next(other for other in plan.participants if other.name == one.name or other.site == one.site)
        expected = f"`{first.line}`, as {first.name} has at {one.site}: a site has one line"
        yield one.site is not None and one.line != first.line, (*here, "line"), f"`{one.line}`", expected
    for index, pair in enumerate(plan.pairs):
        for end in pair.between:
            key = ("plan", "pairs", index, "between")
            yield end not in seen | sites, key, f"`{end}`", "a participant's name or a site"
    is_wrong = plan.participants and not plan.stages <= min(layers, len(seen))
    expected = f"at most the {layers} layers of the model and the {len(seen)} participants"
    yield is_wrong, ("plan", "stages"), plan.stages, expected
