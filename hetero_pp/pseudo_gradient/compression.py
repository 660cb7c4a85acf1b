"""Settings of a pseudo-gradient's compression, which sender and receivers share."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import NotPartOf, Ratio, Settings

_Length = Annotated[int, Field(ge=1, le=2**32 - 1)]  # rows or columns of a chunk; a contribution has four bytes for it


class CompressionSettings(Settings):
    """Settings of a pseudo-gradient's compression."""

    density: Ratio = Field(1 / 32, gt=0, le=1, description="share of each chunk that is kept (k / chunk)")
    tile: tuple[_Length, _Length] = Field((64, 64), description="rows and columns of a chunk of a matrix")
    transform: Literal["none", "dct"] = Field(
        "none", description="`dct`: keep, send and average the coefficients of each chunk's cosine transform"
    )
    selection: Literal["top_k", "random_k"] = Field("top_k", description="choice of the values to keep in a chunk")
    quantiser: Literal["levels", "signs"] = Field(
        "signs",
        description="`signs`: 1 bit per value and one magnitude per chunk; `levels`: 2^value_bits values per tensor",
    )
    value_bits: Literal[1, 2, 3, 4, 8, 32] = Field(
        1, description="bits of a kept value; 32: not quantised. More than 1 bit requires `quantiser: levels`"
    )
    memory: Literal["error_feedback", "momentum"] = Field(
        "error_feedback",
        description="memory of a replica between rounds: `error_feedback` keeps values that were not sent; "
        "`momentum` keeps a momentum of the replica, which is sent with each difference (DiLoCo-LOM)",
    )
    error_feedback_decay: float = Field(0.95, ge=0, le=1, description="decay of the memory (beta in the papers)")
    accelerator: Annotated[Literal["torch", "numba", "compile"], NotPartOf.EITHER] = Field(
        "torch",
        description="implementation of the selection: numba (`pip install "
        "hetero-pp[numba]`) on a CPU, torch.compile on a GPU",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_implies_the_other(cls, values: Any) -> Any:
        """Derive a missing setting: `value_bits` above 1 implies levels; levels imply the paper's 2 bits."""
        if not isinstance(values, dict) or ("quantiser" in values and "value_bits" in values):
            return values
        if values.get("value_bits", 1) != 1:
            return {**values, "quantiser": "levels"}
        return {**values, "value_bits": 2} if values.get("quantiser") == "levels" else values

    @model_validator(mode="after")
    def _signs_are_one_bit(self) -> CompressionSettings:
        if self.quantiser == "signs" and self.value_bits != 1:
            raise ValueError(f"found value_bits {self.value_bits} with `quantiser: signs`, expected 1 or `levels`")
        return self

    def require_accelerator(self) -> None:
        """Raise ConfigError if the accelerator is not installed."""
        if self.accelerator == "numba" and importlib.util.find_spec("numba") is None:
            raise ConfigError(
                ("outer", "compression", "accelerator"),
                "found `numba`, which is not installed; install it with: pip install 'hetero-pp[numba]'",
            )
