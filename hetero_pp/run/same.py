"""Comparison of two configurations: the keys in which they differ, with both values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_pp.config.changed_keys import REPLICAS, Changes, Values, replicas_of, values_of
from hetero_pp.config.settings import NotPartOf, meaning
from hetero_pp.core.errors import dotted
from hetero_pp.run.config import RunConfig

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Agreement:
    """Configuration that all hosts of a run agree on: its start, and the changes since."""

    first: RunConfig
    changes: Changes
    wanted: Values
    """Values that change when the run is resumed."""

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
