"""Numeric settings that the rows of a table vary one at a time; each becomes an axis of the table's picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.rows import Setting

_LEAST_VALUES = 3
"""Fewest values of a setting for which a line is drawn."""
_OF_REPLICAS = ("replicas", "research.ablations")
"""Settings of single replicas, which form no lines."""
_STEPS, _ROUNDS = "inner.steps", "outer.rounds"


def lines_of(setting: Setting, rows: Sequence[Row]) -> dict[str, list[list[tuple[str, float]]]]:
    """Return by setting the lines that rows form; the rows (name, value) of a line differ only in this setting.

    A setting is named by its dotted key. Rows with other numbers of steps between rounds also differ in rounds, so that
    they see as many tokens; that is no further difference. Ranks are left out, as they have an axis of their own (k/d).
    """
    values = {row.name: dict(_flat(setting.config(row).model_dump(mode="json"), "")) for row in rows}
    keys = dict.fromkeys(key for found in values.values() for key, value in found.items() if _is_number(value))
    lines = {key: _lines(key, values) for key in keys if not key.startswith(_OF_REPLICAS)}
    return {key: found for key, found in lines.items() if found}


def _lines(key: str, values: Mapping[str, Mapping[str, Any]]) -> list[list[tuple[str, float]]]:
    follows = {key, _ROUNDS} if key == _STEPS else {key}
    groups: dict[tuple[Any, ...], dict[float, str]] = defaultdict(dict)
    for name, found in values.items():
        if _is_number(found.get(key)):
            others = tuple((one, value) for one, value in sorted(found.items()) if one not in follows)
            groups[others].setdefault(found[key], name)
    lines = [[(name, value) for value, name in sorted(group.items())] for group in groups.values()]
    return [line for line in lines if len(line) >= _LEAST_VALUES]


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by their dotted keys; each element of a list is a leaf."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{index}]")
    else:
        yield key, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
