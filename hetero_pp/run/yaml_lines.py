"""YAML file with the line of each key; its errors have one line: file, line, key, found, expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from hetero_pp.core.bounded import YAML_BYTES_MAX, parse_ordinary_yaml, parse_yaml, read_bounded, yaml_complaint
from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.run.config import RunConfig
from hetero_pp.run.known_keys import Key, sibling_keys


class YamlLines:
    """Content of a YAML file (`root`), and the line of each key.

    Raises ConfigError if it cannot be read, is not YAML, or has no keys and values at its top.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = read_bounded(path, YAML_BYTES_MAX)  # once, because it may be a stream
        except (OSError, ValueError) as error:
            raise ConfigError((), yaml_complaint(path, error)) from None
        ordinary = parse_ordinary_yaml(self._data)
        self._ordinary = ordinary if isinstance(ordinary, dict) else plain(self.root)

    def located(self, error: ConfigError, model: type[BaseModel] = RunConfig) -> ConfigError:
        """Return the error with file and line in front; `model` describes the file."""
        key, line = self.find(error.key, model)
        where = f"{self.path}:{line}: " + (f"{dotted(key)}: " if key else "")
        return ConfigError((), where + self.as_entries(error.message))

    def as_entries(self, message: str) -> str:
        """Return the message with hints for groups of `count` replaced by hints for their common entry.

        The file has no entry `home-1`: `--set replicas.home-1.batch_size=4` becomes `--set replicas.home.batch_size=4`.
        """
        replicas = self.root.get("replicas")
        for entry in replicas if isinstance(replicas, list) else ():
            if isinstance(entry, Mapping) and entry.get("count") is not None:
                name = str(entry.get("name", ""))
                message = re.sub(rf"--set replicas\.{re.escape(name)}-\d+\.", f"--set replicas.{name}.", message)
        return message

    def plain(self) -> Any:
        """Return the content of the root as dicts and lists."""
        return plain(self.root) if "root" in vars(self) else self._ordinary

    @cached_property
    def root(self) -> CommentedMap:
        """Content with lines. It is read when it is needed: for errors and changes, because that takes longer."""
        try:
            root = parse_yaml(self._data, with_lines=True)
        except (YAMLError, ValueError) as error:
            raise ConfigError((), yaml_complaint(self.path, error)) from None
        if not isinstance(root, CommentedMap):
            raise ConfigError((), f"{self.path}:1: found no keys and values at the top, expected at least `name: NAME`")
        return root

    def find(self, key: Sequence[str | int], model: type[BaseModel] = RunConfig) -> tuple[Key, int]:
        """Return the key as far as the file has it (and one step further), and its line."""
        node: Any = self.root
        found: list[str | int] = []
        line = 1
        for position, part in enumerate(key):
            in_list = isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node)
            if in_list or (isinstance(node, CommentedMap) and part in node):
                line = _line(node.lc, part, line)
            else:
                known = sibling_keys(key[: position + 1], model)
                if part in known or (not known and isinstance(node, CommentedMap)):  # others are kinds of a union
                    found.append(part)
                continue
            found.append(part)
            node = node[part]
        return tuple(found), line


def _line(position: Any, part: str | int, otherwise: int) -> int:
    """Return the line of an entry of a mapping or a list; `otherwise` for entries set on the command line."""
    data = position.data or {}
    return data[part][0] + 1 if part in data else otherwise


def plain(node: Any) -> Any:
    """Return the content of a YAML's node as dicts and lists."""
    if isinstance(node, CommentedMap):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [plain(value) for value in node]
    return node


def complaint(error: ValidationError, model: type[BaseModel] = RunConfig) -> ConfigError:
    """Return the error to show: among several about alternatives of one value, the most specific."""
    details = error.errors(include_url=False)
    first = details[0]["loc"]
    section = first[:-1][:2]
    related = [detail for detail in details if detail["loc"][: len(section)] == section]
    detail = max(related, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    return ConfigError(detail["loc"], _explain(detail, model))


_KIND = " (one whole model; homes that hold one together)"
_ONLY_IN_ROWS = ("missed", "averages_moments", "taking_part", "pretraining", "clusters", "memory_drops", "research")
"""Keys that a run's YAML cannot have, but a row of a table, in its cells; beside `ablations`."""


def _explain(detail: Any, model: type[BaseModel]) -> str:
    kind, message, key = detail["type"], detail["msg"], detail["loc"]
    if kind == "extra_forbidden":
        if key[-1] in (*_ONLY_IN_ROWS, "ablations"):
            cell = "cells such as `research.missed`" if key[-1] == "research" else f"the cell `research.{key[-1]}`"
            where = f"{'`ablations`' if key[-1] == 'ablations' else cell} of a table's row"
            return f"found a key that only `hetero-pp reproduce` reads, expected it in {where} (docs/experiments.md)"
        known = sibling_keys(key, model)
        close = difflib.get_close_matches(str(key[-1]), known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return f"found an unknown key, expected one of {', '.join(known)}{hint}"
    if kind == "missing":
        return "found nothing, expected a value"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        context = detail["ctx"]
        name = context["discriminator"].strip("'")
        if kind == "union_tag_not_found":
            return f"found no `{name}`, expected `{name}: datacenter` or `{name}: participants`"
        return (
            f"found `{name}: {context['tag']}`, expected one of {context['expected_tags'].replace(chr(39), '`')}{_KIND}"
        )
    return f"found {_shown(detail['input'])}, expected {_expected(kind, message, detail.get('ctx', {}))}"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys and values",
    "model": "keys and values",
}
"""Expected value by the first word of a pydantic error type."""


def _expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """Return the expected value, from pydantic's error about it."""
    bounds = {"greater_than": "more than", "greater_than_equal": "at least"}
    bounds |= {"less_than": "less than", "less_than_equal": "at most"}
    if kind in bounds:
        [limit] = context.values()
        return f"{bounds[kind]} {limit:g}"
    if kind == "literal_error":
        return f"one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '`')}"
    first, _, rest = kind.partition("_")
    if first in _KINDS and rest in ("type", "parsing", "from_float", "attributes_type"):
        return _KINDS[first]
    told = message.removeprefix("Input should be ")
    return told[:1].lower() + told[1:]


def _shown(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"the keys {', '.join(map(str, found))}" if found else "an empty mapping"
    if isinstance(found, bool):
        return f"`{str(found).lower()}`"
    if found is None:
        return "nothing"
    return f"`{found}`" if isinstance(found, str | int | float) else f"a {type(found).__name__}"
