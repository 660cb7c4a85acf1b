"""Turns the answers of `init` into a configuration. The planner chooses boundaries, and the simulator the rounds.

Without the planner the boundary is the README's: half of the dimensions, 4 bits each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetero_pp.config.predictions import ASSUMED, CATALOG
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import accelerators, name_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_percent
from hetero_pp.data.corpora import corpus_bytes
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.model.transformer import ModelSettings, ModelShape
from hetero_pp.program.init.questions import Answers, Machines
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.program.launch.this_machine import usable_cores
from hetero_pp.simulator.planner.search import search
from hetero_pp.simulator.prediction import Prediction, predict

TARGET_UTILIZATIONS = (0.9, 0.7)
"""Utilizations relative to free links. The planner tries to reach the first, then the next; else it chooses nothing."""

BATCH_SIZE, MOST_STEPS, FEWEST_STEPS = 8, 50, 2
_FEWEST_ROUNDS = 10  # rounds that a run should have; shorter runs have shorter rounds
MOST_STAGES = 4  # homes of a group, if their number can be divided so: the default of `plan.stages`
_SMALL_MODEL, _SMALL_TEXT = 20e6, 2e6  # parameters, and bytes of text, below which the defaults of small runs apply


@dataclass(frozen=True)
class Draft:
    """A configuration, and what the comments of its YAML say."""

    sections: dict[str, Any]
    parameters: int
    boundary: str  # origin of the boundary in words; empty without a boundary
    machine: str  # hardware that the prediction assumes, in words
    prediction: Prediction

    @property
    def rounds(self) -> int:
        return int(self.sections["outer"]["rounds"])


def draft(answers: Answers, hardware: str | None) -> Draft:
    """Return the configuration for these answers. Raises ConfigError if it cannot run."""
    data = _data(answers.text)
    vocabulary = load_tokenizer(DataSettings.model_validate(data)).vocabulary
    machines, line = answers.machines, answers.line
    # A group of that many homes needs as many layers.
    model = model_of(answers.model, vocabulary, stages_of(machines.homes, machines.homes) if machines.homes else 1)
    shape = ModelSettings.model_validate(model).resolve(vocabulary)
    is_small = (parameters := parameters_of(shape)) < _SMALL_MODEL
    sections: dict[str, Any] = {
        "name": answers.name,
        "threads": 1 if machines.homes else usable_cores(),
        "model": model,
        "data": {**data, "sequence_length": 128 if is_small else 1024},
        "inner": {"steps": MOST_STEPS, "learning_rate": 6e-3 if is_small else 1e-3, "warmup_steps": 10},
        "outer": {"rounds": 1},
        "lines": {},
        "replicas": _replicas(machines, shape.layers),
        "simulate": _simulated(machines, hardware),
    }
    if machines.homes:
        sections["lines"] = {"home": {"up": f"{line.up:g} Mbit/s", "down": f"{line.down:g} Mbit/s", "latency": "15 ms"}}
    boundary = _planned(sections, vocabulary)
    prediction = _fitted(sections, answers, vocabulary)
    machine = sections["simulate"]["machine"]
    told = "the cores of this machine" if machine == "here" else f"`{machine}` for each member"
    return Draft(sections, parameters, boundary, told, prediction)


def _replicas(machines: Machines, layers: int) -> list[dict[str, Any]]:
    """Return the replicas: the whole model in a datacenter or here, and groups of homes."""
    whole = {"name": "dc", "kind": "datacenter", "batch_size": BATCH_SIZE}
    found: list[dict[str, Any]] = [whole] if machines.has_datacenter else []
    if machines.homes:
        stages = stages_of(machines.homes, layers)
        group: dict[str, Any] = {
            "name": "home",
            "kind": "participants",
            "stages": {"count": stages, "line": "home"},
            "batch_size": BATCH_SIZE,
            "micro_batches": 4 if stages > 1 else 1,
        }
        if stages > 1:
            group["boundary"] = {"rank": 0.5, "bits": 4}
        found.append(group | ({"count": machines.homes // stages} if stages < machines.homes else {}))
    return found


def stages_of(homes: int, layers: int) -> int:
    """Return the homes of each group: the largest divisor up to MOST_STAGES, else the largest that the layers allow.

    A home then holds the whole model by itself if no other number divides the homes.
    """
    divisors = [count for count in range(1, homes + 1) if homes % count == 0]
    small = [count for count in divisors if 1 < count <= min(MOST_STAGES, layers)]
    return max(small or [count for count in divisors if count <= layers])


def _data(text: str) -> dict[str, Any]:
    """Return the `data` section. A small text has a larger share for validation."""
    found: dict[str, Any] = {"corpus": text}
    settings = DataSettings.model_validate(found)
    if settings.streamed is None and corpus_bytes(settings) < _SMALL_TEXT:
        found |= {"validation_share": 0.1, "validation_sequences": 16}
    return found


def _simulated(machines: Machines, hardware: str | None) -> dict[str, Any]:
    """Return the `simulate` section: the hardware that was named, else this machine's for a run here."""
    if hardware is not None:
        if hardware not in CATALOG:
            raise ConfigError((), f"--hardware: found `{hardware}`, expected one of {', '.join(CATALOG)}")
        return {"machine": hardware}
    if machines.homes:
        return {"machine": ASSUMED}
    if gpu := next(iter(accelerators()), None):
        own = name_of(gpu).lower().replace(" ", "-")
        return {"machine": next((name for name in CATALOG if name.removeprefix("rtx-") in own), "rtx-3090")}
    cores, core = usable_cores(), CATALOG[ASSUMED]
    here = {
        "flops": f"{cores * core.flops / 1e9:g} GFLOP/s",
        "mfu": core.mfu,
        "memory": f"{host_memory().total / 1e9:.3g} GB",
        "memory_bandwidth": f"{cores * core.memory_bandwidth / 8e9:g} GB/s",
    }
    return {"machine": "here", "hardware": {"here": here}}


