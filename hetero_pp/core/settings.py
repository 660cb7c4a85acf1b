"""Base class, annotations and types with units for all sections of the configuration, and the meaning of a section."""

from __future__ import annotations

from enum import Flag, auto
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from hetero_pp.core.units import BITS_PER_SECOND, BYTES, FLOPS, SECONDS, parse_count, parse_fraction, parse_quantity


class Settings(BaseModel):
    """A section of the YAML: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: Any) -> Any:
        """Turn `true` for a number into text, which is none: to Python it is 1."""
        if not isinstance(values, dict):
            return values
        kept = dict(values)
        for key, field in cls.model_fields.items():
            parts = value if isinstance(value := kept.get(key), list | tuple) else [value]
            if any(isinstance(one, bool) for one in parts):
                kinds = _kinds_in(field.annotation)
                if bool not in kinds and kinds & {int, float}:
                    written = [str(one).lower() if isinstance(one, bool) else one for one in parts]
                    kept[key] = written if isinstance(value, list | tuple) else written[0]
        return kept


def _kinds_in(annotation: Any) -> set[Any]:
    """Return the types that an annotation allows, and those of its literals and of items of lists and tuples."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {type(one) for one in parts}
    if get_origin(annotation) is dict:
        return set()
    return set().union(*map(_kinds_in, parts)) if parts else {annotation}


class NotPartOf(Flag):
    """Mark of a field, in its annotation: another value may give the same run, or the same outcome."""

    RUN = auto()
    """The run stays the same. Hosts need not agree on where each keeps its files or listens, or how it computes."""
    OUTCOME = auto()  # the outcome of the run stays the same up to rounding, if it reads the same tokens
    PAST = auto()
    """The finished rounds and the state of the run stay valid, so the value may change when the run is resumed."""
    EITHER = RUN | OUTCOME


class WhomItConcerns:
    """Mark of a mapping by names, in its annotation: its entries concern members or replicas, by key or by content.

    Entries of other mappings are kinds, such as kinds of links, which have no effect unless something refers to them.
    """


def meaning(settings: Settings, without: NotPartOf, defaults: bool = True) -> dict[str, Any]:
    """Return the content of settings as JSON, without the fields that have one of the marks `without`.

    Without `defaults`, fields that have their default value are left out. A field that is added to a section later,
    with a default that changes nothing, then does not change the meaning. With `defaults` it does.
    """
    return _without(without, defaults, settings, settings.model_dump(mode="json"))


def _without(marked: NotPartOf, defaults: bool, value: Any, dumped: Any) -> Any:
    """Return the part of `dumped`, the JSON of `value`, that remains without marked fields."""
    if isinstance(value, Settings):
        return {
            name: _without(marked, defaults, getattr(value, name), dumped[name])
            for name, field in type(value).model_fields.items()
            if not any(isinstance(one, NotPartOf) and marked & one for one in field.metadata)
            and (defaults or not _is_default(field, getattr(value, name), marked))
        }
    if isinstance(value, dict):
        parts = zip(value.values(), dumped.items(), strict=True)
        return {key: _without(marked, defaults, part, as_json) for part, (key, as_json) in parts}
    if isinstance(value, list | tuple):
        return [_without(marked, defaults, part, as_json) for part, as_json in zip(value, dumped, strict=True)]
    return dumped


def _is_default(field: FieldInfo, value: Any, marked: NotPartOf) -> bool:
    if field.is_required():
        return False
    default = field.get_default(call_default_factory=True)
    if isinstance(value, Settings) and isinstance(default, Settings):
        return meaning(value, marked, defaults=False) == meaning(default, marked, defaults=False)
    return bool(value == default)


def _quantity(units: dict[str, float], base_unit: str, example: str) -> tuple[object, ...]:
    return (
        BeforeValidator(lambda value: parse_quantity(value, units, example)),
        PlainSerializer(lambda value: f"{value!r} {base_unit}", return_type=str),
        WithJsonSchema({"type": "string", "examples": [example], "description": f"such as `{example}`"}),
    )


def _seconds(value: Any) -> float:
    """Return a number unchanged, because the key names its unit; parse a text as a duration."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else parse_quantity(value, SECONDS, "5 min")


Bandwidth = Annotated[float, *_quantity(BITS_PER_SECOND, "bit/s", "100 Mbit/s")]
Duration = Annotated[float, *_quantity(SECONDS, "s", "20 ms")]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    PlainSerializer(lambda value: f"{value!r} s", return_type=str),
    WithJsonSchema({"type": ["number", "string"], "examples": ["5 min"], "description": "seconds, or such as `5 min`"}),
]
"""Seconds. The key names the unit, so a plain number is allowed."""
Size = Annotated[float, *_quantity(BYTES, "B", "512 MiB")]
Speed = Annotated[float, *_quantity(FLOPS, "FLOP/s", "989 TFLOP/s")]
Count = Annotated[
    int,
    BeforeValidator(parse_count),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["10B"], "description": "a number, or such as `500M`"}),
]
Beta = Annotated[float, Field(ge=0, lt=1)]  # decay of a moment of Adam

Ratio = Annotated[
    float,
    BeforeValidator(parse_fraction),
    WithJsonSchema({"type": ["number", "string"], "examples": ["1/8"], "description": "a number or a ratio"}),
]
