"""Reads untrusted YAML with the line of each key, within bounds on size, nesting, aliases and digits.

libyaml parses, and the content is built from its events: PyYAML's own composer calls itself, in C, for each level.
Words and numbers mean what YAML 1.2 says. Tags, directives, several documents and numbers that are not decimal are
refused, as no file of a run needs them.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
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

from hetero_pp.core.bounded import DEPTH_MAX, TooLarge, read_bounded
from hetero_pp.core.text import is_control

YAML_BYTES_MAX = 4 * 2**20
YAML_VALUES_MAX = 200_000  # keys, values, lists and mappings of a YAML with its aliases expanded

_DIGITS_MAX, _FLOAT_CHARACTERS_MAX = 18, 400
"""Digits of a whole number, so that all fit into 64 bits; characters of another number, of which no float has more."""

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_OTHER_NUMBER = re.compile(r"[-+]?(0[xob][0-9a-fA-F_]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)")
_MERGE = object()  # the key `<<`


class YamlError(ValueError):
    """A text that is no YAML, or no YAML that is read here."""

    def __init__(self, problem: str, line: int) -> None:
        self.line = line
        super().__init__(problem)


class Section(dict[Any, Any]):
    """Mapping of a YAML. `lines` has the line of each key; those that it merges from another have none."""

    lines: dict[Any, int]


class Items(list[Any]):
    """List of a YAML, and the line of each item."""

    lines: list[int]


def without_lines(node: Any) -> Any:
    """Return the content of a YAML as plain mappings and lists, for programs that write them."""
    if isinstance(node, dict):
        return {key: without_lines(value) for key, value in node.items()}
    return [without_lines(value) for value in node] if isinstance(node, list) else node


def line_in(node: Any, part: str | int, otherwise: int) -> int:
    """Return the line of an entry of a mapping or a list; `otherwise` for one that the YAML does not have there."""
    if isinstance(node, Items) and isinstance(part, int) and part < len(node.lines):
        return node.lines[part]
    return node.lines.get(part, otherwise) if isinstance(node, Section) else otherwise


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file (`parse_yaml`). Raises OSError or ValueError."""
    return parse_yaml(read_bounded(path, YAML_BYTES_MAX))


def parse_yaml(data: str | bytes) -> Any:
    """Return the content of a YAML, with a Section for each mapping and Items for each list.

    Raises YamlError, which has a line, or another ValueError.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    if len(text) > YAML_BYTES_MAX:
        raise TooLarge(f"found more than {YAML_BYTES_MAX:,} bytes, expected at most that")
    content = _Content()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # may lack libyaml
            content.take(event)
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line
        last = text.rstrip().count("\n")  # what is left open at the end counts for the last line
        raise YamlError(str(error.problem), min(line, last) + 1) from None
    except yaml.reader.ReaderError as error:
        raise YamlError(str(error.reason), text.encode()[: error.position].count(b"\n") + 1) from None
    return content.document[0] if content.document else None


def yaml_complaint(path: Path, error: Exception) -> str:
    """Return one line about a YAML that could not be read: its name, the line if it is known, and the reason."""
    if isinstance(error, OSError):
        return f"{path}: cannot be read ({error.strerror})"
    where = f"{path}:{error.line}" if isinstance(error, YamlError) else f"{path}"
    return f"{where}: not YAML: {str(error).splitlines()[0]}"


class _Content:
    """Builds the content of a YAML from its events."""

    def __init__(self) -> None:
        self.document: list[Any] = []
        self._levels: list[tuple[list[Any], list[int]]] = [(self.document, [])]
        """Entries and their lines of each open list and mapping, whose keys and values come in turn."""
        self._begun: list[tuple[str | None, int, int]] = []
        """The anchor of each of them, its line, and the number of values before it."""
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Values with an anchor, and how many values each holds with aliases expanded."""
        self._values = 0

    def take(self, event: Event) -> None:
        """Add an event. Raises YamlError."""
        line = event.start_mark.line + 1
        if getattr(event, "tag", None) is not None:
            raise YamlError(f"found the tag `{event.tag}`, expected none", line)
        if isinstance(event, ScalarEvent):
            try:
                value = _scalar(event.value) if event.implicit[0] else _text(event.value)
            except ValueError as error:
                raise YamlError(str(error), line) from None
            self._values += 1
            self._add(value, event.anchor, line, self._values - 1)
        elif isinstance(event, SequenceStartEvent | MappingStartEvent):
            self._begun.append((event.anchor, line, self._values))
            self._levels.append(([], []))
            self._values += 1
        elif isinstance(event, SequenceEndEvent | MappingEndEvent):
            whole = _mapping if isinstance(event, MappingEndEvent) else _list
            self._add(whole(*self._levels.pop()), *self._begun.pop())
        elif isinstance(event, AliasEvent):
            if any(event.anchor == anchor for anchor, _, _ in self._begun):
                raise YamlError(f"found the alias *{event.anchor} inside its own anchor", line)
            if event.anchor not in self._anchors:
                raise YamlError(f"found the alias *{event.anchor} without an anchor before it", line)
            value, count = self._anchors[event.anchor]
            self._values += count
            if self._values <= YAML_VALUES_MAX:  # else it is not copied, but refused below
                self._add(deepcopy(value) if isinstance(value, dict | list) else value, None, line, 0)
        elif isinstance(event, DocumentStartEvent) and (self.document or event.version or event.tags):
            raise YamlError(f"found a {'second document' if self.document else 'directive'}, expected none", line)
        if len(self._begun) > DEPTH_MAX:
            raise YamlError(f"found lists and mappings more than {DEPTH_MAX} levels deep", line)
        if self._values > YAML_VALUES_MAX:
            raise YamlError(f"found more than {YAML_VALUES_MAX:,} values, including repetitions by aliases", line)

    def _add(self, value: Any, anchor: str | None, line: int, before: int) -> None:
        entries, lines = self._levels[-1]
        entries.append(value)
        lines.append(line)
        if anchor is not None:
            self._anchors[anchor] = value, max(1, self._values - before)


