"""Reads ordinary YAML with libyaml, several times as fast as ruamel.yaml, which has to read everything else.

Ordinary YAML has no tags, directives or control characters, and its numbers are short.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml
from ruamel.yaml.resolver import implicit_resolvers
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

_WORDS: dict[str, bool | None] = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_WORDS |= dict.fromkeys(("", "~", "null", "Null", "NULL"))
_INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{0,20}([eE][-+]?[0-9]{1,3})?|[eE][-+]?[0-9]{1,3})")
_OTHERS = [pattern for versions, _, pattern, _ in implicit_resolvers if (1, 2) in versions]
"""Patterns of all that YAML 1.2 does not read as text."""
_MERGE = object()
"""The key `<<`."""
_READ_OTHERWISE = re.compile("[\t\x85\u2028\u2029\ufeff]|[|>][-+0-9]*#")
"""Tabs and comments that libyaml allows at more places, and line breaks of YAML 1.1 that YAML 1.2 does not have."""


class NotOrdinary(Exception):
    """Only ruamel.yaml can read this YAML, or say what is wrong with it."""


def read_ordinary(text: str, depth_max: int, values_max: int) -> Any:
    """Return the content of a YAML. Raises NotOrdinary, also for invalid YAML and for content beyond the bounds."""
    loader = getattr(yaml, "CSafeLoader", None)  # a build of PyYAML may lack libyaml
    if loader is None or _READ_OTHERWISE.search(text):
        raise NotOrdinary
    content = _Content(depth_max, values_max)
    try:
        for event in yaml.parse(text, Loader=loader):
            content.take(event)
    except yaml.YAMLError:
        raise NotOrdinary from None
    return _list(content.document)[0] if content.document else None


class _Content:
    """Builds the content of a YAML from its events."""

    def __init__(self, depth_max: int, values_max: int) -> None:
        self.document: list[Any] = []
        self._depth_max, self._values_max = depth_max, values_max
        self._levels: list[list[Any]] = [self.document]
        """Open lists and mappings. A mapping is a list of its keys and values in turn."""
        self._begun: list[tuple[str | None, int]] = []
        """The anchor of each of them, and the number of values before it."""
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Values with an anchor, and how many values each holds with aliases expanded."""
        self._values = 0

    def take(self, event: Event) -> None:
        """Add an event. Raises NotOrdinary."""
        if isinstance(event, ScalarEvent):
            self._require_untagged(event)
            if event.style in ("|", ">") and not event.value:  # ruamel.yaml reads some of them otherwise
                raise NotOrdinary
            self._add(_scalar(event.value) if event.implicit[0] else _text(event.value), event.anchor, self._values)
            self._values += 1
        elif isinstance(event, SequenceStartEvent | MappingStartEvent):
            self._require_untagged(event)
            self._begun.append((event.anchor, self._values))
            self._levels.append([])
            self._values += 1
        elif isinstance(event, SequenceEndEvent | MappingEndEvent):
            entries = self._levels.pop()
            self._add(_mapping(entries) if isinstance(event, MappingEndEvent) else _list(entries), *self._begun.pop())
        elif isinstance(event, AliasEvent):
            if event.anchor not in self._anchors:
                raise NotOrdinary
            value, count = self._anchors[event.anchor]
            self._values += count
            if self._values <= self._values_max:
                self._levels[-1].append(deepcopy(value))
        elif isinstance(event, DocumentStartEvent) and (self.document or event.version or event.tags):
            raise NotOrdinary
        if len(self._begun) > self._depth_max or self._values > self._values_max:
            raise NotOrdinary

    def _add(self, value: Any, anchor: str | None, before: int) -> None:
        self._levels[-1].append(value)
        if anchor is not None:
            if anchor in self._anchors:
                raise NotOrdinary
            self._anchors[anchor] = value, max(1, self._values - before)

    def _require_untagged(self, event: Any) -> None:
        if event.tag is not None:
            raise NotOrdinary


def _list(entries: list[Any]) -> list[Any]:
    if any(one is _MERGE for one in entries):
        raise NotOrdinary
    return entries


def _mapping(entries: list[Any]) -> dict[Any, Any]:
    """Return a mapping: its own entries, and behind them those that it merges and does not have."""
    keys, values = entries[::2], _list(entries[1::2])
    if any(isinstance(key, list | dict) for key in keys) or len(set(keys)) < len(keys):
        raise NotOrdinary
    found = dict(zip(keys, values, strict=True))
    merged = found.pop(_MERGE, {})
    for one in merged if isinstance(merged, list) else [merged]:
        if not isinstance(one, dict):
            raise NotOrdinary
        for key, value in one.items():
            found.setdefault(key, value)
    return found


@lru_cache(maxsize=4096)
def _scalar(text: str) -> Any:
    """Return the value of an unquoted text."""
    if text == "<<":
        return _MERGE
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if any(pattern.match(text) for pattern in _OTHERS):
        raise NotOrdinary
    return _text(text)


def _text(text: str) -> str:
    if not text.isprintable() and not text.replace("\n", "").replace("\t", "").isprintable():
        raise NotOrdinary
    return text
