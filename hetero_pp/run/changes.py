"""Single values of the YAML, changed from outside: `outer.rounds=20`, `replicas.1.boundary.rank=1/32`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from hetero_pp.errors import ConfigError
from hetero_pp.outer.methods import change_method
from hetero_pp.run.config import RunConfig
from hetero_pp.run.known_keys import entry_of

METHOD = ["outer", "method"]
"""Whose cells a change of it brings along."""

Entry = tuple[str, ...]
"""Where an entry stands that others name, such as a kind of link: ("links", "dsl")."""


def change(root: CommentedMap, text: str, path: Path) -> Entry | None:
    """Make a change in the content of a file; the entry that it adds, if it does.

    Raises ConfigError where the file has no such place.
    """
    name, separator, value = text.partition("=")
    key: list[str | int] = [int(part) if part.isdigit() else part for part in name.strip().split(".")]
    if not separator or not name.strip():
        raise ConfigError((), f"--set {text}: expected KEY=VALUE such as `outer.rounds=20`")
    try:
        content = YAML(typ="rt").load(value)
    except YAMLError:
        raise ConfigError((), f"{text}: found a value that is not YAML") from None
    entry = entry_of(key)
    is_new = entry is not None and not _has(root, entry)
    node: Any = root
    for position, part in enumerate(key):
        _require_place(node, key[:position], part, f"{text}: there is no such key in {path}")
        if position == len(key) - 1:
            _put(node, key, content)
        elif isinstance(node, CommentedMap) and node.get(part) is None:
            node[part] = CommentedMap()
        node = node[part]
    return entry if is_new else None


def _put(node: Any, key: Sequence[str | int], content: Any) -> None:
    if key == METHOD and isinstance(node, CommentedMap):
        change_method(node, content)
    else:
        node[key[-1]] = content


def require_named(config: RunConfig, added: Sequence[Entry]) -> None:
    """Raise ConfigError for an entry that was added and that nothing names: it would change nothing."""
    for entry in added:
        dumped = config.model_dump(mode="json")
        section: Any = dumped
        for part in entry[:-1]:
            section = section[part]
        is_there = section.pop(entry[-1], None) is not None
        if is_there and entry[-1] not in _texts(dumped):
            close = difflib.get_close_matches(entry[-1], section, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            none = f"one that some setting names, as the file has no {'.'.join(entry[:-1])}"
            known = f"one of {', '.join(section)}" if section else none
            raise ConfigError(entry, f"found a name that nothing refers to, expected {known}{hint}")


def _has(root: Any, key: Sequence[str]) -> bool:
    for part in key:
        if not isinstance(root, CommentedMap) or part not in root:
            return False
        root = root[part]
    return True


def _require_place(node: Any, key: Sequence[str | int], part: str | int, complaint: str) -> None:
    """Raise ConfigError if a node cannot have a part of that name."""
    here = ".".join(map(str, key))
    if isinstance(node, CommentedSeq):
        if not isinstance(part, int) or part >= len(node):
            names = (f" ({one['name']})" if isinstance(one, dict) and "name" in one else "" for one in node)
            there = ", ".join(f"{index}{name}" for index, name in enumerate(names))
            raise ConfigError((), f"{complaint}; {here} has {there or 'no entries'}")
    elif not isinstance(node, CommentedMap):
        raise ConfigError((), f"{complaint}; {here} is a single value")


def _texts(content: Any) -> Iterator[str]:
    """What entries of lists and mappings say, but for the names that they have themselves."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            if key != "name":
                yield from _texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)