def _list(entries: list[Any], lines: list[int]) -> Items:
    found = Items("<<" if one is _MERGE else one for one in entries)
    found.lines = lines
    return found


def _mapping(entries: list[Any], lines: list[int]) -> Section:
    """Return a mapping: its own entries, and behind them those that it merges and does not have."""
    found, merged = Section(), _list([], [])
    found.lines = {}
    for key, value, line in zip(entries[::2], _list(entries[1::2], []), lines[::2], strict=True):
        if isinstance(key, list | dict):
            raise YamlError("found a list or a mapping as a key, expected a text", line)
        if key is _MERGE:
            merged.extend(value if isinstance(value, list) else [value])
            if not all(isinstance(one, dict) for one in merged):
                raise YamlError("found something else to merge by `<<`, expected mappings", line)
            continue
        if key in found:
            raise YamlError(f"found the key `{key}` twice, expected it once", line)
        found[key], found.lines[key] = value, line
    for one in merged:
        for key, value in one.items():
            found.setdefault(key, value)
    return found


@lru_cache(maxsize=4096)
def _scalar(text: str) -> Any:
    """Return the value of an unquoted text. Raises ValueError for a number that cannot be used."""
    if text == "<<":
        return _MERGE
    if text in _WORDS:
        return _WORDS[text]
    if not (text[0] in "+-.0123456789" and (_FLOAT.fullmatch(text) or _OTHER_NUMBER.fullmatch(text))):
        return _text(text)
    bare, is_whole = text.replace("_", ""), _INTEGER.fullmatch(text) is not None
    digits, most = len(bare.lstrip("+-")), _DIGITS_MAX if is_whole else _FLOAT_CHARACTERS_MAX
    if digits > most:
        raise ValueError(f"found a number of {digits:,} digits, expected at most {most}")
    if _OTHER_NUMBER.fullmatch(text):
        raise ValueError(f"found the number `{text}`, expected a finite decimal one")
    return int(bare) if is_whole else float(bare)


def _text(text: str) -> str:
    """Return a text. Raises ValueError for one that would control the terminal that shows it."""
    if not text.isprintable():
        found = next((one for one in text if one not in "\n\t" and is_control(one)), None)
        if found is not None:
            raise ValueError(f"found the control character U+{ord(found):04X} in a text, expected none")
    return text
