"""Predicted time of rows: a simulated deployment trains each row, and the table has the row's loss by hour.

The deployment is the YAML of another run, such as the paper's model on its links. Its `simulate.rows` are named by the
table's rows (`timed`), so that a small model's losses are shown on a large model's clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import Experiment
from hetero_pp.run.read import spec_of
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.sweep import Sweep


def predicted_hours(experiment: Experiment) -> dict[str, float]:
    """Return the predicted hours of all rounds of each row that is `timed`; empty without a clock.

    Raises ConfigError as `deployments_of` does.
    """
    clock = experiment.clock
    if clock is None:
        return {}
    deployments, changes = deployments_of(experiment), Sweep.of_rows({"clock": clock.cells}).overrides("clock")
    path, hours = experiment.beside(clock.run), dict[str, float]()
    for row in experiment.rows:
        if row.timed is not None:
            file = ConfigFile(path, [*changes, *deployments.overrides(row.timed)])
            hours[row.name] = 24 * predict(spec_of(file)).days
    return hours


def deployments_of(experiment: Experiment) -> Sweep:
    """Return the deployments of an experiment's clock, without predicting them.

    Raises ConfigError for a file that is not a valid run, and for a row that names an unknown deployment.
    """
    if experiment.clock is None:
        return Sweep.of_rows({})
    path = experiment.beside(experiment.clock.run)
    known = ConfigFile(path).config.simulate.rows
    for number, row in enumerate(experiment.rows):
        if row.timed is not None and row.timed not in known:
            told = f"found `{row.timed}`, expected a row of `simulate.rows` in {path}: {', '.join(known)}"
            raise experiment.located(ConfigError(("rows", number, "timed"), told))
    return Sweep.of_rows(known)


def loss_at(losses: Sequence[float], share: float) -> float:
    """Return the loss after the last round that is complete once this share of a row's time has passed.

    If not even one is, returns the loss after the first.
    """
    return losses[max(1, min(len(losses), math.floor(share * len(losses) + 1e-9))) - 1]
