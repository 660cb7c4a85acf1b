"""Keys that the YAML may have at each place, from the settings' types; and the places that a user's key names."""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import WhomItConcerns
from hetero_pp.core.units import (
    format_bits_per_second,
    format_bytes,
    format_duration,
    format_ratio,
    parse_any,
    parse_fraction,
)
from hetero_pp.core.yaml_reader import parse_yaml, without_lines
from hetero_pp.outer.methods import change_method

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


# Overrides of single YAML values: `outer.rounds=20`, `replicas.home.boundary.rank=1/32`.


METHOD = ("outer", "method")  # key whose change also changes the cells of the method
Entry = tuple[str, ...]  # path of an entry that others refer to, such as a kind of link: ("links", "dsl")

_NAMED_STAGES = {"layers", "line"}
"""Keys in a list of stages that a number of stages can replace: it splits layers evenly, and keeps a common line."""


@dataclass(frozen=True)
class Override:
    """One value that was given beside the YAML."""

    key: Key  # Path of the value. Replicas are given by number or by name, or left out.
    value: Any
    shown: str  # text that the user gave, for error messages: `--set outer.rounds=20`
    merges: bool = False  # whether an empty mapping leaves an existing section unchanged

    @classmethod
    def parse(cls, text: str, option: str = "--set") -> Override:
        """Parse KEY=VALUE, with the value as YAML. Raises ConfigError that names the option and the text."""
        name, separator, value = text.partition("=")
        shown = f"{option} {text}"
        if not separator or not name.strip():
            raise ConfigError((), f"{shown}: expected KEY=VALUE such as `outer.rounds=20`")
        key = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
        if re.fullmatch(r"\s*\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*\]:[0-9]+\s*", value):
            return cls(key, value.strip(), shown)  # an IPv6 address with its port needs no quotes
        try:
            return cls(key, without_lines(parse_yaml(value)), shown)
        except ValueError as error:
            expected = "expected text with special characters in quotes, as KEY='\"TEXT\"'"
            raise ConfigError((), f"{shown}: found a value that is not YAML ({error}), {expected}") from None

    @classmethod
    def of_mapping(cls, changes: Mapping[Any, Any], path: object, key: Key = ()) -> Iterator[Override]:
        """Yield the values of nested mappings that change the YAML at `path`, such as {"outer": {"rounds": 20}}."""
        for part, value in changes.items():
            here = (*key, part)
            if isinstance(value, Mapping) and value:
                yield from cls.of_mapping(value, path, here)
            else:
                said = os.fspath(value) if isinstance(value, os.PathLike) else value
                shown = f"{path} with {'.'.join(map(str, here))}={said!r}"
                is_mapping = isinstance(value, Mapping)
                yield cls(here, {} if is_mapping else said, shown, is_mapping)

    def apply(self, root: dict[Any, Any]) -> tuple[list[Key], list[Entry]]:
        """Change the content of a YAML; return the places that were set, and the entries that are new.

        Raises ConfigError if the YAML has no such place.
        """
        try:
            places = places_of(root, self.key)
            added = []
            for entry in filter(None, map(entry_of, places)):
                section: Any = root
                for part in entry:
                    section = section.get(part) if isinstance(section, dict) else None
                if section is None:
                    added.append(entry)
            for place in places:
                self._put(root, place)
        except ConfigError as error:
            raise ConfigError((), f"{self.shown}: {error.message}") from None
        return places, added

    def _put(self, root: dict[Any, Any], place: Key) -> None:
        node: Any = root
        for position, part in enumerate(place[:-1]):
            below = _at(node, part)
            if below is None:
                node[part] = {}
            elif _is_stages(place[: position + 1]) and isinstance(below, int):
                node[part] = {"count": below}
            elif not isinstance(below, dict | list):
                here = ".".join(map(str, place[: position + 1]))
                raise ConfigError((), f"`{here}` is a single value, and has no key `{place[position + 1]}`")
            node = node[part]
        before = _at(node, place[-1])
        if place == METHOD:
            change_method(node, self.value)
        elif _is_stages(place) and type(self.value) is int:  # `true` is an int, too, and no number of stages
            node[place[-1]] = _with_count(before, self.value, place)
        elif not (self.merges and isinstance(before, dict)):
            node[place[-1]] = _plain(self.value)


Given = str | Override  # value beside the YAML: text for `--set`, or the override of another option


def in_order(overrides: Sequence[Override]) -> list[Override]:
    """Return the overrides in the order of application. The method comes first, because it resets cells."""
    return sorted(overrides, key=lambda one: one.key != METHOD)


def _at(node: Any, part: str | int) -> Any:
    """Return the item `part` of a section or a list; None if a section has no such key."""
    return node.get(part) if isinstance(node, dict) else node[part]


def _plain(value: Any) -> Any:
    """Return a copy of a value, of dicts and lists that have no lines of a file."""
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    return [_plain(below) for below in value] if isinstance(value, list | tuple) else value


