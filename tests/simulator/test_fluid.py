"""Lines in the simulator, against computations by hand, packets that take turns, and the recurrence if none is full."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packets import Machine, Packets
from step_times import time_steps

from hetero_pp.run.read import spec_of
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.simulator.fluid import Network, Stream, fair_rates
from hetero_pp.simulator.fluid import Path as Way
from hetero_pp.simulator.pipeline import GroupClock, Groups, Hops
from hetero_pp.simulator.prediction import Prediction, predict

CONFIGS = Path(__file__).parents[2] / "configs"


# ---- rates ----


def _network(capacities: list[float], *paths: tuple[float, tuple[int, ...]]) -> tuple[list[Stream], Network]:
    streams: list[Stream] = [("activation", hop) for hop in range(len(paths))]
    ways = {one: Way(limit, lines, 0.0, 0.0) for one, (limit, lines) in zip(streams, paths, strict=True)}
    return streams, Network(capacities, ways)


@pytest.mark.parametrize(
    ("capacities", "paths", "rates"),
    [
        ([20.0, 100.0], [(inf, (0, 1)), (inf, (0,))], [10, 10]),
        ([20.0, 100.0], [(inf, (0, 1)), (5.0, (0,))], [15, 5]),
        ([10.0, 15.0], [(inf, (0,)), (inf, (0, 1)), (inf, (1,))], [5, 5, 10]),
        ([], [(7.0, ()), (inf, ())], [7, inf]),
        ([9.0, 1.0], [(inf, (0,)), (inf, (0,)), (inf, (0, 1))], [4, 4, 1]),
    ],
)
def test_rates_by_hand(capacities: list[float], paths: list[tuple[float, tuple[int, ...]]], rates: list[float]) -> None:
    assert fair_rates(*_network(capacities, *paths)) == pytest.approx(rates)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Stream], Network]:
    number = st.floats(1, 1000)
    capacities = draw(st.lists(number, min_size=1, max_size=6))
    lines = st.sets(st.integers(0, len(capacities) - 1), max_size=2).map(lambda one: tuple(sorted(one)))
    paths = draw(st.lists(st.tuples(st.one_of(number, st.just(inf)), lines), min_size=1, max_size=8))
    return _network(capacities, *paths)


@settings(deadline=None)
@given(networks())
def test_rates_are_max_min_fair(case: tuple[list[Stream], Network]) -> None:
    """No stream can get more without taking it from a stream that has no more.

    Each stream fills its own link, or passes a full line on which no stream has more (Bertsekas and Gallager, Data
    Networks, section 6.5.2).
    """
    streams, network = case
    rates = dict(zip(streams, fair_rates(streams, network), strict=True))
    users = [[one for one in streams if line in network.paths[one].lines] for line in range(len(network.capacities))]
    for line, own in enumerate(users):
        assert sum(rates[one] for one in own) <= network.capacities[line] * (1 + 1e-9)
    for stream in streams:
        path = network.paths[stream]
        is_full = [
            sum(rates[one] for one in users[line]) >= network.capacities[line] * (1 - 1e-9)
            and rates[stream] >= max(rates[one] for one in users[line]) * (1 - 1e-9)
            for line in path.lines
        ]
        assert rates[stream] >= path.bandwidth * (1 - 1e-9) or any(is_full)


# ---- groups ----


def _column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=float)[:, None]


def _groups(machines: list[Machine], micro_batches: int, extra: int, bits: dict[str, float], latency: float) -> Groups:
    """Return groups in which each machine s has a line: index 2 s is up, and 2 s + 1 is down."""
    hops = range(len(machines) - 1)
    nothing, delays = _column([0.0 for _ in hops]), _column([latency for _ in hops])
    forward = tuple((2 * hop, 2 * (hop + 1) + 1) for hop in hops)
    backward = tuple((2 * (hop + 1), 2 * hop + 1) for hop in hops)
    return Groups(
        micro_batches,
        extra,
        _column([machine.forward for machine in machines]),
        _column([machine.backward for machine in machines]),
        _column([machine.update for machine in machines]),
        Hops(nothing, delays, nothing, bits["activation"], forward),
        Hops(nothing, delays, nothing, bits["gradient"], backward),
        tuple(rate for machine in machines for rate in (machine.up, machine.down)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Machine], int, int, dict[str, float], float]:
    seconds, rate = st.floats(0.01, 2.0), st.floats(1.0, 20.0)
    machine = st.builds(Machine, seconds, seconds, seconds, rate, rate)
    machines = draw(st.lists(machine, min_size=2, max_size=4))
    bits = {"activation": draw(st.floats(0.5, 10)), "gradient": draw(st.floats(0.5, 10))}
    return machines, draw(st.integers(1, 6)), draw(st.integers(0, 2)), bits, draw(st.floats(0, 1))


@settings(deadline=None, max_examples=25)
@given(cases())
def test_packets_that_take_turns_come_to_the_same(
    case: tuple[list[Machine], int, int, dict[str, float], float],
) -> None:
    machines, micro_batches, extra, bits, latency = case
    found = time_steps(_groups(*case), 1).steps[0][0]
    packets = Packets(machines, micro_batches, extra, bits, latency).step_seconds()
    assert found == pytest.approx(packets, rel=0.01)


@settings(deadline=None, max_examples=20)
@given(cases(), st.floats(0.5, 5), st.integers(1, 3))
def test_lines_that_are_never_full_change_nothing(
    case: tuple[list[Machine], int, int, dict[str, float], float], bandwidth: float, steps: int
) -> None:
    """If the lines are much faster than the links, the times are those of the recurrence."""
    groups = _groups(*case)
    groups = replace(groups, capacities=tuple(1e6 for _ in groups.capacities))
    limited = [
        replace(hops, seconds=np.full_like(hops.seconds, hops.bits / bandwidth))
        for hops in (groups.activations, groups.gradients)
    ]
    with_lines = replace(groups, activations=limited[0], gradients=limited[1])
    assert with_lines.has_lines
    without = replace(with_lines, activations=replace(limited[0], lines=()), gradients=replace(limited[1], lines=()))
    assert not without.has_lines
    found, expected = time_steps(with_lines, steps), time_steps(without, steps)
    assert found.ends == pytest.approx(expected.ends)
    assert np.array(found.steps) == pytest.approx(np.array(expected.steps))


def test_what_an_evaluation_left_under_way_is_waited_for() -> None:
    """The first stage starts the next round while its line still carries the evaluation.

    The recurrence has the same end.
    """
    machines = [Machine(0.1, 0.1, 0.1, 1e6, 1e6) for _ in range(3)]
    groups = _groups(machines, 2, 1, {"activation": 10.0, "gradient": 10.0}, 0.1)
    slow = [replace(hops, seconds=np.full_like(hops.seconds, 3.0)) for hops in (groups.activations, groups.gradients)]
    with_lines = replace(groups, activations=slow[0], gradients=slow[1])
    without = replace(with_lines, activations=replace(slow[0], lines=()), gradients=replace(slow[1], lines=()))
    found = []
    for one in (with_lines, without):
        clock = GroupClock(one)
        clock.evaluate(4, one.forward, one.activations)
        clock.inner_loop(2)
        found.append(clock.free.copy())
    assert found[0] == pytest.approx(found[1])


def test_groups_are_timed_one_by_one() -> None:
    """Different and equal groups have the same times side by side as alone."""
    machines = [Machine(0.5, 1.0, 0.2, 3.0, 4.0) for _ in range(3)]
    one = _groups(machines, 4, 1, {"activation": 2.0, "gradient": 1.0}, 0.1)
    delays = np.array([[0.1, 0.1, 0.9], [0.1, 0.1, 0.5]])
    many = replace(
        one,
        forward=np.tile(one.forward, 3),
        backward=np.tile(one.backward, 3),
        update=np.tile(one.update, 3),
        activations=replace(one.activations, seconds=np.zeros((2, 3)), jitter=np.zeros((2, 3)), latency=delays),
        gradients=replace(one.gradients, seconds=np.zeros((2, 3)), jitter=np.zeros((2, 3)), latency=delays),
    )
    slow = replace(
        one,
        activations=replace(one.activations, latency=delays[:, 2:]),
        gradients=replace(one.gradients, latency=delays[:, 2:]),
    )
    ends = time_steps(many, 3).ends
    assert ends[:, 0] == pytest.approx(time_steps(one, 3).ends[:, 0])
    assert (ends[:, 0] == ends[:, 1]).all()
    assert ends[:, 2] == pytest.approx(time_steps(slow, 3).ends[:, 0])
    assert (ends[:, 2] > ends[:, 0]).all()


# ---- a run ----

DSL = "lines={dsl: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 10 ms}}"


def _predicted(rank: str, *changes: str) -> Prediction:
    group = ["boundary.rank=" + rank, "stages.line=dsl"]
    own = [f"replicas.{index}.{change}" for index in (0, 1) for change in group]
    return predict(spec_of(ConfigFile(CONFIGS / "paper" / "1b.yaml", ["simulate.machine=h100", DSL, *own, *changes])))


def test_a_middle_stage_sends_both_neighbours_by_one_line() -> None:
    """32 micro-batches of 2048 tokens at k = 256 in bf16 are 33.6 MB each way.

    A middle stage therefore sends 67.3 MB in a step: 26.9 s at 20 Mbit/s. The way there and back of the first and the
    last micro-batch comes on top.
    """
    found = _predicted("1/4", "data.validation_sequences=1")
    assert 26.9 < found.step_seconds < 26.9 * 1.06
    up = {line.name: line.up_bytes for line in found.lines}
    steps = 50
    assert up["home0.1"] * 8 / 20e6 / steps == pytest.approx(26.9, rel=0.005)


def test_a_line_twice_as_fast_halves_the_step() -> None:
    """Lines dominate here, and latency is negligible."""
    slow, fast = _predicted("1/4"), _predicted("1/4", "lines.dsl.up=40 Mbit/s", "lines.dsl.down=200 Mbit/s")
    assert slow.step_seconds / fast.step_seconds == pytest.approx(2, rel=0.02)
    assert max(line.up_busy for line in slow.lines) > 0.9
    assert max(line.down_busy for line in slow.lines) < 0.25


def test_a_download_that_is_slower_than_uploads_decides() -> None:
    found = _predicted("1/4", "lines.dsl.up=200 Mbit/s", "lines.dsl.down=20 Mbit/s")
    assert 26.9 < found.step_seconds < 26.9 * 1.06
