"""A row of a table as the configuration of a run: the scale's base, the row's replicas, the changed cells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hetero_pp.errors import ConfigError
from hetero_pp.program.experiments.definition import Cells, Experiment, Row, Scale
from hetero_pp.run.config import RunConfig


@dataclass(frozen=True)
class Setting:
    """An experiment at a scale, as this machine and the user's options make it."""

    scale: Scale
    experiment: Experiment
    can_train: bool = True
    """Whether the scale's hardware is here."""
    corpus: str | None = None
    """The user's own text, instead of the experiment's."""
    repeat: bool = False
    """Whether the corpus may be read more than once."""

    def config(self, row: Row, seed: int = 0) -> RunConfig:
        """The row's configuration, checked. Raises ConfigError naming the row."""
        try:
            config = RunConfig.model_validate(self._values(row, seed))
            config.check()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError((), f"{self.experiment.name}, row `{row.name}`: {where}: {first['msg']}") from None
        except ConfigError as error:
            raise ConfigError((), f"{self.experiment.name}, row `{row.name}`: {error}") from None
        return config

    def why_not(self, row: Row) -> str | None:
        """Why a row cannot be trained; None if it can."""
        return self.not_representable(row) or (None if self.can_train else "validated only: this scale needs a GPU")

    def not_representable(self, row: Row) -> str | None:
        """Why the scale has no such row; None if it has."""
        count = self._replica_count(row)
        if (row.compressed_share * count) % 1:
            return f"not representable: {row.compressed_share:g} of {count} replicas"
        if isinstance(row.rank, float):
            width = self.config(row).model.resolve(self.scale.vocabulary).width
            if row.rank * width < 1:
                return f"not representable: k = {row.rank * width:.2g} of {width} dimensions"
        return None

    def rows(self) -> list[Row]:
        """The rows that can be trained."""
        return [row for row in self.experiment.rows if self.why_not(row) is None]

    def cells(self, row: Row) -> Iterator[tuple[str, Any]]:
        """What is changed of the scale's base, in the order in which it is applied."""
        for cells in (self.experiment.at.get(self.scale.name, {}), row.at.get(self.scale.name, {}), row.cells):
            yield from cells.items()

    def _replica_count(self, row: Row) -> int:
        return row.replicas or self.scale.replicas

    def _values(self, row: Row, seed: int) -> Cells:
        values: Cells = json.loads(json.dumps(self.scale.base)) | {"name": "row", "seed": seed}
        corpus = self.corpus or self.experiment.corpus
        values["data"] |= {"repeat": self.repeat} | ({} if corpus is None else {"corpus": corpus})
        values["replicas"] = list(self._replicas(row))
        for cell, value in self.cells(row):
            for node, keys in _places(values, cell):
                _set(node, keys, value, cell)
        values["outer"]["rounds"] = round(values["outer"]["rounds"] * row.budget)
        return values

    def _replicas(self, row: Row) -> Iterator[Cells]:
        """The compressed ones first."""
        count = self._replica_count(row)
        compressed = round(row.compressed_share * count)
        for index in range(count):
            replica: Cells = {"name": f"r{index}", "batch_size": self.scale.batch_size}
            if index < compressed:
                boundary = {"rank": row.rank, "bits": row.bits, "ablations": dict(row.ablations)}
                yield replica | {"kind": "participants", "stages": self.scale.stages, "boundary": boundary}
            else:
                yield replica | {"kind": "datacenter"}


def _places(values: Cells, cell: str) -> Iterator[tuple[Cells, list[str]]]:
    """Where a cell stands: once in the run, or in every replica that has such a thing."""
    keys = cell.split(".")
    if keys[0] != "replicas":
        yield values, keys
        return
    if len(keys) == 1:
        raise ConfigError((), f"cell `{cell}`: expected a key of each replica, such as `replicas.batch_size`")
    for replica in values["replicas"]:
        if keys[1] in ("stages", "boundary", "extra_in_flight") and replica["kind"] == "datacenter":
            continue
        yield replica, keys[1:]


def _set(node: Any, keys: list[str], value: Any, cell: str) -> None:
    *parents, last = keys
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError((), f"cell `{cell}`: found no section to set `{last}` in")
    node[last] = value
