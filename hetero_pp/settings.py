"""What every section of the configuration is made of: the base class, and the types that carry units."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from hetero_pp.units import BITS_PER_SECOND, BYTES, FLOPS, SECONDS, parse_fraction, parse_quantity


class Settings(BaseModel):
    """A section of the YAML: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _quantity(units: dict[str, float], base_unit: str, example: str) -> tuple[object, ...]:
    return (
        BeforeValidator(lambda value: parse_quantity(value, units, example)),
        PlainSerializer(lambda value: f"{value!r} {base_unit}", return_type=str),
        WithJsonSchema({"type": "string", "examples": [example], "description": f"such as `{example}`"}),
    )


Bandwidth = Annotated[float, *_quantity(BITS_PER_SECOND, "bit/s", "100 Mbit/s")]
Duration = Annotated[float, *_quantity(SECONDS, "s", "20 ms")]
Size = Annotated[float, *_quantity(BYTES, "B", "512 MiB")]
Speed = Annotated[float, *_quantity(FLOPS, "FLOP/s", "989 TFLOP/s")]
Ratio = Annotated[
    float,
    BeforeValidator(parse_fraction),
    WithJsonSchema({"type": ["number", "string"], "examples": ["1/8"], "description": "a number or a ratio"}),
]
