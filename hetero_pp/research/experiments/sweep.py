"""`hetero-pp reproduce --sweep CELL=A,B`: the rows of a table at several values of a cell, as a table of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from pydantic import ValidationError

from hetero_pp.config.yaml_file import complaint
from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import Row, SweptRow
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.simulator.sweep import parse_sweep

ROW_CELLS = ("rank", "bits", "compressed", "budget", "steps", "replicas")
"""Cells that are fields of a row; all others are keys of its run."""
LONGEST_NAME = 120
"""Most characters of a table's name that describe the sweep; a hash replaces the rest."""

Chosen = tuple[str | None, ...]
"""One value for each cell; None keeps the row's own value."""


def swept(setting: Setting, sweeps: Sequence[str]) -> Setting:
    """Return the setting with its rows repeated for each value of every `cell=a,b,c`, and without claims.

    A row that no cell changes is kept once. Every other row's baseline is the declared one at the row's own values.
    Raises ConfigError for a cell or value that a row cannot have, a cell that changes no row, and two equivalent
    values.
    """
    values: dict[str, list[str]] = {}
    for sweep in sweeps:
        cell, found = parse_sweep("--sweep", sweep, "CELL=A,B such as `outer.compression.density=1/128,1/32`")
        if cell in values:
            raise ConfigError((), f"--sweep {sweep}: found `{cell}` twice, expected all its values in one --sweep")
        if cell in Row.model_fields and cell not in ROW_CELLS:
            raise ConfigError((), f"--sweep {sweep}: expected a key of a run, or one of {', '.join(ROW_CELLS)}")
        values[cell] = found
    experiment = setting.experiment
    effects = {row.name: _Effects(setting, row, values) for row in experiment.rows}
    for cell, found in values.items():
        said = f"--sweep {cell}={','.join(found)}"
        if not any(cell in effect.changing for effect in effects.values()):
            raise ConfigError((), f"{said}: changes no row of {experiment.name}, expected a key that does")
        for one, other in combinations(found, 2):
            if all(effect.same(cell, one, other) for effect in effects.values()):
                raise ConfigError((), f"{said}: found {one} and {other}, which are equal in every row")
    base = effects[experiment.baseline]
    all_cells = "; ".join(f"`{cell}` = {', '.join(found)}" for cell, found in values.items())
    note = f"Swept: {all_cells}. Percentages are relative to the baseline at the row's own values."
    name = "-".join(f"{cell}={','.join(found)}" for cell, found in values.items())
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    safe_name = re.sub(r"[^\w.=,+-]", "_", name)
    update = {
        "name": f"{experiment.name}-sweep-{safe_name}",
        "note": f"{experiment.note} {note}".strip(),
        "rows": [row for effect in effects.values() for row in effect.rows(base)],
        "claims": [],
        "baseline": base.named(next(product(*values.values())), base.changing),
    }
    return replace(setting, experiment=experiment.model_copy(update=update))


class _Effects:
    """Meaning of a row at every combination of the cells' values, including its own."""

    def __init__(self, setting: Setting, row: Row, values: Mapping[str, Sequence[str]]) -> None:
        self.row, self.values = row, values
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
            return
        for chosen in product(*(found if cell in cells else [None] for cell, found in self.values.items())):
            paper = self.row.paper if self.meanings[chosen] == self.own else None
            update = {"baseline": base.named(chosen, base.changing), "paper": paper}
            yield self._at(chosen).model_copy(update=update)

    def named(self, chosen: Chosen, cells: set[str]) -> str:
        """Return the row's name at these values, with only the given cells."""
        said = [f"{cell}={value}" for cell, value in self._said(chosen).items() if cell in cells]
        return ", ".join([self.row.name, *said])

    def _said(self, chosen: Chosen) -> dict[str, str]:
        return {cell: value for cell, value in zip(self.values, chosen, strict=True) if value is not None}

    def _at(self, chosen: Chosen) -> SweptRow:
        changed: dict[str, object] = {}
        cells: dict[str, object] = {}
        said = self._said(chosen)
        for cell, text in said.items():
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text
            (changed if cell in ROW_CELLS else cells)[cell] = value
        at = {scale: {**there, **cells} for scale, there in self.row.at.items()}
        changed |= {"name": self.named(chosen, set(said)), "of": self.row.name, "swept": said, "at": at}
        try:
            return SweptRow.model_validate(self.row.model_dump() | changed | {"cells": {**self.row.cells, **cells}})
        except ValidationError as error:
            wrong = complaint(error, SweptRow)
            cell = str(wrong.key[0])
            raise ConfigError((), f"--sweep {cell}={said.get(cell)}: {wrong.message}") from None
