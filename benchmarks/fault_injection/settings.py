"""The settings of a file of faults: kind, target and time of each fault."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from hetero_pp.core.settings import Duration, Settings
from hetero_pp.core.units import parse_quantity
from hetero_pp.store.faults import FaultPhase

_RATES = {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}

Rate = Annotated[
    float,
    BeforeValidator(lambda value: parse_quantity(value, _RATES, "125/h")),
    PlainSerializer(lambda value: f"{value!r} /s", return_type=str),
    WithJsonSchema({"type": "string", "examples": ["125/h"], "description": "such as `125/h`"}),
]


class Kind(StrEnum):
    """Kind of a fault: the key that begins its entry."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    DELAY = "delay"
    CORRUPT = "corrupt"
    FILL = "fill"
    MISS = "miss"


class Moment(Settings):
    """A point of a round, as the member comes to it; for the exchange, the first member."""

    round: int = Field(ge=1)
    phase: FaultPhase = FaultPhase.TRAINING
    step: int | None = Field(None, ge=0, description="inner step of a stage in the round, from 0; H: the final flush")
    micro_batch: int = Field(0, ge=0, description="micro-batch of that step, from 0, whose forward it comes to")

    @property
    def point(self) -> str:
        """The phase, or the step and micro-batch."""
        return self.phase if self.step is None else point_of(self.step, self.micro_batch)


def point_of(step: int, micro_batch: int) -> str:
    """Return the name of a point within the inner loop of a stage."""
    return f"step {step}, micro-batch {micro_batch}"


class Fault(Settings):
    """Done once: `at` a point of a round, or so long `after` the run began to train."""

    at: Moment | None = None
    after: Duration | None = None

    @model_validator(mode="after")
    def _has_a_moment(self) -> Self:
        if (self.at is None) == (self.after is None):
            found = "neither" if self.at is None else "both"
            raise ValueError(f"found {found}, expected one of `at: {{round: 3}}` and `after: 30 s`")
        return self


class Kill(Fault):
    """SIGKILL."""

    kill: str = Field(description="member, or `exchange`")
    rank: int | None = Field(None, ge=0, description="one rank of a replica on several ranks; by default all")


class Freeze(Fault):
    """SIGSTOP, and SIGCONT later."""

    freeze: str = Field(description="member, or `exchange`")
    lasts: Duration = Field(20.0, gt=0)


class Cut(Fault):
    """Connections break, and none can be made."""

    cut: str = Field(description="link, such as `home.0-1` (between stages 0 and 1) or `home.1-exchange`")
    lasts: Duration = Field(5.0, gt=0)


class Delay(Fault):
    """Whatever passes takes longer."""

    delay: str = Field(description="link, as for `cut`")
    by: Duration = Field(0.2, gt=0, description="added delay in each direction")
    lasts: Duration = Field(20.0, gt=0)


class Corrupt(Fault):
    """One bit is flipped."""

    corrupt: str = Field(description="member, or `exchange`")
    what: Literal["theta", "state", "checkpoint"] = Field(
        "theta",
        description="target: `theta` in a member's memory at the start of its next round, a member's "
        "newest `state`, or the newest `checkpoint` of the exchange",
    )


class Fill(Fault):
    """Writes fail as on a full disk."""

    fill: str = Field(description="member, or `exchange`")
    lasts: Duration = Field(5.0, gt=0)


class Miss(Settings):
    """A replica's contributions arrive once the records of their rounds are there."""

    miss: str = Field(description="replica")
    rounds: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)


class AtRate(Settings):
    """Faults at random, each at any time, of any of these kinds, to any of these members, as likely as the others."""

    rate: Rate = Field(gt=0, description="rate of all these faults together")
    of: list[Literal["kill", "freeze", "cut", "delay"]] = Field(min_length=1)
    members: list[str] = Field(
        [],
        description="affected members; by default all members and the exchange. "
        "A link belongs to the member that dials it",
    )
    seed: int = Field(0, ge=0)
    lasts: Duration = Field(20.0, gt=0, description="duration of each fault except `kill`")
    by: Duration = Field(0.2, gt=0, description="delay added by `delay`")


AnyFault = Kill | Freeze | Cut | Delay | Corrupt | Fill | Miss | AtRate

FAULTS: dict[str, type[AnyFault]] = {
    "kill": Kill,
    "freeze": Freeze,
    "cut": Cut,
    "delay": Delay,
    "corrupt": Corrupt,
    "fill": Fill,
    "miss": Miss,
    "rate": AtRate,
}
"""Models of entries, by the key that selects them."""


class FaultFile(Settings):
    """Faults to inject into a run."""

    faults: list[AnyFault] = Field(min_length=1)


def kind_of(entry: Any) -> str | None:
    """Return the key that selects the fault of an entry; None if there is none."""
    return next((key for key in FAULTS if isinstance(entry, dict) and key in entry), None)
