"""The `simulate` section: input of predictions beyond the topology. Training does not read it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_pp.run.hardware import ASSUMED, Hardware
from hetero_pp.settings import Bandwidth, Duration, Ratio, Settings, WhomItConcerns
from hetero_pp.units import parse_any


class MeasuredCost(Settings):
    """Measured cost of one member, as `calibrate` writes it; replaces the estimate from its hardware."""

    forward: Duration = Field(ge=0, description="one micro-batch, with encoding and decoding of messages")
    backward: Duration = Field(ge=0)
    update: Duration = Field(ge=0, description="one optimizer step")
    contribute: Duration = Field(ge=0, description="compressing the pseudo-gradient")
    apply: Duration = Field(ge=0, description="decoding and applying what others sent")
    evaluate: Duration = Field(ge=0, description="forward of one validation batch")


class FleetSettings(Settings):
    """Many replicas in place of one that the topology names, each drawn at random."""

    count: int = Field(ge=1)
    bandwidth: tuple[Bandwidth, Bandwidth] | None = Field(
        None, description="between stages, from and to: drawn evenly on a logarithmic scale, one for each hop"
    )
    uplink: tuple[Bandwidth, Bandwidth] | None = Field(None, description="to the exchange, likewise for each member")
    stragglers: Ratio = Field(0.0, ge=0, le=1, description="share of members that are slow")
    slowdown: float = Field(3.0, ge=1, description="how many times slower stragglers compute")
    churn: Ratio = Field(0.0, ge=0, lt=1, description="share of members that leave within a round")


class SiteSettings(Settings):
    """Members behind one link to the exchange, which replaces their own uplinks."""

    members: list[str] = Field(min_length=1, description="members, or replicas with all of theirs")
    uplink: str = Field(description="the kind of link that they share, from `links`")


Figure = Annotated[
    float,
    BeforeValidator(parse_any),
    WithJsonSchema({"type": ["number", "string"], "examples": [163, "94.5 %", "70 s", "5.5 MB"]}),
]


class PublishedNumber(Settings):
    """Number from a paper, shown beside the prediction."""

    what: str = Field(description="which number of `--json`: `outer_seconds`, `replicas.home.step_seconds`")
    value: Figure = Field(gt=0)
    bound: Literal["equal", "at least", "at most"] = Field("equal", description="what the paper says of the number")
    where: str = Field(description="the paper, and where in it")
    when: dict[str, Any] = Field(
        default_factory=dict, description="keys of this file and their values: only compared where they have them"
    )


ExchangeKind = Literal["gather", "parameter_server", "ring_all_gather", "ring_all_reduce", "sparse_ring"]


class SimulateSettings(Settings):
    """Machines, fleets and the exchange in a prediction."""

    machine: str = Field(ASSUMED, description="hardware of members that name none")
    hardware: dict[str, Hardware] = Field(default_factory=dict, description="entries beside the catalog's")
    measured: Annotated[dict[str, MeasuredCost], WhomItConcerns()] = Field(
        default_factory=dict, description="by member"
    )
    fleets: Annotated[dict[str, FleetSettings], WhomItConcerns()] = Field(
        default_factory=dict, description="by replica"
    )
    exchange: ExchangeKind = Field(
        "gather",
        description="how contributions are exchanged: `gather` is what `launch` does, and an object store; the others "
        "are predicted only",
    )
    aggregate: Literal["union", "dense"] = Field(
        "union", description="what a parameter server sends back: what any replica sent, or every parameter"
    )
    exchange_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="of the exchange itself, each way, shared by all members; unlimited by default"
    )
    sites: Annotated[dict[str, SiteSettings], WhomItConcerns()] = Field(
        default_factory=dict, description="members that share an uplink"
    )
    published: list[PublishedNumber] = Field(default_factory=list, description="numbers of papers, shown beside ours")
    rows: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by name, keys of this file and values: a prediction with each, as a sweep"
    )
    sweep: str | None = Field(None, description="KEY=FROM..TO or KEY=A,B: predict at these values, as --sweep does")
    curves: str | None = Field(None, description="KEY=A,B: a curve of the sweep for each, as --curves does")
    tokens: int | None = Field(None, ge=1, description="token budget; by default that of the run")
    seed: int = Field(0, ge=0, description="of jitter and fleets")

    @model_validator(mode="after")
    def _one_sweep(self) -> SimulateSettings:
        if self.rows and self.sweep is not None:
            raise ValueError("found `rows` and `sweep`, expected only one of them")
        return self
