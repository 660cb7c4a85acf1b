"""Configuration of a row's run: the scale's base, the row's replicas and changed cells, and its method's rate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from hetero_pp.config.overrides import keys_of_replica, places_of
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import complaint
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.outer.methods import change_method
from hetero_pp.research.experiments.definition import EVERY, Cells, Experiment, Method, Row, Scale
from hetero_pp.research.settings import ResearchConfig

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
_OWN_CELLS = {
    "rank": ("replicas", "boundary", "rank"),
    "bits": ("replicas", "boundary", "bits"),
    "ablations": ("research", "ablations"),
}
"""Keys of a run by the row's own key that sets them."""
_ROUNDED = 0.02  # largest relative difference between a row's steps and its budget, as rounds must be whole
EQUAL_STEPS = "rows are compared after equal numbers of steps"


@dataclass(frozen=True)
class Setting:
    """An experiment at a scale, with this machine's abilities and the user's options."""

    scale: Scale
    experiment: Experiment
    can_train: bool = True  # whether this machine has the scale's hardware
    corpus: str | None = None  # the user's corpus, which replaces the experiment's
    repeat: bool = False  # whether the corpus may be read more than once
    command: str = ""  # command that makes the table, without the number of seeds

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
        where = f"(row `{row.name}` at scale {self.scale.name})"
        try:
            config = ResearchConfig.model_validate(self._values(row, seed))
            rate, (section, key) = self.scale.rates.get(method_of(config)), rate_cell(config)
            if rate is not None and all(cell != f"{section}.{key}" for cell, _ in self.cells(row)):
                own = getattr(config, section).model_copy(update={key: rate})
                config = config.model_copy(update={section: own})
            config.check()
            config.inner.require_steps(EQUAL_STEPS)
        except (ValidationError, ConfigError) as error:
            wrong = complaint(error, ResearchConfig) if isinstance(error, ValidationError) else error
            raise self._located(ConfigError(wrong.key, f"{wrong.message} {where}"), row) from None
        for key in sorted(set(EVERY.values())):
            every = getattr(self.experiment, key)
            if every is not None and every > config.rounds:
                told = f"found {every}, expected at most the {config.rounds} rounds of row `{row.name}`"
                raise self.experiment.located(ConfigError((key,), f"{told} at scale {self.scale.name}"))
        return config

    def meaning(self, row: Row) -> Any:
        """Return everything that determines the row's outcome except its seed and its tokens; equal for equal rows."""
        return settings_of(self.config(row), self.scale.vocabulary)

    def width(self, row: Row) -> int:
        """Return the width of the row's model."""
        return self.config(row).model.resolve(self.scale.vocabulary).width

    def why_not(self, row: Row) -> str | None:
        """Return the reason why a row cannot be trained; None if it can."""
        return self.not_representable(row) or (None if self.can_train else "only validated: this scale needs a GPU")

    def not_representable(self, row: Row) -> str | None:
        """Return the reason why the scale cannot represent the row; None if it can."""
        count = row.replicas or self.scale.replicas
        if (row.compressed_share * count) % 1:
            return f"not representable: {row.compressed_share:g} of {count} replicas"
        if row.steps is not None:
            rounds = self.config(row).rounds
            steps = self._all_steps(row, self._cells(row, 0))
            if abs(rounds * row.steps - steps) > _ROUNDED * steps:
                return f"not representable: {steps:g} steps are not a multiple of {row.steps}"
        if isinstance(row.rank, float) and row.rank * self.width(row) < 1:
            return f"not representable: k = {row.rank * self.width(row):.2g} of {self.width(row)} dimensions"
        return None

    def representable(self) -> list[Row]:
        """Return the rows that the scale can represent."""
        return [row for row in self.experiment.rows if self.not_representable(row) is None]

    def rows(self) -> list[Row]:
        """Return the rows that can be trained."""
        return self.representable() if self.can_train else []

    def cells(self, row: Row) -> Iterator[tuple[str, Any]]:
        """Yield the cells that change the scale's base, in the order in which they are applied."""
        name, of_size = self.scale.name, Cells()
        if row.size is not None:
            if row.size not in self.scale.sizes:
                known = ", ".join(self.scale.sizes) or "no size: the scale has no `sizes`"
                raise ConfigError(("size",), f"found `{row.size}`, expected one of {name}'s: {known}")
            of_size = self.scale.sizes[row.size]
        for cells in (of_size, self.experiment.at.get(name, {}), row.cells, row.at.get(name, {})):
            yield from cells.items()

    def _values(self, row: Row, seed: int) -> Cells:
        values = self._cells(row, seed)
        if row.budget != 1 or row.steps is not None:
            steps = row.steps or ResearchConfig.model_validate(values).inner.require_steps(EQUAL_STEPS)
            _set(values, ["outer", "rounds"], max(1, round(self._all_steps(row, values) / steps)), "outer.rounds")
            _set(values, ["inner", "steps"], steps, "inner.steps")
        return values

    def _all_steps(self, row: Row, values: Cells) -> float:
        """Return the steps of all rounds, where `values` are the row's without its budget and its H."""
        config = ResearchConfig.model_validate(values)
        return config.inner.require_steps(EQUAL_STEPS) * config.rounds * row.budget

    def _cells(self, row: Row, seed: int) -> Cells:
        values: Cells = json.loads(json.dumps(self.scale.base)) | {"name": "row", "seed": seed}
        corpus = self.corpus or self.experiment.corpus
        values.setdefault("data", {}).update({"repeat": self.repeat} | ({} if corpus is None else {"corpus": corpus}))
        count = row.replicas or self.scale.replicas
        values["replicas"] = [{"name": f"r{index}", "batch_size": self.scale.batch_size} for index in range(count)]
        for index, replica in enumerate(values["replicas"]):  # compressed replicas first
            if index < round(row.compressed_share * count):
                boundary: Cells = {"rank": row.rank, "bits": row.bits}
                boundary |= {} if row.embedding is None else {"embedding": row.embedding}
                replica.update(kind="participants", stages=self.scale.stages, boundary=boundary)
            else:
                replica["kind"] = "datacenter"
        if row.ablations:
            values["research"] = {"ablations": dict(row.ablations)}
        for cell, value in sorted(self.cells(row), key=lambda one: one[0] != "outer.method"):
            if cell == "outer.method":
                change_method(values.setdefault("outer", {}), value)
                continue
            if cell in _NOT_CELLS:
                raise ConfigError(cell.split("."), f"found a key that a row cannot set, expected {_NOT_CELLS[cell]}")
            for node, keys in _sections(values, cell):
                _set(node, keys, value, cell)
        return values

    def _located(self, error: ConfigError, row: Row) -> ConfigError:
        """Return an error about a row's run with the file and line that set the key."""
        # a run's key as cells write it: `replicas.boundary.rank` for either kind, without an index
        key = tuple(part for part in error.key if isinstance(part, str) and part not in ("datacenter", "participants"))
        # everything that the row changes, by its key in the experiment's file, in reverse order of application
        name, of_table = self.scale.name, self.experiment.at.get(self.scale.name, {})
        own = "rows", [one.name for one in self.experiment.rows].index(row.name)
        places: list[tuple[str | int, ...]] = [(*own, "at", name, cell) for cell in reversed(row.at.get(name, {}))]
        places += [(*own, "cells", cell) for cell in reversed(row.cells)]
        places += [("at", name, cell) for cell in reversed(of_table)] + [(*own, cell) for cell in _OWN_CELLS]
        for place in places:
            parts = _parts(str(place[-1]))
            if _overlap(parts, key):
                return self.experiment.located(ConfigError((*place, *key[len(parts) :]), error.message))
        return self.scale.located(ConfigError(("base", *key), error.message))


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


