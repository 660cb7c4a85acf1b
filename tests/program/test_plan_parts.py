"""The parts of `plan`, compared with brute force and with the tables that they quote."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.pipeline.schedule import Action, one_forward_one_backward
from hetero_pp.simulator.planner.grouping import (
    LARGEST_LINK,
    Load,
    Pool,
    best_splits,
    group,
)
from hetero_pp.simulator.planner.schedules import (
    FOUR_BITS,
    MEASURED,
    MEASURED_UNCOMPRESSED,
    equivalent_rank,
    ladder,
    penalty_of,
    schedules_of,
    with_outer,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "micro"


@pytest.mark.parametrize(("steps", "rounds"), [(10, 12), (20, 6), (50, 3), (7, 18), (200, 1)])
def test_another_h_trains_as_many_steps(steps: int, rounds: int) -> None:
    """The run has 12 rounds of 10 steps. A remainder becomes one more round."""
    replica = {"name": "dc", "kind": "datacenter", "batch_size": 2}
    config = RunConfig.model_validate(
        {"name": "t", "inner": {"steps": 10}, "outer": {"rounds": 12}, "replicas": [replica]}
    )
    changed = with_outer(config, steps, 1 / 64)
    assert (changed.inner.steps, changed.rounds) == (steps, rounds)
    assert changed.outer.compression.density == 1 / 64
    assert config.rounds == 12


def _splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(np.diff([0, *cuts, layers]).tolist())


def _slowest(costs: np.ndarray, split: tuple[int, ...]) -> float:
    return max(float(costs[stage, count]) for stage, count in enumerate(split))


def _random_costs(random: np.random.Generator, stages: int, layers: int) -> np.ndarray:
    """Return random costs that grow with the number of layers, and are infinite beyond a stage's memory."""
    costs = np.cumsum(random.uniform(0.1, 2, (stages, layers + 1)), axis=1)
    costs[:, 0] = np.inf
    for stage in range(stages):
        costs[stage, random.integers(2, 3 + 2 * layers // stages) :] = np.inf
    return costs


@pytest.mark.parametrize(("stages", "layers"), [(1, 3), (2, 5), (3, 7), (4, 8), (4, 4)])
def test_a_split_is_as_good_as_the_best_of_all(stages: int, layers: int) -> None:
    random = np.random.default_rng(stages)
    costs = np.stack([_random_costs(random, stages, layers) for _ in range(40)])
    counts, seconds = best_splits(costs)
    best = [min(_slowest(one, split) for split in _splits(layers, stages)) for one in costs]
    assert seconds.tolist() == best
    assert stages == 1 or (np.isinf(best).any() and np.isfinite(best).any()) or layers == stages
    for one, count, found in zip(costs, counts, seconds, strict=True):
        if np.isfinite(found):
            assert count.sum() == layers
            assert _slowest(one, tuple(count.tolist())) == found


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_activations_in_flight_are_those_of_the_schedule(extra: int) -> None:
    load = Load(stages=4, micro_batches=9, sequences=1, length=1, extra_in_flight=extra)
    for stage in range(4):
        held = most = 0
        for event in one_forward_one_backward(stage, 4, 9, extra):
            held += (event.action is Action.FORWARD) - (event.action is Action.BACKWARD)
            most = max(most, held)
        assert load.in_flight(stage) == most


SMALL_MACHINES = """\
name: t
model: {preset: 1b, vocabulary: 32000}
data: {sequence_length: 2048}
outer: {rounds: 2}
replicas:
  - {name: dc, kind: datacenter, hardware: h100}
  - {name: home, kind: participants, count: 2, stages: 2, batch_size: 8, micro_batches: 8, hardware: small}
simulate: {hardware: {small: {flops: 10 TFLOP/s, memory: 6 GB, memory_bandwidth: 1 TB/s}}}
"""


def _no_schedules(path: Path, *overrides: str) -> str:
    """Return the error of a group that cannot hold the model, or an empty text."""
    file = ConfigFile(path, overrides)
    try:
        schedules_of(file.config, None, 1)
    except ConfigError as error:
        return str(file.located(error))
    return ""


def test_a_group_without_memory_for_the_model_says_which_machines_lack_how_much(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(SMALL_MACHINES)
    said = _no_schedules(path)
    assert said.startswith(
        f"{path}:7: replicas[1].stages: found 2 stages of home-1 with memory for 6 layers, expected 16 with at least 1 "
        "each: home-1.0 has 6 GB for 3 layers and needs "
    )
    assert "(with 1 sequence per micro-batch)" in said
    [count] = re.findall(r"use --set replicas\.home\.stages=(\d+)", said)
    assert not _no_schedules(path, f"replicas.home.stages={count}")
    assert _no_schedules(path, f"replicas.home.stages={int(count) - 1}")
    assert "has 2 GB for no layer" in (tiny := _no_schedules(path, "simulate.hardware.small.memory=2 GB"))
    assert "no number of stages on these machines is sufficient" in tiny


def _random_pool(seed: int, count: int, stages: int) -> Pool:
    """Return machines of three speeds, some with little memory, and links of all kinds."""
    random = np.random.default_rng(seed)
    layers = stages + 2
    speeds = random.choice([1.0, 2.0, 5.0], count)
    room = random.choice([1, layers, layers], count)
    seconds = np.full((count, stages, layers + 1), np.inf)
    for one, stage, held in itertools.product(range(count), range(stages), range(1, layers + 1)):
        if held <= room[one]:
            seconds[one, stage, held] = (held + (stage == stages - 1)) / speeds[one]
    bandwidth = random.choice([1e6, 1e7, 3e7, 1e8, np.inf], (count, count))
    return Pool(seconds, bandwidth, balance=float(random.choice([0.6, 0.9, 1.0])))


def _path_seconds(pool: Pool, path: tuple[int, ...]) -> float:
    costs = pool.seconds[list(path), range(pool.seconds.shape[1])]
    return min(_slowest(costs, split) for split in _splits(costs.shape[1] - 1, len(costs)))


def _path_link(pool: Pool, path: tuple[int, ...]) -> float:
    hops = [min(pool.bandwidth[a, b], pool.bandwidth[b, a]) for a, b in itertools.pairwise(path)]
    return float(min([*hops, LARGEST_LINK]))


def _packings(sets: list[frozenset[int]], used: frozenset[int], start: int) -> Iterator[list[frozenset[int]]]:
    yield []
    for index in range(start, len(sets)):
        if not sets[index] & used:
            for more in _packings(sets, used | sets[index], index + 1):
                yield [sets[index], *more]


def _brute_force(pool: Pool) -> tuple[int, float, float, float]:
    """Return the best grouping's values, in order of priority.

    They are the number of groups, the slowest group's best possible seconds, the worst link, and the sum of the links'
    logarithms.
    """
    paths = list(itertools.permutations(range(len(pool.seconds)), pool.seconds.shape[1]))
    seconds = {path: _path_seconds(pool, path) for path in paths}
    fastest: dict[frozenset[int], float] = {}
    for path in paths:
        fastest[frozenset(path)] = min(seconds[path], fastest.get(frozenset(path), math.inf))
    able = [one for one, time in fastest.items() if time < math.inf]
    packings = [packing for packing in _packings(able, frozenset(), 0) if packing]
    if not packings:
        return 0, math.inf, 0.0, 0.0
    count, slowest = max(
        ((len(packing), max(fastest[one] for one in packing)) for packing in packings),
        key=lambda found: (round(found[0] / found[1], 9), found[0]),
    )
    links: dict[frozenset[int], float] = {}
    for path in paths:
        if seconds[path] <= slowest / pool.balance:
            links[frozenset(path)] = max(_path_link(pool, path), links.get(frozenset(path), 0))
    good = [packing for packing in packings if len(packing) == count and all(one in links for one in packing)]
    worst, total = max(
        (min(links[one] for one in packing), round(sum(math.log(links[one]) for one in packing), 6)) for packing in good
    )
    return count, slowest, worst, total


@pytest.mark.parametrize(("count", "stages"), [(5, 1), (6, 2), (7, 2), (6, 3), (7, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_groups_are_as_good_as_the_best_of_all(count: int, stages: int, seed: int) -> None:
    pool = _random_pool(seed, count, stages)
    groups, slowest, worst, total = _brute_force(pool)
    found = group(pool, 30)
    if found is None:
        assert groups == 0
        return
    everybody = [one for path in found.groups for one in path]
    assert len(everybody) == len(set(everybody)) == groups * stages
    assert found.proven
    assert max(found.seconds) <= slowest / pool.balance * (1 + 1e-9)
    assert min(found.links) == worst
    assert sum(map(math.log, found.links)) == pytest.approx(total, abs=1e-5)
    for path, seconds, link in zip(found.groups, found.seconds, found.links, strict=True):
        assert seconds == pytest.approx(_path_seconds(pool, tuple(path)))
        assert link == _path_link(pool, tuple(path))


def test_the_tables_are_those_that_were_measured() -> None:
    """The embedding is free, which is the default of boundaries."""
    table = json.loads((RESULTS / "het-pp" / "table2.json").read_text())["rows"]
    bits = json.loads((RESULTS / "beyond" / "rank_for_bits.json").read_text())["rows"]
    free = [row for row in table if row["name"].endswith(", free embedding (ours)") or row["compressed_share"] == 0]
    for row in [*free, *bits]:
        if row["state"] != "done":
            continue
        loss, share = fmean(row["ours"]["seeds"][seed] for seed in "123"), row["compressed_share"]
        if share == 0:
            assert loss == pytest.approx(MEASURED_UNCOMPRESSED, abs=1e-4)
        elif row["bits"] is None:
            assert loss == pytest.approx(MEASURED[share][row["k_over_d"]], abs=1e-4), row["name"]
        elif row["bits"] == 4 and share == 1:
            assert loss == pytest.approx(FOUR_BITS[row["k_over_d"]], abs=1e-4), row["name"]


def test_penalties_are_the_paper_s_and_grow() -> None:
    """Penalties equal Het-PP Table 2 at its entries.

    They are monotone in between, and lower if fewer stages compress.
    """
    said = {1 / 8: (4.0, 3.3), 1 / 24: (5.9, 5.5), 1 / 96: (8.4, 7.7), 1 / 768: (12.5, 9.9)}
    for rank, (all_of_them, half) in said.items():
        assert 100 * penalty_of(rank, 1.0).paper == pytest.approx(all_of_them, abs=0.06)
        assert 100 * penalty_of(rank, 0.5).paper == pytest.approx(half, abs=0.06)
        assert 0 < penalty_of(rank, 0.25).paper < penalty_of(rank, 0.5).paper < penalty_of(rank, 0.75).paper
    ranks = np.geomspace(1, 1 / 768, 50)
    rises = [penalty_of(float(rank), 1.0).paper for rank in ranks]
    assert rises[0] == 0
    assert rises == sorted(rises)
    assert penalty_of(1 / 96, 1.0).measured is None  # k = 2/3 of the 64 dimensions that were trained
    four_bits = penalty_of(equivalent_rank(30 / 64, 4), 1.0).measured
    assert four_bits == pytest.approx(4.0907 / 3.9083 - 1, abs=1e-4)


@pytest.mark.parametrize("width", [64, 1536])
@pytest.mark.parametrize("few_bits", [True, False])
def test_every_rung_loses_more_and_sends_less(width: int, few_bits: bool) -> None:
    rungs = ladder(BoundarySettings(), width, few_bits)
    assert rungs[0].boundary.rank == "full"
    losses = [rung.equivalent for rung in rungs]
    sizes = [
        (rung.boundary.dimensions(width) or width) * (rung.boundary.bits or 16) + 8 * (rung.boundary.bits is not None)
        for rung in rungs
    ]
    assert all(a > b for a, b in itertools.pairwise(losses))
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert any(rung.boundary.bits for rung in rungs) == few_bits
    assert all(rung.boundary.dimensions(width) != 0 for rung in rungs)
