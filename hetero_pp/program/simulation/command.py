"""`hetero-pp simulate`: predict a YAML's topology, print it, and write what was asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.errors import ConfigError
from hetero_pp.program.config import RunPlan
from hetero_pp.program.display import wide
from hetero_pp.program.simulation.charts import draw_prediction, draw_sweep
from hetero_pp.program.simulation.prediction import Prediction, predict
from hetero_pp.program.simulation.show import print_prediction, print_sweep
from hetero_pp.program.simulation.sweep import parse_sweep
from hetero_pp.program.simulation.timeline import Timeline
from hetero_pp.program.yaml_file import ConfigFile


@dataclass(frozen=True)
class Outputs:
    """Files to write, where asked for."""

    json: Path | None = None
    timeline: Path | None = None
    chart: Path | None = None


def plan_of(file: ConfigFile) -> RunPlan:
    """The plan of a YAML whose corpus nobody reads; only its tokenizer's vocabulary is needed."""
    config = file.config.with_absolute_paths()
    try:
        known = None if config.model.vocabulary is not None else load_tokenizer(config.data).vocabulary
        return RunPlan(config, known)
    except ConfigError as error:
        raise file.located(error) from None


def simulate(path: Path, overrides: Sequence[str], outputs: Outputs) -> None:
    """Predict once."""
    file = ConfigFile(path, overrides)
    plan = plan_of(file)
    timeline = None if outputs.timeline is None else Timeline()
    prediction = _predict(file, plan, timeline)
    print_prediction(wide(Console(), 120), path, plan, prediction)
    if timeline is not None and outputs.timeline is not None:
        timeline.write(outputs.timeline)
    _write_json(outputs.json, prediction.as_json())
    if outputs.chart is not None:
        draw_prediction(prediction, outputs.chart)


def simulate_sweep(path: Path, overrides: Sequence[str], sweep: str, outputs: Outputs) -> None:
    """Predict at every value of a key; curves of what it does."""
    if outputs.timeline is not None:
        raise ConfigError((), "--timeline: a sweep has no single timeline; leave one of both out")
    key, values = parse_sweep(sweep)
    predictions: dict[str, Prediction] = {}
    for value in values:
        file = ConfigFile(path, [*overrides, f"{key}={value}"])
        predictions[value] = _predict(file, plan_of(file), None)
    print_sweep(wide(Console(), 120), key, predictions)
    points = [{"value": value, **prediction.as_json()} for value, prediction in predictions.items()]
    _write_json(outputs.json, {"key": key, "points": points})
    if outputs.chart is not None:
        draw_sweep(key, predictions, outputs.chart)


def _predict(file: ConfigFile, plan: RunPlan, timeline: Timeline | None) -> Prediction:
    try:
        return predict(plan, None if timeline is None else timeline.of)
    except ConfigError as error:
        raise file.located(error) from None


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