def _sections(values: Cells, cell: str) -> Iterator[tuple[Cells, list[str]]]:
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


def settings_of(config: RunConfig, vocabulary: int) -> Any:
    """Return the outcome-relevant part of a configuration as JSON, with ranks as numbers and without defaults."""
    width, replicas = config.model.resolve(vocabulary).width, []
    for replica in config.replicas:
        if isinstance(replica, ParticipantsReplica):  # 1/8 of 64 is 8
            rank = replica.boundary.dimensions(width) or "full"
            replica = replica.model_copy(update={"boundary": replica.boundary.model_copy(update={"rank": rank})})
        replicas.append(replica)
    said = meaning(config.model_copy(update={"replicas": replicas}), NotPartOf.OUTCOME, defaults=False)
    # An `embedding` that all boundaries share moves to `research.ablations`, where committed rows have it.
    boundaries = [one.get("boundary", {}) for one in said["replicas"] if one["kind"] == "participants"]
    found = {one.get("embedding") for one in boundaries}
    if found and len(found) == 1 and found != {None}:
        ablations = said.setdefault("research", {}).setdefault("ablations", {})
        ablations["embedding"] = found.pop()
        for one in boundaries:
            del one["embedding"]
    return said


def method_of(config: ResearchConfig) -> Method:
    """Return the method of a row. It depends on nothing but settings that determine the row's outcome."""
    outer, is_alone = config.outer, len(config.replicas) == 1
    if outer.source == "gradient":
        return "adamw" if is_alone else "adamw_ddp"
    if outer.aggregation == "sign":
        return "demo"
    if config.inner.optimizer == "muon":
        return "muon"
    boundaries = [one.boundary for one in config.replicas if isinstance(one, ParticipantsReplica)]
    has_peer = config.research.ablations.peer is not None
    # boundaries that lose more than the digits of their type
    compressed = [one for one in boundaries if one.rank != "full" or one.bits is not None or has_peer]
    if compressed:
        are_all = len(compressed) == len(config.replicas)
        if compressed[0].embedding == "free":
            return "pp_compress_free" if are_all else "het_pp_compress_free"
        return "pp_compress" if are_all else "het_pp_compress"
    if outer.compression.memory == "momentum":
        return "diloco_lom"
    if outer.is_sparse:
        return "sparseloco"
    if outer.optimizer == "adam":
        return "diloco_adam"
    if outer.momentum == 0:
        return "diloco_sgd"
    if not outer.nesterov:
        return "diloco_momentum"
    return "diloco_one_worker" if is_alone else "diloco"


def rate_cell(config: ResearchConfig) -> tuple[str, str]:
    """Return the section and the key of the rate: the outer one of DeMo, whose inner steps are plain SGD of rate 1."""
    return "outer" if method_of(config) == "demo" else "inner", "learning_rate"


def rate_of(config: ResearchConfig) -> float:
    section, key = rate_cell(config)
    return float(getattr(getattr(config, section), key))
