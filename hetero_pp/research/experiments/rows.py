"""Configuration of a row's run: the scale's base, the row's replicas, and the changed cells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from hetero_pp.core.errors import ConfigError
from hetero_pp.outer.methods import change_method
from hetero_pp.research.experiments.blame import located
from hetero_pp.research.experiments.definition import EVERY, Cells, Experiment, Row, Scale
from hetero_pp.research.experiments.identity import settings_of
from hetero_pp.research.experiments.rates import method_of, rate_cell
from hetero_pp.research.settings import ResearchConfig
from hetero_pp.run.known_keys import keys_of_replica, places_of
from hetero_pp.run.yaml_lines import complaint

_OF_THE_TABLE = "the `corpus` of the experiment, or --corpus, for all rows"
_NOT_CELLS = {
    "name": "the row's own",
    "seed": "--seeds",
    "data": "its keys, one by one",
    "data.corpus": _OF_THE_TABLE,
    "data.text_field": _OF_THE_TABLE,
    "data.tokenizer": "`data.tokenizer` of the scale, or --tokenizer, for all rows",
    "replicas": "`replicas` of the row",
}
"""Keys that cannot be cells of a row, and what to use instead."""


_ROUNDED = 0.02
"""Largest relative difference between a row's steps and its budget, as rounds must be whole."""


