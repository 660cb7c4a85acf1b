"""The recurrence, compared with an event queue, the worker's own events and closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Group, simulate
from step_times import time_steps

from hetero_pp.pipeline.schedule import one_forward_one_backward
from hetero_pp.simulator import pipeline
from hetero_pp.simulator.pipeline import Groups, Hops, step_order


def _hops(hops: list[tuple[float, float]], jitter: float = 0.0) -> Hops:
    columns = np.array(hops, dtype=float).reshape(-1, 2, 1)
    return Hops(columns[:, 0], columns[:, 1], np.full((len(hops), 1), jitter))


def _arrays(group: Group, jitter: float = 0.0) -> Groups:
    def column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=float)[:, None]

    return Groups(
        group.micro_batches,
        group.extra_in_flight,
        column(group.forward),
        column(group.backward),
        column(group.update),
        _hops(group.activations, jitter),
        _hops(group.gradients, jitter),
    )


def _uniform(stages: int, micro_batches: int, extra: int, message: float, latency: float = 0.0) -> Group:
    """Return a uniform group: 1 s forward, 2 s backward, and no time for the optimizer."""
    hops = [(message, latency)] * (stages - 1)
    return Group(micro_batches, extra, [1.0] * stages, [2.0] * stages, [0.0] * stages, hops, hops)


seconds = st.floats(0, 4, allow_nan=False)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    stages = draw(st.integers(1, 5))

    def per_stage() -> list[float]:
        return draw(st.lists(seconds, min_size=stages, max_size=stages))

    def per_hop() -> list[tuple[float, float]]:
        return draw(st.lists(st.tuples(seconds, seconds), min_size=stages - 1, max_size=stages - 1))

    counts = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    return Group(*counts, per_stage(), per_stage(), per_stage(), per_hop(), per_hop())


@given(group=groups(), steps=st.integers(1, 6))
def test_it_agrees_with_an_event_queue(group: Group, steps: int) -> None:
    expected, expected_steps = simulate(group, steps)
    found = time_steps(_arrays(group), steps)
    assert found.ends[:, 0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert [float(end[0]) for end in found.steps] == pytest.approx(expected_steps, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("stages", "micro_batches", "extra"), [(1, 3, 1), (2, 1, 0), (4, 8, 0), (4, 8, 2), (7, 20, 1)])
def test_it_times_the_events_that_workers_run(stages: int, micro_batches: int, extra: int) -> None:
    order = step_order(stages, micro_batches, extra)
    for stage in range(stages):
        own = [event for owner, event in order if owner == stage]
        assert own == one_forward_one_backward(stage, stages, micro_batches, extra)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
@pytest.mark.parametrize("extra", [0, 1])
def test_infinite_bandwidth_leaves_the_bubble(stages: int, micro_batches: int, extra: int) -> None:
    """The bubble is exactly (S - 1) / (m + S - 1) of a step (Narayanan et al. 2021)."""
    ends = time_steps(_arrays(_uniform(stages, micro_batches, extra, 0.0)), 1).ends
    assert ends.max() == 3.0 * (micro_batches + stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_slow_link_alone_decides_with_enough_in_flight(stages: int) -> None:
    """With many micro-batches, each takes the time of one message, because both directions work at once."""
    message, many, more = 10.0, 100, 200
    times = [time_steps(_arrays(_uniform(stages, m, 3, message)), 1).ends.max() for m in (many, more)]
    assert (times[1] - times[0]) / (more - many) == pytest.approx(message, rel=0.02)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_textbook_schedule_waits_for_round_trips(stages: int) -> None:
    """With S - 1 forwards ahead of a backward, a link carries at most S messages per round trip.

    A round trip takes 2 (S - 1) messages.
    """
    message, many, more = 1000.0, 100, 200
    times = [time_steps(_arrays(_uniform(stages, m, 0, message)), 1).ends.max() for m in (many, more)]
    per_micro_batch = (times[1] - times[0]) / (more - many)
    assert per_micro_batch == pytest.approx(message * 2 * (stages - 1) / stages, rel=0.02)


@settings(max_examples=50)
@given(group=groups(), factor=st.floats(0.1, 1))
def test_faster_links_never_slow_a_step_down(group: Group, factor: float) -> None:
    def faster(hops: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(message * factor, latency) for message, latency in hops]

    quick = Group(
        group.micro_batches,
        group.extra_in_flight,
        group.forward,
        group.backward,
        group.update,
        faster(group.activations),
        faster(group.gradients),
    )
    slow, fast = (time_steps(_arrays(one), 2).ends for one in (group, quick))
    assert (fast <= slow + 1e-9).all()


def test_groups_are_timed_side_by_side() -> None:
    """Many groups at once have the same times as each alone."""
    random = np.random.default_rng(3)
    stages, count = 3, 6

    def draw(rows: int) -> np.ndarray:
        return random.uniform(0, 2, (rows, count))

    def hops() -> Hops:
        return Hops(draw(stages - 1), draw(stages - 1), np.zeros((stages - 1, count)))

    many = Groups(5, 1, draw(stages), draw(stages), draw(stages), hops(), hops())
    together = time_steps(many, 3).ends
    for index in range(count):
        own = slice(index, index + 1)

        def one(one_hops: Hops, own: slice = own) -> Hops:
            return Hops(one_hops.seconds[:, own], one_hops.latency[:, own], one_hops.jitter[:, own])

        parts = many.forward[:, own], many.backward[:, own], many.update[:, own]
        alone = time_steps(Groups(5, 1, *parts, one(many.activations), one(many.gradients)), 3).ends
        assert (alone[:, 0] == together[:, index]).all()


def test_jitter_delays_and_keeps_the_order() -> None:
    calm = _arrays(_uniform(3, 8, 1, 0.5, 0.1))
    shaky = _arrays(_uniform(3, 8, 1, 0.5, 0.1), jitter=2.0)
    steady = time_steps(calm, 4).ends
    drawn = [time_steps(shaky, 4, np.random.default_rng(seed)).ends for seed in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()
    assert (drawn[0] > steady).all()
    assert (drawn[0] <= steady + 4 * 16 * 2.0 * 2).all()


class _Half:
    """A random generator that always draws one half."""

    def random(self, count: int) -> np.ndarray:
        return np.full(count, 0.5)


@given(group=groups(), steps=st.integers(1, 6))
def test_jitter_that_is_always_the_same_is_latency(group: Group, steps: int) -> None:
    """Steps with jitter are timed side by side, and compared with an event queue that runs them in turn."""
    jitter = 0.75

    def later(hops: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(message, latency + jitter / 2) for message, latency in hops]

    expected = simulate(replace(group, activations=later(group.activations), gradients=later(group.gradients)), steps)
    found = time_steps(_arrays(group, jitter), steps, cast(np.random.Generator, _Half()))
    assert [float(end[0]) for end in found.steps] == pytest.approx(expected[1], rel=1e-12, abs=1e-12)


def test_steps_side_by_side_are_drawn_as_steps_in_turn() -> None:
    """Mean and spread of a step with jitter agree. If spans are recorded, steps run one after another."""
    shaky = _arrays(_uniform(3, 4, 0, 0.5, 0.1), jitter=4.0)
    steps = 801
    together = np.diff(np.stack(time_steps(shaky, steps, np.random.default_rng(5)).steps)[:, 0])
    in_turn = np.diff(np.stack(time_steps(shaky, steps, np.random.default_rng(6), lambda *_: None).steps)[:, 0])
    error = in_turn.std() * (2 / (steps - 1)) ** 0.5
    assert in_turn.std() > 0.5
    assert abs(together.mean() - in_turn.mean()) < 5 * error
    assert together.std() == pytest.approx(in_turn.std(), rel=0.15)
    assert abs(np.corrcoef(in_turn[1:], in_turn[:-1])[0, 1]) < 5 / (steps - 1) ** 0.5


@pytest.mark.parametrize("columns", [1, 4, 5, 64])
def test_blocks_of_columns_change_nothing(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    stages, count = 3, 9

    def draw(rows: int) -> np.ndarray:
        return random.uniform(0, 2, (rows, count))

    def hops() -> Hops:
        return Hops(draw(stages - 1), draw(stages - 1), draw(stages - 1))

    many = Groups(4, 1, draw(stages), draw(stages), draw(stages), hops(), hops())
    whole = time_steps(many, 5, cast(np.random.Generator, _Half()))
    monkeypatch.setattr(pipeline, "COLUMNS", columns)
    blocks = time_steps(many, 5, cast(np.random.Generator, _Half()))
    assert (whole.ends == blocks.ends).all()
    assert (np.stack(whole.steps) == np.stack(blocks.steps)).all()


def test_spans_are_the_whole_story() -> None:
    """Compute spans of a stage add up to its work, do not overlap, and end when the stage ends."""
    group = _uniform(3, 4, 1, 0.7, 0.2)
    spans: dict[str, list[tuple[float, float]]] = {}

    def on_span(track: str, what: str, micro_batch: int, starts: np.ndarray, ends: np.ndarray) -> None:
        spans.setdefault(track, []).append((float(starts[0]), float(ends[0])))

    ends = time_steps(_arrays(group), 2, on_span=on_span).ends
    assert set(spans) == {f"stage {s}" for s in range(3)} | {
        f"hop {h} {kind}" for h in range(2) for kind in ("activation", "gradient")
    }
    for track, found in spans.items():
        found.sort()
        assert all(first[1] <= second[0] + 1e-12 for first, second in pairwise(found)), track
    for stage in range(3):
        busy = sum(end - start for start, end in spans[f"stage {stage}"])
        assert busy == pytest.approx(2 * 4 * 3.0)
        assert spans[f"stage {stage}"][-1][1] == ends[stage, 0]
