"""Location (file and line, or `--sweep` option) of a configuration error in a row of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import Experiment, Row, Scale, SweptRow
from hetero_pp.run.known_keys import keys_of_replica

Key = tuple[str | int, ...]

_OWN_CELLS = {
    "rank": ("replicas", "boundary", "rank"),
    "bits": ("replicas", "boundary", "bits"),
    "ablations": ("research", "ablations"),
}
"""Keys of a run by the row's own key that sets them."""


def located(error: ConfigError, row: Row, experiment: Experiment, scale: Scale) -> ConfigError:
    """Return an error about a row's run with the `--sweep` option, or the file and line, that set the key."""
    key = _without_variants(error.key)
    if isinstance(row, SweptRow):
        about = [cell for cell in row.swept if _overlap(_parts(cell), key)] or list(row.swept)
        sweeps = " ".join(f"--sweep {cell}={row.swept[cell]}" for cell in about)
        return ConfigError((), f"{sweeps}: {error.message}")
    for place in _places(row, experiment, scale):
        parts = _parts(str(place[-1]))
        if _overlap(parts, key):
            return experiment.located(ConfigError((*place, *key[len(parts) :]), error.message))
    return scale.located(ConfigError(("base", *key), error.message))


def _places(row: Row, experiment: Experiment, scale: Scale) -> Iterator[Key]:
    """Yield the keys in the experiment's file of everything that the row changes, in reverse order of application."""
    own: Key = ("rows", [one.name for one in experiment.rows].index(row.name))
    yield from ((*own, "at", scale.name, cell) for cell in reversed(row.at.get(scale.name, {})))
    yield from ((*own, "cells", cell) for cell in reversed(row.cells))
    yield from (("at", scale.name, cell) for cell in reversed(experiment.at.get(scale.name, {})))
    yield from ((*own, name) for name in _OWN_CELLS)


def _parts(cell: str) -> tuple[str, ...]:
    """Return a cell of a row as the key of a run, without the name of a replica."""
    if cell in _OWN_CELLS:
        return _OWN_CELLS[cell]
    first, *rest = cell.split(".")
    names_one = first == "replicas" and rest and rest[0] not in keys_of_replica({})
    return (first, *(rest[1:] if names_one else rest))


def _overlap(parts: Sequence[str], key: Sequence[str]) -> bool:
    """Return whether one key is a prefix of the other, or both are equal.

    A key that is `replicas` alone overlaps only with itself, because an error about all replicas is no single cell's.
    """
    length = min(len(parts), len(key))
    is_telling = length > 1 or parts[0] != "replicas" or len(parts) == len(key)
    return length > 0 and is_telling and tuple(parts[:length]) == tuple(key[:length])


def _without_variants(key: Sequence[str | int]) -> tuple[str, ...]:
    """Return a run's key as cells write it: `replicas.boundary.rank` for either kind, without an index."""
    return tuple(part for part in key if isinstance(part, str) and part not in ("datacenter", "participants"))
