"""The event simulation, against a simple event queue, packets that take turns, closed forms, and hand-made cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from packets import Machine, Packets

from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.events import DRAWN, GroupClock, GroupOfEvents, Hop, LineWay, OnSpan, fair_rates, inner_loops
from hetero_pp.simulator.prediction import Prediction, predict

CONFIGS = Path(__file__).parents[2] / "configs"


def _timed(
    group: GroupOfEvents, steps: int, random: np.random.Generator | None = None, on_span: OnSpan | None = None
) -> tuple[list[float], float]:
    """Return when each stage completed its last optimizer step, and when the first stage completed its first."""
    clock = GroupClock(group, random, on_span)
    [times] = inner_loops([clock], [steps])
    assert clock.free[0] == pytest.approx(times.first + (steps - 1) * times.each)
    return clock.free, times.first


def _uniform(stages: int, micro_batches: int, extra: int, message: float, latency: float = 0.0) -> GroupOfEvents:
    """Return a uniform group: 1 s forward, 2 s backward, and no time for the optimizer."""
    hops = [Hop(message, 1.0, latency)] * (stages - 1)
    return GroupOfEvents(micro_batches, extra, [1.0] * stages, [2.0] * stages, [0.0] * stages, hops, hops)


seconds = st.floats(0, 4, allow_nan=False)


@st.composite
def groups(draw: st.DrawFn) -> GroupOfEvents:
    stages = draw(st.integers(1, 5))

    def per_stage() -> list[float]:
        return draw(st.lists(seconds, min_size=stages, max_size=stages))

    def per_hop() -> list[Hop]:
        hops = st.builds(Hop, seconds, st.just(1.0), seconds)
        return draw(st.lists(hops, min_size=stages - 1, max_size=stages - 1))

    counts = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    return GroupOfEvents(*counts, per_stage(), per_stage(), per_stage(), per_hop(), per_hop())


class _Half:
    """A random generator that always draws one half."""

    def random(self) -> float:
        return 0.5


@given(group=groups(), steps=st.integers(1, 6), jitter=st.sampled_from([0.0, 0.75]))
def test_it_agrees_with_an_event_queue(group: GroupOfEvents, steps: int, jitter: float) -> None:
    """Jitter that is always the same is latency."""

    def plain(hops: Sequence[Hop]) -> list[tuple[float, float]]:
        return [(hop.seconds, hop.latency + jitter / 2) for hop in hops]

    def shaken(hops: Sequence[Hop]) -> list[Hop]:
        return [replace(hop, jitter=jitter) for hop in hops]

    shape = group.micro_batches, group.extra_in_flight, list(group.forward), list(group.backward), list(group.update)
    ends, step_ends = reference.simulate(
        reference.Group(*shape, plain(group.activations), plain(group.gradients)), steps
    )
    group = replace(group, activations=shaken(group.activations), gradients=shaken(group.gradients))
    free, first = _timed(group, steps, cast(np.random.Generator, _Half()))
    assert first == pytest.approx(step_ends[0], rel=1e-12, abs=1e-12)
    assert free[0] == pytest.approx(step_ends[-1], rel=1e-12, abs=1e-12)
    if not jitter:  # the norms that follow the last step are small messages without jitter
        assert free == pytest.approx(ends, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
@pytest.mark.parametrize("extra", [0, 1])
def test_infinite_bandwidth_leaves_the_bubble(stages: int, micro_batches: int, extra: int) -> None:
    """The bubble is exactly (S - 1) / (m + S - 1) of a step (Narayanan et al. 2021)."""
    free, _ = _timed(_uniform(stages, micro_batches, extra, 0.0), 1)
    assert max(free) == 3.0 * (micro_batches + stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_slow_link_alone_decides(stages: int) -> None:
    """With enough in flight, each micro-batch takes the time of one message, because both directions work at once.

    In the textbook's schedule S - 1 forwards are ahead of a backward, so a link carries at most S messages per round
    trip, which takes 2 (S - 1) messages.
    """
    many, more = 100, 200
    for message, extra, expected in ((10.0, 3, 10.0), (1000.0, 0, 1000.0 * 2 * (stages - 1) / stages)):
        times = [max(_timed(_uniform(stages, m, extra, message), 1)[0]) for m in (many, more)]
        assert (times[1] - times[0]) / (more - many) == pytest.approx(expected, rel=0.02)


@settings(max_examples=50)
@given(group=groups(), factor=st.floats(0.1, 1))
def test_faster_links_never_slow_a_step_down(group: GroupOfEvents, factor: float) -> None:
    def faster(hops: Sequence[Hop]) -> list[Hop]:
        return [replace(hop, bits=hop.bits * factor) for hop in hops]

    quick = replace(group, activations=faster(group.activations), gradients=faster(group.gradients))
    slow, fast = (_timed(one, 2)[0] for one in (group, quick))
    assert all(fast_end <= slow_end + 1e-9 for fast_end, slow_end in zip(fast, slow, strict=True))


def test_jitter_delays_and_is_drawn_from_the_seed() -> None:
    calm = _uniform(3, 8, 1, 0.5, 0.1)
    hops = [replace(hop, jitter=2.0) for hop in calm.activations]
    shaky = replace(calm, activations=hops, gradients=hops)
    steady, _ = _timed(calm, 4)
    drawn = [_timed(shaky, 4, np.random.default_rng(seed))[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(low < high <= low + 4 * 16 * 2.0 * 2 for low, high in zip(steady, drawn[0], strict=True))
    # Further steps take the mean of those that are drawn.
    mean, more = (_timed(shaky, steps, np.random.default_rng(1))[0][0] / steps for steps in (DRAWN, 50 * DRAWN))
    assert mean == pytest.approx(more, rel=0.01)


def test_spans_are_the_whole_story() -> None:
    """Compute spans of a stage add up to its work, do not overlap, and end when the stage ends."""
    spans: dict[str, list[tuple[float, float]]] = {}

    def on_span(track: str, what: str, micro_batch: int, start: float, end: float) -> None:
        spans.setdefault(track, []).append((start, end))

    free, _ = _timed(_uniform(3, 4, 1, 0.7, 0.2), 3, on_span=on_span)
    hops = {f"hop {hop} {kind}" for hop in range(2) for kind in ("activation", "gradient")}
    assert set(spans) == {f"stage {stage}" for stage in range(3)} | hops
    for track, found in spans.items():
        found.sort()
        assert all(first[1] <= second[0] + 1e-12 for first, second in pairwise(found)), track
    for stage, end in enumerate(free):
        assert sum(end - start for start, end in spans[f"stage {stage}"]) == pytest.approx(3 * 4 * 3.0)
        assert spans[f"stage {stage}"][-1][1] == end


# ---- lines ----


def _network(
    capacities: list[float], paths: list[tuple[float, tuple[int, ...]]]
) -> tuple[list[Hop], dict[LineWay, float]]:
    hops = [Hop(1.0, limit, lines=tuple((str(line), "up") for line in lines)) for limit, lines in paths]
    return hops, {(str(line), "up"): capacity for line, capacity in enumerate(capacities)}


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
    assert fair_rates(*_network(capacities, paths)) == pytest.approx(rates)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Hop], dict[LineWay, float]]:
    number = st.floats(1, 1000)
    capacities = draw(st.lists(number, min_size=1, max_size=6))
    lines = st.sets(st.integers(0, len(capacities) - 1), max_size=2).map(lambda one: tuple(sorted(one)))
    paths = draw(st.lists(st.tuples(st.one_of(number, st.just(inf)), lines), min_size=1, max_size=8))
    return _network(capacities, paths)


@settings(deadline=None)
@given(networks())
def test_rates_are_max_min_fair(case: tuple[list[Hop], dict[LineWay, float]]) -> None:
    """No message can get more without taking it from one that has no more.

    Each fills its own link, or passes a full line on which none has more (Bertsekas and Gallager, Data Networks,
    section 6.5.2).
    """
    hops, capacities = case
    rates = fair_rates(hops, capacities)
    users = {line: [rate for hop, rate in zip(hops, rates, strict=True) if line in hop.lines] for line in capacities}
    for line, own in users.items():
        assert sum(own) <= capacities[line] * (1 + 1e-9)
    for hop, rate in zip(hops, rates, strict=True):
        is_full = [
            sum(users[line]) >= capacities[line] * (1 - 1e-9) and rate >= max(users[line]) * (1 - 1e-9)
            for line in hop.lines
        ]
        assert rate >= hop.bandwidth * (1 - 1e-9) or any(is_full)


Case = tuple[list[Machine], int, int, dict[str, float], float]


def _lined(
    machines: list[Machine], micro_batches: int, extra: int, bits: dict[str, float], latency: float
) -> GroupOfEvents:
    """Return a group in which each machine has a line."""
    pairs = [(f"{hop}", f"{hop + 1}") for hop in range(len(machines) - 1)]
    columns: list[list[float]] = [
        [getattr(machine, key) for machine in machines] for key in ("forward", "backward", "update")
    ]
    return GroupOfEvents(
        micro_batches,
        extra,
        columns[0],
        columns[1],
        columns[2],
        [Hop(bits["activation"], latency=latency, lines=((a, "up"), (b, "down"))) for a, b in pairs],
        [Hop(bits["gradient"], latency=latency, lines=((b, "up"), (a, "down"))) for a, b in pairs],
        evaluate=columns[0],
        evaluations=[Hop(bits["activation"], latency=latency, lines=((a, "up"), (b, "down"))) for a, b in pairs],
        evaluation_batches=4,
        capacities={(f"{one}", way): getattr(own, way) for one, own in enumerate(machines) for way in ("up", "down")},
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seconds, rate = st.floats(0.01, 2.0), st.floats(1.0, 20.0)
    machine = st.builds(Machine, seconds, seconds, seconds, rate, rate)
    machines = draw(st.lists(machine, min_size=2, max_size=4))
    bits = {"activation": draw(st.floats(0.5, 10)), "gradient": draw(st.floats(0.5, 10))}
    return machines, draw(st.integers(1, 6)), draw(st.integers(0, 2)), bits, draw(st.floats(0, 1))


@settings(deadline=None, max_examples=25)
@given(cases())
def test_packets_that_take_turns_come_to_the_same(case: Case) -> None:
    machines, micro_batches, extra, bits, latency = case
    packets = Packets(machines, micro_batches, extra, bits, latency).step_seconds()
    assert _timed(_lined(*case), 1)[1] == pytest.approx(packets, rel=0.01)


@settings(deadline=None, max_examples=20)
@given(cases(), st.floats(0.5, 5), st.integers(1, 3))
def test_lines_that_are_never_full_change_nothing(case: Case, bandwidth: float, steps: int) -> None:
    """If lines are much faster than links, the times are those without lines.

    The first stage begins the next round while its line still carries the evaluation.
    """
    group = _lined(*case)

    def linked(hops: Sequence[Hop], lined: bool) -> list[Hop]:
        return [replace(hop, bandwidth=bandwidth, lines=hop.lines if lined else ()) for hop in hops]

    with_lines, without = (
        replace(
            group,
            capacities=dict.fromkeys(group.capacities, 1e6),
            activations=linked(group.activations, lined),
            gradients=linked(group.gradients, lined),
            evaluations=linked(group.evaluations, lined),
        )
        for lined in (True, False)
    )
    found = []
    for one in (with_lines, without):
        clock = GroupClock(one)
        clock.evaluate()
        inner_loops([clock], [steps])
        found.append(clock.free)
    assert found[0] == pytest.approx(found[1])


# ---- a run ----

DSL = "lines={dsl: {up: 20 Mbit/s, down: 100 Mbit/s, latency: 10 ms}}"


def _predicted(rank: str, *changes: str) -> Prediction:
    group = ["boundary.rank=" + rank, "stages.line=dsl"]
    own = [f"replicas.{index}.{change}" for index in (0, 1) for change in group]
    return predict(spec_of(ConfigFile(CONFIGS / "paper" / "1b.yaml", ["simulate.machine=h100", DSL, *own, *changes])))


def test_a_middle_stage_sends_both_neighbours_by_one_line() -> None:
    """32 micro-batches of 2048 tokens at k = 256 in bf16 are 33.6 MB each way.

    A middle stage therefore sends 67.3 MB in a step: 26.9 s at 20 Mbit/s. The way there and back of the first and the
    last micro-batch comes on top. A download that is slower than uploads decides alike.
    """
    slow = _predicted("1/4", "data.validation_sequences=1")
    down = _predicted("1/4", "lines.dsl.up=200 Mbit/s", "lines.dsl.down=20 Mbit/s")
    assert 26.9 < slow.step_seconds < 26.9 * 1.06
    assert 26.9 < down.step_seconds < 26.9 * 1.06
    up = {line.name: line.up_bytes for line in slow.lines}
    assert up["home0.1"] * 8 / 20e6 / 50 == pytest.approx(26.9, rel=0.005)
    assert max(line.up_busy for line in slow.lines) > 0.9
    assert max(line.down_busy for line in slow.lines) < 0.25


def test_a_line_twice_as_fast_halves_the_step() -> None:
    """Lines dominate here, and latency is negligible."""
    slow, fast = _predicted("1/4"), _predicted("1/4", "lines.dsl.up=40 Mbit/s", "lines.dsl.down=200 Mbit/s")
    assert slow.step_seconds / fast.step_seconds == pytest.approx(2, rel=0.02)
