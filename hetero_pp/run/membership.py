"""Replicas of a resumed run: those of its YAML, some of which the run may already know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetero_pp.config.changed_keys import REPLICAS, replicas_of
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.run.config import RunConfig
from hetero_pp.run.same import Key, differences
from hetero_pp.run.spec import RunSpec

_OPTIONAL = "optional"
"""Key of a known entry that may change later."""


def changed_entries(config: RunConfig, had: Sequence[list[Any]]) -> Iterator[tuple[Key, Any, Any]]:
    """Yield (key, found, expected) for each change to a replica that the run has had.

    `had` has the newest entries last. A returning replica has to be compatible with its own member checkpoint, and with
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