def _config(sections: dict[str, Any]) -> RunConfig:
    config = RunConfig.model_validate(sections)
    config.check()
    return config


def _planned(sections: dict[str, Any], vocabulary: int) -> str:
    """Let the planner choose the boundary and the micro-batches; return the origin of the boundary in words."""
    group = next((one for one in sections["replicas"] if "boundary" in one), None)
    if group is None:
        return ""
    config = _config(sections)
    for target in TARGET_UTILIZATIONS:
        found = search(config, vocabulary, target)
        if found.reached:
            break
    else:
        return f"a default: the planner reaches {format_percent(found.utilization)} of the speed with free links"
    chosen = next(one for one in found.config.replicas if one.name.startswith("home"))
    group["micro_batches"] = chosen.micro_batches
    group["boundary"] = chosen.model_dump(mode="json", exclude_defaults=True).get("boundary") or {"rank": "full"}
    return f"chosen by the planner: {format_percent(found.utilization)} of the speed with free links"


def _fitted(sections: dict[str, Any], answers: Answers, vocabulary: int) -> Prediction:
    """Choose steps and rounds so that the run has the length that was asked for; return the prediction."""
    inner, outer = sections["inner"], sections["outer"]
    prediction = predict(RunSpec(_config(sections), vocabulary))
    rounds = _rounds(sections, answers, prediction)
    if rounds < _FEWEST_ROUNDS:
        inner["steps"] = max(FEWEST_STEPS, int(inner["steps"] * rounds / _FEWEST_ROUNDS))
        prediction = predict(RunSpec(_config(sections), vocabulary))
        rounds = _rounds(sections, answers, prediction)
    outer["rounds"] = max(1, round(rounds))
    inner["warmup_steps"] = max(1, min(inner["steps"] * outer["rounds"] // 10, 500))
    return prediction


def _rounds(sections: dict[str, Any], answers: Answers, prediction: Prediction) -> float:
    length = answers.time
    if length.seconds is not None:
        return length.seconds / prediction.round_seconds
    batches = sum(one["batch_size"] * one.get("count", 1) for one in sections["replicas"])
    tokens = batches * sections["data"]["sequence_length"] * sections["inner"]["steps"]
    return math.ceil((length.tokens or 0) / tokens)


_HEAD_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 64, 64, 16384
_LAYER_WIDTH = 128  # width for each layer, from the papers' models: 1024 / 9, 1536 / 12, 2048 / 16
_FEWEST_LAYERS = 4
_FEED_FORWARD = 8 / 3


def model_of(size: str | float, vocabulary: int, layers: int) -> dict[str, str | int]:
    """Return the `model` section: a preset, or the shape whose number of parameters is nearest to `size`.

    `layers`: least number of layers.
    """
    if isinstance(size, str):
        return {"preset": size}
    found, least = dict[str, str | int](), math.inf
    for width in range(_LEAST_WIDTH, _MOST_WIDTH + 1, _HEAD_WIDTH):
        model: dict[str, str | int] = {
            "width": width,
            "layers": max(_FEWEST_LAYERS, layers, round(width / _LAYER_WIDTH)),
            "heads": max(2, width // _HEAD_WIDTH),
            "feed_forward": _HEAD_WIDTH * round(_FEED_FORWARD * width / _HEAD_WIDTH),
        }
        shape = ModelSettings.model_validate(model).resolve(vocabulary)
        distance = abs(math.log(parameters_of(shape) / size))
        if distance < least:
            found, least = model, distance
    return found


def parameters_of(shape: ModelShape) -> int:
    """Return the number of parameters of a model."""
    layer = shape.attention_numbers + 3 * shape.width * shape.feed_forward + 2 * shape.width
    return shape.layers * layer + shape.width + 2 * shape.vocabulary * shape.width
