"""Which keys the YAML may have at any place, from the settings' types."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from hetero_pp.run.config import RunConfig
from hetero_pp.settings import WhomItConcerns


def keys_beside(key: Sequence[str | int], model: type[BaseModel] = RunConfig) -> list[str]:
    """The keys that the section holding `key` may have, in what a `model` describes."""
    candidates: list[Any] = [model]
    for part in key[:-1]:
        candidates = [below for candidate in candidates for below in _step(candidate, part)]
    return sorted({name for model in candidates for name in getattr(model, "model_fields", {})})


def entry_of(key: Sequence[str | int]) -> tuple[str, ...] | None:
    """Of a key, its beginning that names an entry which others refer to: ("links", "dsl"); None if it has none."""
    section: Any = RunConfig
    for position, part in enumerate(key[:-1]):
        field = section.model_fields.get(str(part))
        if field is None:
            return None
        if get_origin(field.annotation) is dict and _is_section(get_args(field.annotation)[1]):
            refers = any(isinstance(one, WhomItConcerns) for one in field.metadata)
            return None if refers else tuple(map(str, key[: position + 2]))
        if not _is_section(field.annotation):
            return None
        section = field.annotation
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _step(annotation: Any, part: str | int) -> list[Any]:
    """What lies under `part` in a section, a list, a mapping or a union of them (flattened to plain types)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        if field is not None:
            return _flatten(field.annotation)
        tags = {get_args(f.annotation)[0] for f in annotation.model_fields.values() if get_args(f.annotation)}
        return [annotation] if part in tags or part == annotation.__name__ else []
    if get_origin(annotation) is list:
        return _flatten(get_args(annotation)[0]) if isinstance(part, int) else [annotation]
    if get_origin(annotation) is dict:
        return _flatten(get_args(annotation)[1])
    return []


def _flatten(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _flatten(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for option in get_args(annotation) for part in _flatten(option)]
    return [annotation]
