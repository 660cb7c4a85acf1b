"""Comparison of two configurations: the keys in which they differ, and the replicas of a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_pp.config.changed_keys import REPLICAS, Changes, Values, replicas_of, values_of
from hetero_pp.config.settings import NotPartOf, meaning
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.run.config import RunConfig
from hetero_pp.run.known_keys import Key
from hetero_pp.run.spec import RunSpec

_OPTIONAL = "optional"
"""Key of a known replica that may change later."""


@dataclass(frozen=True)
class Agreement:
    """Configuration that all hosts of a run agree on: its start, and the changes since."""

    first: RunConfig
    changes: Changes
    wanted: Values
    """Values that change when the run is resumed."""

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


def require_known_basis(spec: RunSpec) -> None:
    """Raise ConfigError for a boundary whose rank exceeds the basis, which was made when the run began."""
    most = spec.largest_rank
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1:
            rank = replica.boundary.dimensions(spec.shape.width)
            if rank is not None and (most is None or rank > most):
                expected = (
                    ("`full`, because nothing was compressed") if most is None else f"at most {most}, the largest rank"
                )
                key = (REPLICAS, index, "boundary", "rank")
                raise ConfigError(key, f"found {rank}, expected {expected} at the start of the run")


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
