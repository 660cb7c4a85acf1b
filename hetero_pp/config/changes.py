"""Keys that were changed when a run was resumed, with their values by round; equal on all hosts.

A run keeps the name and the configuration of its start. Changes are stored beside it, in changes.yaml in the folder of
the exchange, and members receive them when they join. So every round has one configuration, whichever round a run
resumes from, and a user does not repeat earlier changes.
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

from hetero_pp.config.overrides import Key
from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import ConfigError, MalformedMessage, dotted
from hetero_pp.core.files import write_whole
from hetero_pp.core.settings import NotPartOf, Settings, meaning
from hetero_pp.core.yaml_reader import read_yaml, without_lines, yaml_complaint

Values = Mapping[str, Any]  # dotted key -> value, as in JSON
REPLICAS = "replicas"  # key whose value is a list: the current entries, as all hosts agree on them

LAST = PENDING = 2**31 - 1
"""Number that no round has: the last round; or as the first round of replicas, one that is not known yet."""

Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True)
class Changes:
    """Changes of a run so far."""

    history: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """Dotted key -> first round -> value; for every changed key, from round 1 on."""

    def newest(self, round_: int) -> int:
        """Return the round from which the configuration of this round applies."""
        return max((first for values in self.history.values() for first in values if first <= round_), default=1)

    def at(self, config: Config, round_: int) -> Config:
        """Return the configuration of a round.

        Raises MalformedMessage for values that do not fit.
        """
        if not self.history:
            return config
        dumped = config.model_dump(mode="json")
        try:
            for key, values in self.history.items():
                value = values[max(first for first in values if first <= max(round_, 1))]
                if key == REPLICAS:  # an entry that this host also has comes with the host's own settings
                    agreed = replicas_of(config)
                    value = [dumped[key][agreed.index(one)] if one in agreed else one for one in value]
                *above, last = key.split(".")
                section = dumped
                for part in above:
                    section = section[part]
                section[last] = value
            return type(config).model_validate(dumped)
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise MalformedMessage(f"changes of the run: a value does not fit ({reason})") from None

    def require_changeable(self, config: Settings) -> None:
        """Raise MalformedMessage for a key that cannot change, such as a path: another host may have sent it."""
        unknown = sorted(self.history.keys() - {*values_of(config), REPLICAS}) if self.history else []
        if unknown:
            raise MalformedMessage(f"changes of the run: {unknown[0]}: found a key that cannot change during a run")

    @cached_property
    def mark(self) -> int:
        """Checksum that identifies the changes; 0 if there are none."""
        return zlib.crc32(self.to_json().encode())

    @property
    def pending(self) -> Any:
        """Replicas that will take part from a round that is not known yet; None if there are none."""
        return self.history.get(REPLICAS, {}).get(PENDING)

    def settled(self) -> Changes:
        """Return the changes without pending ones."""
        known = {
            key: {since: value for since, value in values.items() if since != PENDING}
            for key, values in self.history.items()
        }
        return Changes(known)

    @property
    def replicas_since(self) -> Sequence[int]:
        """Rounds from which other replicas take part; round 1 comes first."""
        return sorted(self.history.get(REPLICAS, {1: None}))

    def had(self, key: str, first: Any) -> Sequence[Any]:
        """Return all values that a key ever had, the newest last; `first` is the value at the run's start."""
        return [first] if key not in self.history else [value for _, value in sorted(self.history[key].items())]

    def changed(self, first: Settings, round_: int, values: Values) -> Changes:
        """Return these changes with new values from a round on; `first` is the run's first configuration."""
        began = values_of(first) | {REPLICAS: replicas_of(first)}
        found = dict(self.history)
        for key, value in values.items():
            before = {since: was for since, was in found.get(key, {1: began[key]}).items() if since < round_}
            is_new = not before or before[max(before)] != value
            found[key] = before | ({round_: value} if is_new else {})
        return Changes(found)

    def to_json(self) -> str:
        """Return the changes as JSON; empty if there are none."""
        return json.dumps(self.history, sort_keys=True) if self.history else ""

    @staticmethod
    def from_json(text: str) -> Changes:
        """Parse the result of `to_json`. Raises MalformedMessage for any other text."""
        try:
            return Changes(_history(parse_json(text))) if text else NO_CHANGES
        except ValueError as error:
            raise MalformedMessage(f"changes of the run: {str(error).splitlines()[0]}") from None


NO_CHANGES = Changes()


def values_of(config: Settings) -> dict[str, Any]:
    """Return the keys that may change when a run is resumed, with their values."""
    agreed = dict(_leaves(meaning(config, NotPartOf.RUN)))
    lasting = dict(_leaves(meaning(config, NotPartOf.RUN | NotPartOf.PAST)))
    return {key: value for key, value in agreed.items() if key not in lasting}


def replicas_of(config: Settings) -> list[Any]:
    """Return the entries of `replicas`, as all hosts agree on them."""
    found: list[Any] = meaning(config, NotPartOf.RUN)[REPLICAS]
    return found


def with_values(config: Config, values: Values) -> Config:
    """Return the configuration with other values of some keys."""
    return Changes({key: {1: value} for key, value in values.items()}).at(config, 1)


def read_changes(path: Path) -> Changes:
    """Read changes from a file; empty if there is no such file. Raises ConfigError if the content is not valid."""
    if not path.exists():
        return NO_CHANGES
    try:
        return Changes(_history(read_yaml(path) or {}))
    except (OSError, ValueError) as error:
        reason = yaml_complaint(path, error).removeprefix(f"{path}:").strip()
        found = f"{path}: cannot be read ({reason})"
        raise ConfigError((), f"{found}; hetero-pp writes this file itself: restore it from a copy") from None


