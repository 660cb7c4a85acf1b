"""What every section of the configuration is made of: the base class, types with units; and what a section means."""

from __future__ import annotations

from enum import Flag, auto
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.fields import FieldInfo

from hetero_pp.units import BITS_PER_SECOND, BYTES, FLOPS, SECONDS, parse_fraction, parse_quantity


class Settings(BaseModel):
    """A section of the YAML: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NotPartOf(Flag):
    """Marks a field, in its annotation: with another value it may be the same run, or come to the same outcome."""

    RUN = auto()
    """The run stays the same: hosts need not agree on where each keeps its files, listens, or how it computes."""
    OUTCOME = auto()
    """What the run comes to stays the same but for rounding, if it reads the same tokens."""
    PAST = auto()
    """What the run has done, and what it goes on with, stay what they are: it may change when the run goes on."""
    EITHER = RUN | OUTCOME


class AddedLater:
    """Marks a field, in its annotation, without which settings meant what they mean with its default: runs that do not
    say it keep their names."""


class WhomItConcerns:
    """Marks a mapping by names, in its annotation: its entries concern members or replicas, by their keys or by what
    they say. Entries of others are kinds, of links for example, and do nothing unless something else names them."""


def meaning(settings: Settings, without: NotPartOf, defaults: bool = True) -> dict[str, Any]:
    """What settings say, as JSON, without the fields that are marked so (or with one of several marks).

    Without `defaults`, fields that say what they would say if they were left out are left out. A field that is added
    to a section later, with a default that changes nothing, then changes no meaning. With them, it does unless it is
    marked as AddedLater.
    """
    return _without(without, defaults, settings, settings.model_dump(mode="json"))


def _without(marked: NotPartOf, defaults: bool, value: Any, dumped: Any) -> Any:
    """Of a value and the same as JSON, what of the JSON is left."""
    if isinstance(value, Settings):
        return {
            name: _without(marked, defaults, getattr(value, name), dumped[name])
            for name, field in type(value).model_fields.items()
            if not _is_marked(field, marked)
            and ((defaults and not _is_added_later(field)) or not _is_default(field, getattr(value, name), marked))
        }
    if isinstance(value, dict):
        parts = zip(value.values(), dumped.items(), strict=True)
        return {key: _without(marked, defaults, part, as_json) for part, (key, as_json) in parts}
    if isinstance(value, list | tuple):
        return [_without(marked, defaults, part, as_json) for part, as_json in zip(value, dumped, strict=True)]
    return dumped


def _is_marked(field: FieldInfo, mark: NotPartOf) -> bool:
    return any(isinstance(one, NotPartOf) and mark & one for one in field.metadata)


def _is_added_later(field: FieldInfo) -> bool:
    return any(isinstance(one, AddedLater) for one in field.metadata)


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
    """A number as it is, as the key says its unit."""
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
"""Of a key whose name says the unit."""
Size = Annotated[float, *_quantity(BYTES, "B", "512 MiB")]
Speed = Annotated[float, *_quantity(FLOPS, "FLOP/s", "989 TFLOP/s")]
Ratio = Annotated[
    float,
    BeforeValidator(parse_fraction),
    WithJsonSchema({"type": ["number", "string"], "examples": ["1/8"], "description": "a number or a ratio"}),
]