def _commented(value: Any) -> Any:
    """Return a value as a node of a YAML's content."""
    if isinstance(value, Mapping):
        section = CommentedMap({key: _commented(below) for key, below in value.items()})
        if not any(isinstance(below, Mapping | list) for below in value.values()):
            section.fa.set_flow_style()
        return section
    return CommentedSeq(map(_commented, value)) if isinstance(value, list | tuple) else value


def _is_stages(place: Key) -> bool:
    return len(place) == 3 and (place[0], place[2]) == ("replicas", "stages")


def _with_count(before: Any, count: int, place: Key) -> Any:
    """Return `stages` with another number of stages; their line stays.

    Raises ConfigError for a list of stages that differ in more than their layers.
    """
    if isinstance(before, dict):
        return {**before, "count": count}
    if not isinstance(before, list) or not all(isinstance(one, dict) for one in before):
        return count
    own = {key: {str(one.get(key)) for one in before} for one in before for key in one}
    if lost := sorted(
        key for key, values in own.items() if key not in _NAMED_STAGES or (key == "line" and len(values) > 1)
    ):
        where, keys = ".".join(map(str, place)), ", ".join(f"`{key}`" for key in lost)
        told = f"found a number for `{where}`, but its entries set {keys}"
        raise ConfigError((), f"{told}, expected a list of stages, or `{{count: {count}}}` to drop these settings")
    line = before[0].get("line") if before else None
    return count if line is None else {"count": count, "line": line}


def put_changes(root: CommentedMap, before: RunConfig, after: RunConfig) -> None:
    """Change the content of a YAML, whose configuration is `before`, to that of `after`."""
    old, new = (config.model_dump(mode="json") for config in (before, after))
    short = after.model_dump(mode="json", exclude_defaults=True)
    was = {one["name"]: one for one in old.pop("replicas")}
    now = {one["name"]: one for one in new.pop("replicas")}
    found = {one["name"]: one for one in short.pop("replicas", [])}
    entries = []
    for entry in root.get("replicas") or []:
        numbered = rf"{re.escape(str(entry.get('name', '')))}-\d+"
        own = [name for name in was if re.fullmatch(numbered, name)] if entry.get("count") is not None else []
        own = own or [str(entry.get("name"))]
        settings = [{**now[name], "name": "", "optional": False} for name in own]
        if all(one == settings[0] for one in settings):
            _put_changed(entry, was[own[0]], now[own[0]], found[own[0]])
            entries.append(entry)
        else:  # the groups of one entry become different
            entries += [_commented(_readable(found[name])) for name in own]
    entries += [_commented(_readable(found[name])) for name in now if name not in was]
    if root.get("replicas") is None or len(entries) != len(root["replicas"]):
        root["replicas"] = CommentedSeq(entries)
    _put_changed(root, old, new, short)


def _put_changed(node: CommentedMap, old: Mapping[str, Any], new: Mapping[str, Any], short: Mapping[str, Any]) -> None:
    """Set the keys in which `new` differs from `old`; `short` is `new` without defaults."""
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) == new.get(key) and key in old and key in new:
            continue
        if new.get(key) is None:
            node.pop(key, None)
        elif isinstance(node.get(key), CommentedMap) and isinstance(old.get(key), dict) and isinstance(new[key], dict):
            _put_changed(node[key], old[key], new[key], short.get(key, {}))
        else:
            value = short.get(key, new[key])
            node[key] = _commented(
                _readable(value, key) if isinstance(value, dict | list) else _readable(new[key], key)
            )


_FORMATTED = {"bit/s": format_bits_per_second, "s": format_duration, "B": format_bytes}
_RATIOS = ("rank", "density")


def _readable(value: Any, key: str = "") -> Any:
    """Return a value of a dumped configuration as people write it, if that has exactly the same meaning."""
    if isinstance(value, dict):
        return {name: _readable(below, name) for name, below in value.items() if below is not None}
    if isinstance(value, list):
        return [_readable(below, key) for below in value]
    if isinstance(value, float) and key in _RATIOS:
        return shown if parse_fraction(shown := format_ratio(value)) == value else value
    number, _, unit = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if unit in _FORMATTED:
        with suppress(ValueError):
            if parse_any(shown := _FORMATTED[unit](float(number))) == float(number):
                return shown
    return value


def require_named(config: RunConfig, added: Sequence[Entry]) -> None:
    """Raise ConfigError for a new entry that nothing refers to, because it would change nothing."""
    for entry in added:
        dumped = config.model_dump(mode="json")
        section: Any = dumped
        for part in entry[:-1]:
            section = section[part]
        is_there = section.pop(entry[-1], None) is not None
        if is_there and entry[-1] not in _texts(dumped):
            close = difflib.get_close_matches(entry[-1], section, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            none = f"a name that another setting uses, as the file has no {'.'.join(entry[:-1])}"
            known = f"one of {', '.join(section)}" if section else none
            raise ConfigError(entry, f"found a name that no setting uses, expected {known}{hint}")


def _texts(content: Any) -> Iterator[str]:
    """Yield the text values of entries in lists and mappings, except their own names."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            if key != "name":
                yield from _texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)
