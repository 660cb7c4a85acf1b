"""Keys that the YAML may have at each place, from the settings' types; and the places that a user's key names."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from hetero_pp.config.settings import WhomItConcerns
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.run.config import RunConfig

Key = tuple[str | int, ...]


def sibling_keys(key: Sequence[str | int], model: type[BaseModel] = RunConfig) -> list[str]:
    """Return the keys that the section around `key` may have, in a file described by `model`."""
    candidates: list[Any] = [model]
    for part in key[:-1]:
        candidates = [below for candidate in candidates for below in _step(candidate, part)]
    return sorted({name for model in candidates for name in getattr(model, "model_fields", {})})


def entry_of(key: Sequence[str | int]) -> tuple[str, ...] | None:
    """Return the beginning of a key that names an entry which others refer to: ("links", "dsl"); None without one."""
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
    """Return the types under `part` in a section, a list, a mapping or a union of them (flattened to plain types)."""
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


def places_of(root: Any, key: Sequence[str | int]) -> list[Key]:
    """Return the places in a YAML's content that a key names.

    An entry of a list is named by its number or by its `name`. `replicas.boundary.rank` names the key of every replica
    whose kind has it. If a part names no entry or several, raises ConfigError that lists the entries.
    """
    return list(_places(root, (), tuple(key)))


def keys_of_replica(entry: Any) -> set[str]:
    """Return the keys of the replica's kind; those of all kinds if the entry has no `kind`."""
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    models = {get_args(model.model_fields["kind"].annotation)[0]: model for model in _flatten(ReplicaSettings)}
    return {name for tag, model in models.items() if kind in (tag, None) for name in model.model_fields}


def _places(node: Any, here: Key, rest: Key) -> Iterator[Key]:
    if not rest:
        yield here
    elif isinstance(node, list):
        named, having = _entries(node, here, rest[0])
        for index in named:
            yield from _places(node[index], (*here, index), rest[1:])
        for index in having:
            yield from _places(node[index], (*here, index), rest)
    else:
        below = node.get(rest[0]) if isinstance(node, Mapping) else None
        yield from _places(below, (*here, rest[0]), rest[1:])


def _entries(entries: Sequence[Any], here: Key, part: str | int) -> tuple[list[int], list[int]]:
    """Return the entry named `part`, or else all replicas that have a key `part`."""
    named = [index for index, entry in enumerate(entries) if part == index or str(part) == _name_of(entry)]
    having = [index for index, entry in enumerate(entries) if here == ("replicas",) and part in keys_of_replica(entry)]
    if len(named) + bool(having) == 1:
        return named, having
    there = ", ".join(_called(index, entry) for index, entry in enumerate(entries))
    where = f"`{'.'.join(map(str, here))}`"
    if named:
        meanings = [f"entry {_called(index, entries[index])}" for index in named] + ["a key of replicas"] * bool(having)
        told = f"found `{part}`, which is {' and '.join(meanings)} of {where}"
        raise ConfigError((), f"{told}, expected a number, or a name that only one entry has: {there}")
    if not entries:
        raise ConfigError((), f"found no entry `{part}` in {where}, which has no entries")
    close = difflib.get_close_matches(str(part), [name for entry in entries if (name := _name_of(entry))], n=1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    keys = ", or a key of replicas, such as `batch_size`" if here == ("replicas",) else ""
    raise ConfigError((), f"found no entry `{part}` in {where}, expected one of {there}{keys}{hint}")


def _name_of(entry: Any) -> str | None:
    return str(entry["name"]) if isinstance(entry, Mapping) and "name" in entry else None


def _called(index: int, entry: Any) -> str:
    name = _name_of(entry)
    return f"{index}" if name is None else f"{index} ({name})"
