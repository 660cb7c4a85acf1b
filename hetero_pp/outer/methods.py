"""A method is a row of parts: what the papers call SparseLoCo, DiLoCo or AdamW DDP, as changed cells.

`outer.method` names a row; single cells can be overridden beside it, and an ablation is one changed cell.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.settings import AddedLater, NotPartOf, Ratio, Settings

_DENSE = {"density": 1.0, "value_bits": 32, "error_feedback_decay": 0.0}

METHODS: dict[str, dict[str, Any]] = {
    # Sarfi et al. 2025: error feedback instead of outer momentum. All other cells are the defaults.
    "sparseloco": {},
    # The same with what the paper sends: 32 of 4096 values in 2 bits.
    "sparseloco_paper": {"compression": {"density": 1 / 128, "quantiser": "levels", "value_bits": 2}},
    # Douillard et al. 2023: everything is sent, outer Nesterov.
    "diloco": {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True, "compression": _DENSE},
    # Gradients averaged every step, clipped after averaging, one AdamW (its step is the inner section's).
    "adamw_ddp": {"source": "gradient", "compression": _DENSE},
}


class OuterSettings(Settings):
    """The outer rounds: a row of parts."""

    rounds: Annotated[int, NotPartOf.PAST] = Field(ge=1)
    method: Literal["sparseloco", "sparseloco_paper", "diloco", "adamw_ddp"] = Field(
        "sparseloco", description="sets the cells below"
    )
    source: Literal["difference", "gradient"] = Field(
        "difference", description="what is averaged: parameter differences after H steps, or gradients every step"
    )
    learning_rate: Annotated[float, NotPartOf.PAST] = Field(1.0, gt=0, description="eta in the paper")
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    divides_by: Literal["replicas", "senders"] = Field(
        "replicas", description="the mean of a coordinate is over all replicas, or over those that sent it"
    )
    weights: Annotated[Literal["equal", "tokens"], AddedLater()] = Field(
        "equal", description="of contributions in a round's mean; `tokens`: by how many a replica trained on in it"
    )
    returned: Annotated[Ratio, AddedLater()] = Field(
        0.5, ge=0, le=1, description="how much of a contribution that no round counted goes back into error feedback"
    )
    missed: Annotated[Ratio, AddedLater()] = Field(
        0.0, ge=0, lt=1, description="share of the contributions that `reproduce` does not count, drawn at random"
    )
    compression: CompressionSettings = CompressionSettings()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_method(cls, values: Any) -> Any:
        """Cells that the user did not set come from the method's row."""
        if not isinstance(values, dict):
            return values
        row = METHODS.get(values.get("method", "sparseloco"), {})
        filled = {**row, **values}
        own = values.get("compression", {})
        if "compression" in row and isinstance(own, dict):
            filled["compression"] = {**row["compression"], **own}
        return filled

    @model_validator(mode="after")
    def _gradients_weigh_the_same(self) -> OuterSettings:
        if self.weights != "equal" and self.source == "gradient":
            raise ValueError(f"found weights `{self.weights}` with averaged gradients, expected `equal`")
        return self

    def weight(self, tokens: int) -> float:
        """Of a contribution to a round that so many tokens came to; the mean divides by the sum of those counted."""
        return float(tokens) if self.weights == "tokens" else 1.0

    @model_validator(mode="after")
    def _gradients_are_all_counted(self) -> OuterSettings:
        if self.missed > 0 and self.source == "gradient":
            raise ValueError(
                f"found missed {self.missed:g} with averaged gradients, expected 0 or averaged differences"
            )
        return self
