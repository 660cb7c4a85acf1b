"""Settings of a part of the model on one machine: its precision, the layers of a stage, the boundary to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hetero_pp.core.settings import Ratio, Settings
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
    embedding: EmbeddingTraining = Field(
        "free",
        description="training of the embedding's part T_S between rounds, if the rank is not full: `free` (leaves the "
        "subspace until the next split), `coefficients` (C of T_S = C U^T, which stays in it as in Het-PP 2.4), or "
        "`projected` (back onto the subspace after each step); by default `coefficients` with `outer.method: het_pp`",
    )
    anchors: AnchorSettings | None = Field(
        None, description="components that receivers learn in place of the dropped ones"
    )

    def dimensions(self, width: int) -> int | None:
        """Return k for a model of this width d; None if the boundary is not compressed."""
        return dimensions_of(self.rank, width)


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


Precision = Literal["auto", "fp32", "bf16"]
