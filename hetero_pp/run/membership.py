"""Which replicas a run that goes on has from then on: those of its YAML, of which the run may know some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetero_pp.changed_keys import REPLICAS, Changes, replicas_of
from hetero_pp.errors import ConfigError
from hetero_pp.run.config import RunConfig
from hetero_pp.run.same import Key, differences
from hetero_pp.run.spec import RunSpec
from hetero_pp.topology import ParticipantsReplica


def replicas_now(first: RunConfig, changes: Changes) -> list[Any]:
    """The entries that a run has which began as `first`."""
    found: list[Any] = changes.had(REPLICAS, replicas_of(first))[-1]
    return found


def changed_entries(config: RunConfig, now: list[Any]) -> Iterator[tuple[Key, Any, Any]]:
    """(key, found, expected) of what a YAML says otherwise of replicas that a run has."""
    known = {entry["name"]: entry for entry in now}
    for index, entry in enumerate(replicas_of(config)):
        if entry["name"] in known:
            yield from differences(entry, known[entry["name"]], (REPLICAS, index))


def wanted_replicas(config: RunConfig, now: list[Any]) -> list[Any]:
    """The entries that a YAML has, those first that the run has already, in its order.

    Raises ConfigError where a text is read once: who has read what of it would have to be known.
    """
    entries = {entry["name"]: entry for entry in replicas_of(config)}
    order = [*(entry["name"] for entry in now if entry["name"] in entries), *entries]
    found = [entries[name] for name in dict.fromkeys(order)]
    if found != now and not config.data.repeat:
        names, expected = ", ".join(entries), ", ".join(entry["name"] for entry in now)
        why = "with `data.repeat: false` they stay, as the text is shared out once"
        raise ConfigError((REPLICAS,), f"found {names}, expected {expected}: {why}")
    return found


def require_known_basis(spec: RunSpec) -> None:
    """Raise ConfigError for a boundary that the run has no basis for: it was made when the run began."""
    most = spec.largest_rank
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1:
            rank = replica.boundary.dimensions(spec.shape.width)
            if rank is not None and (most is None or rank > most):
                expected = "`full`, as nothing was compressed" if most is None else f"at most {most}, the largest"
                key = (REPLICAS, index, "boundary", "rank")
                raise ConfigError(key, f"found {rank}, expected {expected} when the run began")


def described(before: list[Any], after: list[Any]) -> str:
    """Who comes and who leaves, in words."""
    names, others = ([entry["name"] for entry in entries] for entries in (before, after))
    come, leave = ", ".join(set_minus(others, names)), ", ".join(set_minus(names, others))
    return " and ".join([*([f"with {come}"] if come else []), *([f"without {leave}"] if leave else [])])


def set_minus(some: list[str], others: list[str]) -> list[str]:
    """Those of some that are not among others, in their order."""
    return [one for one in some if one not in others]
