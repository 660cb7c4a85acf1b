"""The `simulate` section: input of predictions beyond the topology. Training does not read it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_pp.config.settings import Bandwidth, Duration, Ratio, Settings, WhomItConcerns
from hetero_pp.core.units import parse_any
from hetero_pp.run.hardware import ASSUMED, Hardware


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


class SimulatedSiteSettings(Settings):
    """Members behind one link to the exchange, which replaces their own uplinks."""

    members: list[str] = Field(min_length=1, description="members, or replicas with all of their members")
    uplink: str = Field(description="kind of link that they share, from `links`")


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
    aggregate: Literal["union", "dense"] = Field(
        "union", description="answer of a parameter server: every value that any replica sent, or all parameters"
    )
    exchange_bandwidth: Bandwidth | None = Field(
        None,
        gt=0,
        description="bandwidth of the exchange in each direction, shared by all members; unlimited by default",
    )
    sites: Annotated[dict[str, SimulatedSiteSettings], WhomItConcerns()] = Field(
        default_factory=dict, description="members that share an uplink, by name of the site"
    )
    published: list[PublishedNumber] = Field(
        default_factory=list, description="numbers from papers, shown beside the prediction"
    )
    rows: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="rows of predictions: values of keys of this file, by name of the row"
    )
    sweep: str | None = Field(None, description="KEY=FROM..TO or KEY=A,B: predict at these values, as --sweep does")
    curves: str | None = Field(None, description="KEY=A,B: draw one curve of the sweep for each, as --curves does")
    tokens: int | None = Field(None, ge=1, description="token budget; by default the run's")
    seed: int = Field(0, ge=0, description="seed of jitter")

    @model_validator(mode="after")
    def _one_sweep(self) -> SimulateSettings:
        if self.rows and self.sweep is not None:
            raise ValueError("found `rows` and `sweep`, expected only one of them")
        return self
