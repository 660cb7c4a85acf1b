"""Split of layers over the stages of a group: the slowest stage is as fast as possible, and all fit their memory.

Shapes: N groups, S stages, L layers. A table of costs [N, S, L + 1] holds the seconds of a micro-batch on each stage
with that number of layers; infinity if they do not fit its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetero_pp.config.predictions import Hardware
from hetero_pp.config.spec import RunSpec
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import EMBEDDING, LAYERS, block_of
from hetero_pp.simulator.costs import NOTHING, StagePart, boundary_numbers, cost_on
from hetero_pp.simulator.memory import Trains, memory_of_part

Array = np.ndarray
NOT_COMPRESSED = BoundarySettings()


@dataclass(frozen=True)
class Load:
    """Schedule and shapes of a group: they decide the time and memory of a stage, together with its layers."""

    stages: int
    micro_batches: int
    sequences: int  # sequences of one micro-batch
    length: int
    extra_in_flight: int
    boundary: BoundarySettings = NOT_COMPRESSED

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches whose activations the stage holds."""
        return min(self.micro_batches, (self.stages - 1 - stage) * (1 + self.extra_in_flight) + 1)


@lru_cache(maxsize=4)
def _sizes(spec: RunSpec) -> tuple[int, int, int]:
    """Return the numbers of parameters of the embedding, of one layer, and of the head. All layers are alike."""
    numbers = {name: math.prod(shape) for name, shape in spec.parameter_shapes.items()}
    layer = sum(size for name, size in numbers.items() if block_of(name) == f"{LAYERS}0")
    head = sum(size for name, size in numbers.items() if not name.startswith(LAYERS) and name != EMBEDDING)
    return numbers[EMBEDDING], layer, head


def part_of_stage(spec: RunSpec, stage: int, load: Load, layers: int) -> StagePart:
    """Return the part of the run's model that a stage with that number of layers has."""
    first, last, (embedding, layer, head) = stage == 0, stage == load.stages - 1, _sizes(spec)
    own = boundary_numbers(spec.shape, load.boundary, first) if load.stages > 1 else NOTHING
    return StagePart(layers, last, layers * layer + first * embedding + last * head, own)


def stage_bytes(spec: RunSpec, stage: int, load: Load, layers: int, hardware: Hardware) -> float:
    """Return the bytes that a stage needs for its part, in the memory of its hardware."""
    trains = Trains(
        load.sequences,
        load.length,
        load.micro_batches,
        load.in_flight(stage),
        value_bytes=2 if hardware.is_accelerator else 4,
        accelerated=hardware.is_accelerator,
    )
    memory = memory_of_part(spec.shape, part_of_stage(spec, stage, load, layers), trains)
    return memory.n_bytes(memory.computing_place)


def stage_seconds(spec: RunSpec, hardware: Hardware, accelerators: int, stage: int, load: Load) -> Array:
    """Return the seconds of a micro-batch by number of layers, [L + 1], with its share of the optimizer step.

    Infinity if the layers do not fit the memory.
    """
    found = np.full(spec.shape.layers + 1, np.inf)
    for layers in range(1, spec.shape.layers - load.stages + 2):
        if stage_bytes(spec, stage, load, layers, hardware) <= hardware.memory * accelerators:
            part = part_of_stage(spec, stage, load, layers)
            cost = cost_on(spec.shape, part, hardware, accelerators, load.sequences, load.length)
            found[layers] = cost.forward + cost.backward + cost.update / load.micro_batches
    return found


def best_splits(costs: Array) -> tuple[Array, Array]:
    """Return the layers of each stage [N, S] and the seconds of the slowest stage [N], for costs [N, S, L + 1].

    Seconds are infinite if no split fits. Dynamic programming over stages and layers, exact: best(s, l) = min over k of
    max(best(s-1, l-k), cost(s, k)).
    """
    groups, stages, columns = costs.shape
    best = costs[:, 0, :].copy()
    taken = np.zeros((stages, groups, columns), dtype=int)
    taken[0] = np.arange(columns)
    for stage in range(1, stages):
        before, best = best, np.full((groups, columns), np.inf)
        for layers in range(stage + 1, columns):
            own = np.arange(1, layers)
            slowest = np.maximum(before[:, layers - own], costs[:, stage, own])
            choice = slowest.argmin(axis=1)
            best[:, layers] = slowest[np.arange(groups), choice]
            taken[stage, :, layers] = own[choice]
    counts = np.zeros((groups, stages), dtype=int)
    left = np.full(groups, columns - 1)
    for stage in reversed(range(stages)):
        counts[:, stage] = taken[stage, np.arange(groups), left]
        left -= counts[:, stage]
    return counts, best[:, -1]


def best_split(costs: Sequence[Array]) -> tuple[list[int], float]:
    """Return the split of one group, and the seconds of its slowest stage.

    Prefers the even split, whose earlier stages take the remainder, if no other is faster.
    """
    counts, seconds = best_splits(np.stack(costs)[None])
    share, more = divmod(len(costs[0]) - 1, len(costs))
    even = [share + (stage < more) for stage in range(len(costs))]
    if max(float(cost[count]) for cost, count in zip(costs, even, strict=True)) <= seconds[0]:
        return even, float(seconds[0])
    return counts[0].tolist(), float(seconds[0])
