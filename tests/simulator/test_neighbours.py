"""Groups that share a line have half of it each. Groups that share nothing are as each alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.simulator.charts import Timeline
from hetero_pp.simulator.events import DRAWN, GroupClock, inner_loops
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.rounds import fleets_of

COST = dict.fromkeys(("forward", "backward", "update", "contribute", "apply", "evaluate"), "0.2 s")


def _group(name: str, stages: int = 2, **settings: Any) -> dict[str, Any]:
    shape = {"kind": "participants", "batch_size": 4, "micro_batches": 4, "stages": {"count": stages, "line": "home"}}
    return {"name": name, **shape, **settings}


def _spec(replicas: list[dict[str, Any]], steps: int = 5, **top: Any) -> RunSpec:
    members = [f"{replica['name']}.{stage}" for replica in replicas for stage in range(replica["stages"]["count"])]
    base = {
        "name": "neighbours",
        "inner": {"steps": steps},
        "outer": {"rounds": 2},
        "data": {"sequence_length": 64, "validation_sequences": 1},
        "lines": {"home": {"up": "100 kbit/s", "down": "1 Mbit/s", "latency": "0.1 s"}, "half": {"up": "50 kbit/s"}},
        "replicas": replicas,
        "simulate": {"measured": dict.fromkeys(members, COST)},
    }
    return RunSpec(RunConfig.model_validate(base | top), 256)


def test_two_that_do_the_same_have_half_of_the_line_each() -> None:
    """The stage in the shared house sends as in its own house with a line half as fast, at every moment."""
    shared = {"house": {"line": "home", "members": ["a.0", "b.0"]}}
    together = predict(_spec([_group("a"), _group("b")], sites=shared))
    halves = predict(
        _spec(
            [_group("a")],
            lines={
                "home": {"up": "100 kbit/s", "down": "1 Mbit/s", "latency": "0.1 s"},
                "half": {"up": "50 kbit/s", "down": "500 kbit/s", "latency": "0.1 s"},
            },
            sites={"own": {"line": "half", "members": ["a.0"]}},
        )
    )
    alone = predict(_spec([_group("a")]))
    assert [one.step_seconds for one in together.replicas] == [pytest.approx(halves.replicas[0].step_seconds)] * 2
    assert together.replicas[0].step_seconds > 1.3 * alone.replicas[0].step_seconds


def test_one_has_what_the_other_leaves() -> None:
    """A neighbour that sends a tenth slows a step less than one that sends as much."""
    shared = {"house": {"line": "home", "members": ["a.0", "b.0"]}}
    alone, light, heavy = (
        predict(_spec([_group("a"), *others], sites=sites)).replicas[0].step_seconds
        for others, sites in (
            ([], {}),
            ([_group("b", boundary={"rank": 2})], shared),
            ([_group("b")], shared),
        )
    )
    assert alone * 1.005 < light < heavy / 1.1


@pytest.mark.parametrize("steps", [1, 5, DRAWN + 9])
def test_a_line_that_is_never_full_changes_nothing_for_two(steps: int) -> None:
    """Groups of different shapes that share a fast line have the times of each alone."""
    both = [_group("a", stages=3), _group("b", micro_batches=2, boundary={"rank": 8})]
    lines = {
        "home": {"up": "100 kbit/s", "down": "1 Mbit/s", "latency": "0.1 s"},
        "fast": {"up": "1 Tbit/s", "latency": "0.1 s"},
    }
    house = {"house": {"line": "fast", "members": ["a.0", "b.0"]}}
    together = predict(_spec(both, steps, lines=lines, sites=house)).replicas
    for found, own in zip(together, both, strict=True):
        site = {"house": {"line": "fast", "members": [f"{own['name']}.0"]}}
        [alone] = predict(_spec([own], steps, lines=lines, sites=site)).replicas
        assert (found.step_seconds, found.inner_seconds) == pytest.approx((alone.step_seconds, alone.inner_seconds))


def test_who_shares_a_line_with_whom_is_found() -> None:
    """Groups a and c are connected by b, which shares a house with each. Group d has its own line."""
    replicas = [_group(name) for name in "abcd"]
    sites = {
        "one": {"line": "home", "members": ["a.0", "b.0"]},
        "two": {"line": "home", "members": ["b.1", "c.1"]},
    }
    spec = _spec(replicas, sites=sites)
    times = inner_loops([GroupClock(fleet.group) for fleet in fleets_of(spec)], [3] * 4)
    a, b, c, d = (own.first + 2 * own.each for own in times)
    assert d == pytest.approx(predict(_spec([_group("d")])).replicas[0].step_seconds * 3, rel=0.05)
    assert 1.1 * d < min(a, b, c)


def test_a_timeline_tells_each_group_its_own() -> None:
    timeline = Timeline()
    predict(
        _spec([_group("a"), _group("b")], sites={"house": {"line": "home", "members": ["a.0", "b.0"]}}), timeline.of
    )
    for name in ("a", "b"):
        tracks = {span.track for span in timeline.spans if span.replica == name}
        assert {"stage 0", "stage 1", "hop 0 activation", "hop 0 gradient"} <= tracks
        forwards = [span for span in timeline.spans if span.replica == name and span.name == "forward 0"]
        assert len(forwards) >= 2 * 5
        for track in tracks:  # the group was timed alone first, and that is not shown beside
            found = sorted((one.start, one.end) for one in timeline.spans if (one.replica, one.track) == (name, track))
            assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(found)), track
