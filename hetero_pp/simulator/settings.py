"""The `simulate` section: what a prediction needs beyond the topology. Training does not read it."""

from __future__ import annotations

from pydantic import Field

from hetero_pp.settings import Bandwidth, Duration, Ratio, Settings
from hetero_pp.simulator.hardware import Hardware


class MeasuredCost(Settings):
    """What one member was measured to need, as `calibrate` writes it; replaces what its hardware would."""

    forward: Duration = Field(ge=0, description="one micro-batch, with encoding and decoding of messages")
    backward: Duration = Field(ge=0)
    update: Duration = Field(ge=0, description="one optimizer step")
    contribute: Duration = Field(ge=0, description="compressing the pseudo-gradient")
    apply: Duration = Field(ge=0, description="decoding and applying what others sent")
    evaluate: Duration = Field(ge=0, description="forward of one validation batch")


class FleetSettings(Settings):
    """Many replicas where the topology names one: each drawn anew."""

    count: int = Field(ge=1)
    bandwidth: tuple[Bandwidth, Bandwidth] | None = Field(
        None, description="between stages, from and to: drawn evenly on a logarithmic scale, one for each hop"
    )
    uplink: tuple[Bandwidth, Bandwidth] | None = Field(None, description="to the exchange, likewise for each member")
    stragglers: Ratio = Field(0.0, ge=0, le=1, description="share of members that are slow")
    slowdown: float = Field(3.0, ge=1, description="how many times slower stragglers compute")
    churn: Ratio = Field(0.0, ge=0, lt=1, description="share of members that leave within a round")


class SimulateSettings(Settings):
    """How machines, fleets and the exchange are in a prediction."""

    machine: str = Field("cpu-core", description="hardware of members that name none")
    hardware: dict[str, Hardware] = Field(default_factory=dict, description="entries beside the catalog's")
    measured: dict[str, MeasuredCost] = Field(default_factory=dict, description="by member")
    fleets: dict[str, FleetSettings] = Field(default_factory=dict, description="by replica")
    exchange_bandwidth: Bandwidth | None = Field(
        None, gt=0, description="of the exchange itself, each way, shared by all members; unlimited by default"
    )
    sweep: str | None = Field(None, description="KEY=FROM..TO or KEY=A,B: predict at these values, as --sweep does")
    curves: str | None = Field(None, description="KEY=A,B: a curve of the sweep for each, as --curves does")
    tokens: int | None = Field(None, ge=1, description="token budget; by default that of the run")
    seed: int = Field(0, ge=0, description="of jitter and fleets")