@dataclass(frozen=True)
class Setting:
    """An experiment at a scale, with this machine's abilities and the user's options."""

    scale: Scale
    experiment: Experiment
    can_train: bool = True
    """Whether this machine has the scale's hardware."""
    corpus: str | None = None
    """The user's corpus, which replaces the experiment's."""
    repeat: bool = False
    """Whether the corpus may be read more than once."""
    command: str = ""
    """Command that makes the table, without the number of seeds."""

    def config(self, row: Row, seed: int = 0) -> ResearchConfig:
        """Return the row's validated configuration. Raises ConfigError with the row, and with file, line and key."""
        known = self._configs.get((row.name, seed))
        if known is None or known[0] is not row:
            known = self._configs[row.name, seed] = row, self._validated(row, seed)
        return known[1]

    @cached_property
    def _configs(self) -> dict[tuple[str, int], tuple[Row, ResearchConfig]]:
        """Configurations by name and seed, each with its row: a list of experiments asks for each several times."""
        return {}

    def _validated(self, row: Row, seed: int) -> ResearchConfig:
        try:
            config = self._at_its_rate(row, ResearchConfig.model_validate(self._values(row, seed)))
            config.check()
            config.inner.require_steps("rows are compared after equal numbers of steps")
        except ValidationError as error:
            raise self._told(row, complaint(error, ResearchConfig)) from None
        except ConfigError as error:
            raise self._told(row, error) from None
        self._require_measured(row, config)
        return config

    def _at_its_rate(self, row: Row, config: ResearchConfig) -> ResearchConfig:
        """Return the configuration at the scale's rate for its method, unless a cell sets the rate."""
        rate, (section, key) = self.scale.rates.get(method_of(config)), rate_cell(config)
        if rate is None or any(cell == f"{section}.{key}" for cell, _ in self.cells(row)):
            return config
        return config.model_copy(update={section: getattr(config, section).model_copy(update={key: rate})})

    def _require_measured(self, row: Row, config: ResearchConfig) -> None:
        """Raise ConfigError if a measurement's interval exceeds the number of rounds."""
        for key in sorted(set(EVERY.values())):
            every = getattr(self.experiment, key)
            if every is not None and every > config.outer.rounds:
                told = f"found {every}, expected at most the {config.outer.rounds} rounds of row `{row.name}`"
                raise self.experiment.located(ConfigError((key,), f"{told} at scale {self.scale.name}"))

    def meaning(self, row: Row) -> Any:
        """Return everything that determines the row's outcome except its seed and its tokens; equal for equal rows."""
        return settings_of(self.config(row), self.scale.vocabulary)

    def why_not(self, row: Row) -> str | None:
        """Return the reason why a row cannot be trained; None if it can."""
        return self.not_representable(row) or (None if self.can_train else "only validated: this scale needs a GPU")

    def not_representable(self, row: Row) -> str | None:
        """Return the reason why the scale cannot represent the row; None if it can."""
        count = self._replica_count(row)
        if (row.compressed_share * count) % 1:
            return f"not representable: {row.compressed_share:g} of {count} replicas"
        if row.steps is not None:
            rounds = self.config(row).outer.rounds
            steps = self._all_steps(row, self._cells(row, 0))
            if abs(rounds * row.steps - steps) > _ROUNDED * steps:
                return f"not representable: {steps:g} steps are not a multiple of {row.steps}"
        if isinstance(row.rank, float):
            width = self.config(row).model.resolve(self.scale.vocabulary).width
            if row.rank * width < 1:
                return f"not representable: k = {row.rank * width:.2g} of {width} dimensions"
        return None

    def representable(self) -> list[Row]:
        """Return the rows that the scale can represent."""
        return [row for row in self.experiment.rows if self.not_representable(row) is None]

    def rows(self) -> list[Row]:
        """Return the rows that can be trained."""
        return self.representable() if self.can_train else []

    def cells(self, row: Row) -> Iterator[tuple[str, Any]]:
        """Yield the cells that change the scale's base, in the order in which they are applied."""
        name = self.scale.name
        for cells in (self._size(row), self.experiment.at.get(name, {}), row.cells, row.at.get(name, {})):
            yield from cells.items()

    def _size(self, row: Row) -> Cells:
        if row.size is None:
            return {}
        if row.size not in self.scale.sizes:
            known = ", ".join(self.scale.sizes) or "no size: the scale has no `sizes`"
            raise ConfigError(("size",), f"found `{row.size}`, expected one of {self.scale.name}'s: {known}")
        return self.scale.sizes[row.size]

    def _told(self, row: Row, error: ConfigError) -> ConfigError:
        said = ConfigError(error.key, f"{error.message} (row `{row.name}` at scale {self.scale.name})")
        return located(said, row, self.experiment, self.scale)

    def _replica_count(self, row: Row) -> int:
        return row.replicas or self.scale.replicas

    def _values(self, row: Row, seed: int) -> Cells:
        values = self._cells(row, seed)
        if row.budget != 1 or row.steps is not None:
            steps = row.steps or _steps(values)
            _set(values, ["outer", "rounds"], max(1, round(self._all_steps(row, values) / steps)), "outer.rounds")
            _set(values, ["inner", "steps"], steps, "inner.steps")
        return values

    def _all_steps(self, row: Row, values: Cells) -> float:
        """Return the steps of all rounds, where `values` are the row's without its budget and its H."""
        return _steps(values) * ResearchConfig.model_validate(values).outer.rounds * row.budget

    def _cells(self, row: Row, seed: int) -> Cells:
        values: Cells = json.loads(json.dumps(self.scale.base)) | {"name": "row", "seed": seed}
        corpus = self.corpus or self.experiment.corpus
        values.setdefault("data", {}).update({"repeat": self.repeat} | ({} if corpus is None else {"corpus": corpus}))
        values["replicas"] = list(self._replicas(row))
        if row.ablations:
            values["research"] = {"ablations": dict(row.ablations)}
        for cell, value in sorted(self.cells(row), key=lambda one: one[0] != "outer.method"):
            if cell == "outer.method":
                change_method(values.setdefault("outer", {}), value)
                continue
            if cell in _NOT_CELLS:
                raise ConfigError(cell.split("."), f"found a key that a row cannot set, expected {_NOT_CELLS[cell]}")
            for node, keys in _places(values, cell):
                _set(node, keys, value, cell)
        return values

    def _replicas(self, row: Row) -> Iterator[Cells]:
        """Yield the replicas' settings, compressed replicas first."""
        count = self._replica_count(row)
        compressed = round(row.compressed_share * count)
        for index in range(count):
            replica: Cells = {"name": f"r{index}", "batch_size": self.scale.batch_size}
            if index < compressed:
                boundary = {"rank": row.rank, "bits": row.bits, "embedding": row.embedding}
                yield replica | {"kind": "participants", "stages": self.scale.stages, "boundary": boundary}
            else:
                yield replica | {"kind": "datacenter"}


def _steps(values: Cells) -> int:
    return ResearchConfig.model_validate(values).inner.require_steps("rows are compared after equal numbers of steps")


def _places(values: Cells, cell: str) -> Iterator[tuple[Cells, list[str]]]:
    """Yield the sections in which a cell is set: the run, one replica by name, or all replicas that have such a key.

    Raises ConfigError for an unknown replica.
    """
    keys = cell.split(".")
    if keys[0] != "replicas":
        yield values, keys
    elif keys[1] in keys_of_replica({}):
        yield from ((one, keys[1:]) for one in values["replicas"] if keys[1] in keys_of_replica(one))
    else:
        try:
            [(_, index)] = places_of(values, [int(part) if part.isdigit() else part for part in keys[:2]])
        except ConfigError as error:
            raise ConfigError(keys, error.message) from None
        yield values["replicas"][index], keys[2:]


def _set(node: Any, keys: list[str], value: Any, cell: str) -> None:
    *parents, last = keys
    for parent in parents:
        node = node.setdefault(parent, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(cell.split("."), f"found a single value above `{last}`, expected a section")
    node[last] = value
