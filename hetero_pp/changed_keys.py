"""Keys that were changed when a run went on: from which round each of them has which value, on all hosts.

A run keeps the name and the configuration that it began with. What was changed is kept beside it, in changes.yaml in
the folder of the exchange, and members hear it when they join: so a configuration holds in every round, whichever
round a run goes on from, and nobody has to say again what was changed.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero_pp.bounded import parse_json, read_yaml, yaml_complaint
from hetero_pp.errors import ConfigError, MalformedMessage
from hetero_pp.files import write_whole
from hetero_pp.settings import NotPartOf, Settings, meaning

Values = Mapping[str, Any]
"""Dotted key -> value, as JSON has it."""

REPLICAS = "replicas"
"""The key of which a list is kept: the entries that there are, as all hosts agree on them."""

PENDING = 2**31 - 1
"""The round from which replicas take part that are to: the run goes on with them before it is known from where."""

Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True)
class Changes:
    """What was changed until now."""

    history: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Dotted key -> first round -> value; of every key that was changed, from round 1 on."""

    def at(self, config: Config, round_: int | None) -> Config:
        """A configuration as it holds in a round; in the last one, if that is None.

        Raises MalformedMessage for values that do not fit.
        """
        if not self.history:
            return config
        dumped = config.model_dump(mode="json")
        try:
            for key, values in self.history.items():
                since = max(first for first in values if round_ is None or first <= max(round_, 1))
                value = _as_here(config, dumped[key], values[since]) if key == REPLICAS else values[since]
                _put(dumped, key.split("."), value)
            return type(config).model_validate(dumped)
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise MalformedMessage(f"changes of the run: a value does not fit ({reason})") from None

    def require_changeable(self, config: Settings) -> None:
        """Raise MalformedMessage for a key that no run changes, such as a path: others may have written it."""
        unknown = sorted(self.history.keys() - {*values_of(config), REPLICAS}) if self.history else []
        if unknown:
            raise MalformedMessage(f"changes of the run: {unknown[0]}: found a key that cannot change in a run")

    @cached_property
    def mark(self) -> int:
        """Another number for other changes; 0 for none."""
        return zlib.crc32(self.to_json().encode())

    @property
    def pending(self) -> Any:
        """The replicas that are to take part from a round on that is not known yet; None if that is known of all."""
        return self.history.get(REPLICAS, {}).get(PENDING)

    def settled(self) -> Changes:
        """Without those."""
        known = {
            key: {since: value for since, value in values.items() if since != PENDING}
            for key, values in self.history.items()
        }
        return Changes(known)

    @property
    def replicas_since(self) -> Sequence[int]:
        """The rounds from which other replicas take part, the first round before them."""
        return sorted(self.history.get(REPLICAS, {1: None}))

    def had(self, key: str, first: Any) -> Sequence[Any]:
        """All values that a key ever had, the newest last; `first` is that of the run's first configuration."""
        return [first] if key not in self.history else [value for _, value in sorted(self.history[key].items())]

    def changed(self, first: Settings, round_: int, values: Values) -> Changes:
        """These, and from a round on some more; `first` is the run's first configuration."""
        began = values_of(first) | {REPLICAS: replicas_of(first)}
        found = dict(self.history)
        for key, value in values.items():
            before = {since: was for since, was in found.get(key, {1: began[key]}).items() if since < round_}
            is_new = not before or before[max(before)] != value
            found[key] = before | ({round_: value} if is_new else {})
        return Changes(found)

    def to_json(self) -> str:
        """As text, empty if there are none."""
        return json.dumps(self.history, sort_keys=True) if self.history else ""

    @staticmethod
    def from_json(text: str) -> Changes:
        """What `to_json` gave. Raises MalformedMessage for what it never gives."""
        try:
            return Changes(_history(parse_json(text))) if text else NO_CHANGES
        except ValueError as error:
            raise MalformedMessage(f"changes of the run: {str(error).splitlines()[0]}") from None


NO_CHANGES = Changes()


def values_of(config: Settings) -> dict[str, Any]:
    """The keys that may change when a run goes on, with their values."""
    agreed = dict(_leaves(meaning(config, NotPartOf.RUN)))
    lasting = dict(_leaves(meaning(config, NotPartOf.RUN | NotPartOf.PAST)))
    return {key: value for key, value in agreed.items() if key not in lasting}


def replicas_of(config: Settings) -> list[Any]:
    """The entries of `replicas`, as all hosts agree on them."""
    found: list[Any] = meaning(config, NotPartOf.RUN)[REPLICAS]
    return found


def with_values(config: Config, values: Values) -> Config:
    """The same with other values of some keys."""
    return Changes({key: {1: value} for key, value in values.items()}).at(config, 1)


def read_changes(path: Path) -> Changes:
    """What is in a file; none if there is no such file. Raises ConfigError if it is not what was written."""
    if not path.exists():
        return NO_CHANGES
    try:
        return Changes(_history(read_yaml(path) or {}))
    except (OSError, YAMLError, ValueError) as error:
        reason = yaml_complaint(path, error).removeprefix(f"{path}:").strip()
        found = f"{path}: cannot be read ({reason})"
        raise ConfigError((), f"{found}; hetero-pp writes this file itself: restore it from a copy") from None


def write_changes(changes: Changes, path: Path) -> None:
    """Keep them, whole and on the disk."""
    yaml = YAML()
    yaml.default_flow_style = False
    text = io.StringIO()
    text.write("# Changed when the run went on: from which round each key has which value.\n")
    yaml.dump({key: dict(sorted(values.items())) for key, values in sorted(changes.history.items())}, text)
    write_whole(path, text.getvalue().encode())


def _history(values: Any) -> dict[str, dict[int, Any]]:
    """Raises ValueError for what is no history."""
    history = TypeAdapter(dict[str, dict[int, Any]]).validate_python(values)
    for key, by_round in history.items():
        if min(by_round, default=0) != 1:
            raise ValueError(f"{key}: found no value from round 1 on, expected one")
    return history


def _as_here(config: Settings, own: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """Entries in their order, those that a host has just so with all that they say there."""
    agreed = replicas_of(config)
    here = [agreed.index(entry) if entry in agreed else None for entry in entries]
    return [entry if index is None else own[index] for index, entry in zip(here, entries, strict=True)]


def _put(dumped: dict[str, Any], key: Sequence[str], value: Any) -> None:
    for part in key[:-1]:
        dumped = dumped[part]
    dumped[key[-1]] = value


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else name)
    else:
        yield key, value