def write_changes(changes: Changes, path: Path) -> None:
    """Write the changes atomically, flushed to the disk."""
    yaml = YAML()
    yaml.default_flow_style = False
    text = io.StringIO()
    text.write("# Changes of the run: value of each key, by its first round.\n")
    history = {key: dict(sorted(values.items())) for key, values in sorted(changes.history.items())}
    yaml.dump(without_lines(history), text)
    write_whole(path, text.getvalue().encode())


def _history(values: Any) -> dict[str, dict[int, Any]]:
    """Return the history by key and round. Raises ValueError for anything else."""
    history = TypeAdapter(dict[str, dict[int, Any]]).validate_python(values)
    for key, by_round in history.items():
        if min(by_round, default=0) != 1:
            raise ValueError(f"{key}: found no value for round 1, expected one")
    return history


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value that is not a mapping."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else name)
    else:
        yield key, value


# Comparison of two configurations: the keys in which they differ, and the replicas of a run that is resumed.


_OPTIONAL = "optional"  # key of a known replica that may change later


@dataclass(frozen=True)
class Agreement:
    """Configuration that all hosts of a run agree on: its start, and the changes since."""

    first: RunConfig
    changes: Changes
    wanted: Values  # values that change when the run is resumed

    @property
    def configuration_bytes(self) -> int:
        """Size of the configuration that a host shows (RunSpec.agreed)."""
        return len(json.dumps(meaning(self.first, NotPartOf.RUN)))

    def complaint(self, other: Mapping[str, Any]) -> str:
        """Return the differences that prevent another host from joining this run; empty if there are none.

        `other` is the meaning of its configuration. A changed key may have any value that the run has had, and
        `replicas` may be those of any time.
        """
        first, complaints = values_of(self.first), []
        replicas = [*self.changes.had(REPLICAS, replicas_of(self.first)), *self._wanted(REPLICAS)]
        is_known = other.get(REPLICAS) in replicas
        if len(replicas) > 1 and not is_known:  # members receive the order
            is_known = _by_name(other.get(REPLICAS)) in map(_by_name, replicas)
        ours = meaning(self.first, NotPartOf.RUN) | {REPLICAS: other[REPLICAS] if is_known else replicas[-1]}
        for key, now, was in differences(other, ours):
            name = dotted(key)
            had = [*self.changes.had(name, first[name]), *self._wanted(name)] if name in first else []
            if now not in had:
                complaints.append(shown(key, now, had[-1] if had else was))
        return "; ".join(complaints)

    def _wanted(self, name: str) -> list[Any]:
        return [self.wanted[name]] if name in self.wanted else []


def _by_name(entries: Any) -> Any:
    """Return the entries sorted by name; None if they are not entries with names."""
    try:
        return sorted(entries, key=lambda entry: str(entry["name"]))
    except (TypeError, KeyError):
        return None


def shown(key: Key, found: Any, expected: Any) -> str:
    """Return a key and both of its values as text."""
    return f"{dotted(key)}: found {_short(found)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list | dict) else json.dumps(value)


def differences(one: Any, other: Any, key: Key = ()) -> Iterator[tuple[Key, Any, Any]]:
    """Yield (key, value in one, value in the other) for every value that differs; None stands for a missing key."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            yield from differences(one.get(name), other.get(name), (*key, name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, (*key, index))
    elif one != other:
        yield key, one, other


# ---- replicas of a resumed run ----


def changed_entries(config: RunConfig, had: Sequence[list[Any]]) -> Iterator[tuple[Key, Any, Any]]:
    """Yield (key, found, expected) for each change to a replica that the run has had.

    `had` has the newest entries last. A returning replica has to be compatible with its own saved state, and with
    its history in the run log.
    """
    known = {entry["name"]: entry for entries in had for entry in entries}
    for index, entry in enumerate(replicas_of(config)):
        if entry["name"] in known:
            found = differences(entry, known[entry["name"]], (REPLICAS, index))
            yield from (one for one in found if one[0][-1] != _OPTIONAL)


def wanted_replicas(config: RunConfig, now: list[Any]) -> list[Any]:
    """Return the entries of a YAML. Those that the run already has come first, in its order.

    Raises ConfigError for changes if a text is read only once: the run does not know which replica has read which part.
    """
    entries = {entry["name"]: entry for entry in replicas_of(config)}
    order = [*(entry["name"] for entry in now if entry["name"] in entries), *entries]
    found = [entries[name] for name in dict.fromkeys(order)]
    if found != now and not config.data.repeat:
        names, expected = ", ".join(entries), ", ".join(entry["name"] for entry in now)
        why = "with `data.repeat: false` the replicas cannot change, because each has its share of the text"
        raise ConfigError((REPLICAS,), f"found {names}, expected {expected}: {why}")
    return found


def described(before: list[Any], after: list[Any]) -> str:
    """Describe the change in words: replicas that join, that leave, and that become required or optional."""
    was, now = ({entry["name"]: entry for entry in entries} for entries in (before, after))
    found = {
        "with": [name for name in now if name not in was],
        "without": [name for name in was if name not in now],
        "needing": [name for name in now if name in was and now[name] != was[name] and not now[name].get(_OPTIONAL)],
        "without requiring": [
            name for name in now if name in was and now[name] != was[name] and now[name].get(_OPTIONAL)
        ],
    }
    return " and ".join(f"{how} {', '.join(names)}" for how, names in found.items() if names)
