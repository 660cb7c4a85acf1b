"""`hetero-pp reproduce --sweep CELL=A,B`: the rows of a table at several values of a cell, as a table of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import Experiment, Row, SweptRow
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.run.yaml_lines import complaint
from hetero_pp.simulator.sweep import parse_sweep

ROW_CELLS = ("rank", "bits", "compressed", "budget", "steps", "replicas")
"""Cells that are fields of a row; all others are keys of its run."""

LONGEST_NAME = 120
"""Most characters of a table's name that describe the sweep; a hash replaces the rest."""

Values = Mapping[str, Sequence[str]]
"""Values of each cell as the user wrote them."""
Chosen = tuple[str | None, ...]
"""One value for each cell; None keeps the row's own value."""


def swept(setting: Setting, sweeps: Sequence[str]) -> Setting:
    """Return the setting with its rows repeated for each value of every `cell=a,b,c`, and without claims.

    A row that no cell changes is kept once. Every other row's baseline is the declared one at the row's own values.
    Raises ConfigError for a cell or value that a row cannot have, a cell that changes no row, and two equivalent
    values.
    """
    values, experiment = _values(sweeps), setting.experiment
    effects = {row.name: _Effects(setting, row, values) for row in experiment.rows}
    _check(values, list(effects.values()), experiment)
    base = effects[experiment.baseline]
    rows = [row for effect in effects.values() for row in effect.rows(base)]
    said = "; ".join(f"`{cell}` = {', '.join(found)}" for cell, found in values.items())
    note = f"Swept: {said}. Percentages are relative to the baseline at the row's own values."
    update = {
        "name": f"{experiment.name}-sweep-{_file_name(values)}",
        "note": f"{experiment.note} {note}".strip(),
        "rows": rows,
        "claims": [],
        "baseline": base.named(next(product(*values.values())), base.changing),
    }
    return replace(setting, experiment=experiment.model_copy(update=update))


class _Effects:
    """Meaning of a row at every combination of the cells' values, including its own."""

    def __init__(self, setting: Setting, row: Row, values: Values) -> None:
        self.row = row
        self.values = values
        self.own = setting.meaning(row)
        options = product(*([None, *found] for found in values.values()))
        self.meanings = {chosen: setting.meaning(self._at(chosen)) for chosen in options}
        self.changing = {cell for cell, found in values.items() if any(not self.same(cell, None, one) for one in found)}

    def same(self, cell: str, one: str | None, other: str | None) -> bool:
        """Return whether two values of a cell are equivalent at all values of the other cells."""
        place = list(self.values).index(cell)
        pairs = ((chosen, (*chosen[:place], other, *chosen[place + 1 :])) for chosen in self.meanings)
        return all(self.meanings[a] == self.meanings[b] for a, b in pairs if a[place] == one)

    def rows(self, base: _Effects) -> Iterator[Row]:
        """Yield the row at all values of the cells that change it or its baseline; the row itself if there are none."""
        cells = self.changing | base.changing
        if not cells:
            yield self.row
        for chosen in product(*(found if cell in cells else [None] for cell, found in self.values.items())):
            if cells:
                row, is_own = self._at(chosen), self.meanings[chosen] == self.own
                paper = self.row.paper if is_own else None
                yield row.model_copy(update={"baseline": base.named(chosen, base.changing), "paper": paper})

    def named(self, chosen: Chosen, cells: set[str]) -> str:
        """Return the row's name at these values, with only the given cells."""
        said = [f"{cell}={value}" for cell, value in self._said(chosen).items() if cell in cells]
        return ", ".join([self.row.name, *said])

    def _said(self, chosen: Chosen) -> dict[str, str]:
        return {cell: value for cell, value in zip(self.values, chosen, strict=True) if value is not None}

    def _at(self, chosen: Chosen) -> SweptRow:
        said = self._said(chosen)
        read = {cell: _read(value) for cell, value in said.items()}
        own = {cell: value for cell, value in read.items() if cell in ROW_CELLS}
        cells = {cell: value for cell, value in read.items() if cell not in ROW_CELLS}
        name = self.named(chosen, set(said))
        at = {scale: {**there, **cells} for scale, there in self.row.at.items()}
        changed = {**own, "name": name, "of": self.row.name, "swept": said, "cells": {**self.row.cells, **cells}}
        changed |= {"at": at}
        try:
            return SweptRow.model_validate(self.row.model_dump() | changed)
        except ValidationError as error:
            wrong = complaint(error, SweptRow)
            cell = str(wrong.key[0])
            raise ConfigError((), f"--sweep {cell}={said.get(cell)}: {wrong.message}") from None


def _values(sweeps: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for sweep in sweeps:
        cell, values = parse_sweep("--sweep", sweep, "CELL=A,B such as `outer.compression.density=1/128,1/32`")
        if cell in found:
            raise ConfigError((), f"--sweep {sweep}: found `{cell}` twice, expected all its values in one --sweep")
        if cell in Row.model_fields and cell not in ROW_CELLS:
            raise ConfigError((), f"--sweep {sweep}: expected a key of a run, or one of {', '.join(ROW_CELLS)}")
        found[cell] = values
    return found


def _check(values: Values, effects: Sequence[_Effects], experiment: Experiment) -> None:
    """Raise ConfigError for a cell that changes no row, and for two equivalent values."""
    for cell, found in values.items():
        said = f"--sweep {cell}={','.join(found)}"
        if not any(cell in effect.changing for effect in effects):
            raise ConfigError((), f"{said}: changes no row of {experiment.name}, expected a key that does")
        for one, other in combinations(found, 2):
            if all(effect.same(cell, one, other) for effect in effects):
                raise ConfigError((), f"{said}: found {one} and {other}, which are equal in every row")


def _file_name(values: Values) -> str:
    said = "-".join(f"{cell}={','.join(found)}" for cell, found in values.items())
    if len(said) > LONGEST_NAME:
        said = f"{said[:LONGEST_NAME]}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"
    return re.sub(r"[^\w.=,+-]", "_", said)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
