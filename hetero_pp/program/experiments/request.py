"""What the user asked of `hetero-pp reproduce`: which experiments, at which scale, swept how, on what text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hetero_pp.errors import ConfigError
from hetero_pp.program.experiments.definition import Catalog, Experiment, Row
from hetero_pp.program.experiments.jobs import Training
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.sweeps import parse_sweep


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    catalog: Catalog
    names: Sequence[str] = ()
    scale: str = "micro"
    seeds: int = 3
    workers: int = 1
    corpus: str | None = None
    repeat: bool = False
    sweeps: Sequence[str] = ()
    runs: Path = Path("runs")
    results: Path = Path("benchmarks/results")
    trains: bool = True
    """False: write the tables from what was trained so far."""
    training: Training = field(default_factory=Training)
    can_train: bool = True
    """Whether the scale's hardware is here."""

    def settings(self) -> list[Setting]:
        """The experiments by name (all, if none is named); those with changed rows or text get names of their own."""
        names = self.names or sorted(self.catalog.experiments)
        return [self._setting(self.catalog.experiment(name)) for name in names]

    def _setting(self, experiment: Experiment) -> Setting:
        if self.sweeps:
            experiment = swept(experiment, self.sweeps)
        if self.corpus is not None:
            experiment = experiment.model_copy(update={"name": f"{experiment.name}-{Path(self.corpus).stem}"})
        scale = self.catalog.scale(self.scale)
        return Setting(scale, experiment, self.can_train, self.corpus, self.repeat)


def swept(experiment: Experiment, sweeps: Sequence[str]) -> Experiment:
    """The experiment with every row repeated for each value of `cell=a,b,c`; claims are left out.

    The baseline stays the declared one, at the first values. A cell is one of a row (`rank`, `bits`, `compressed`,
    `budget`, `replicas`), or of the run, by its dotted name.
    """
    rows, baseline = list(experiment.rows), experiment.baseline
    for sweep in sweeps:
        cell, values = parse_sweep("--sweep", sweep, "CELL=A,B such as `outer.compression.density=1/128,1/32`")
        rows = [_changed(row, cell, value) for row in rows for value in values]
        baseline = _name(baseline, cell, values[0])
    update = {"name": f"{experiment.name}-sweep", "rows": rows, "claims": [], "baseline": baseline}
    return experiment.model_copy(update=update)


def _changed(row: Row, cell: str, text: str) -> Row:
    value = _plain(text)
    own = {cell: value} if cell in Row.model_fields else {"cells": {**row.cells, cell: value}}
    try:
        return Row.model_validate(row.model_dump() | own | {"name": _name(row.name, cell, text)})
    except ValidationError as error:
        raise ConfigError((), f"--sweep {cell}={text}: {error.errors()[0]['msg']}") from None


def _name(row: str, cell: str, text: str) -> str:
    return f"{row}, {cell}={text}"


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def with_device(request: Request, device: str) -> Request:
    """The request for `cpu`, `cuda`, or what the scale wants if it is here (`auto`)."""
    import torch

    has_gpu, wants_gpu = torch.cuda.is_available(), request.catalog.scale(request.scale).hardware == "gpu"
    if device == "cuda" and not has_gpu:
        raise ConfigError((), "--device cuda: found no GPU that torch can use")
    chosen = device if device != "auto" else "cuda" if wants_gpu and has_gpu else "cpu"
    can_train = not wants_gpu or chosen == "cuda" or device == "cpu"
    return replace(request, training=replace(request.training, device=chosen), can_train=can_train)
