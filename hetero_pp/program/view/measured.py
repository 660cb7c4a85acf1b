"""Finds what a run or its rehearsal measured of the quantities that a prediction has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from hetero_pp.core.bounded import read_json_object
from hetero_pp.program.view.record import Record
from hetero_pp.program.view.run_view import RunView
from hetero_pp.simulator.prediction import Prediction


class Measured(NamedTuple):
    """Quantities by the names that the page shows, and how each member spends a mean step; empty if unknown."""

    values: Mapping[str, float]
    members: Sequence[dict[str, Any]]


def measured(record: Record | None, predicted: Prediction) -> Measured:
    """Return what the run or the rehearsal of a record measured so far. `predicted`: the run's prediction."""
    if record is None:
        return Measured({}, [])
    if record.view.state.spec.config.rehearsal is None:
        return Measured(_of_run(record.view), list(_members_of_run(record.view)))
    with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):  # it goes on, or the file is damaged
        return _of_rehearsal(read_json_object(record.folder.rehearsal), predicted)
    return Measured({}, [])


def _of_rehearsal(found: Mapping[str, Any], predicted: Prediction) -> Measured:
    """Return what a comparison says. Its rounds are shorter than those of the run, so it concludes the run's round."""
    round_seconds = found["whole_run"]["round_seconds"]
    values = {
        "step": found["measured"]["step_seconds"],
        "round": round_seconds,
        "outer round": found["measured"]["outer_seconds"],
        "tokens per second": predicted.tokens_per_second * predicted.round_seconds / round_seconds,
    }
    steps = found["steps"] or 0
    members = [
        _step_of(name, one["compute"] / steps, (one["wait_previous"] + one["wait_next"]) / steps)
        for name, one in found["members"].items()
        if steps
    ]
    return Measured(values, members)


def _of_run(view: RunView) -> dict[str, float]:
    """Return what a run took so far: the means over its closed rounds, of the slowest replica.

    The outer round is that of the replica which waits least in it, because all others also wait for their steps.
    """
    with view.state.lock:
        state = view.state
        if not state.closed:
            return {}
        times = [[view.times.of(round_, name) for round_ in state.closed] for name in state.replicas]
        found = {"round": fmean(state.round_seconds(one) for one in state.closed)}
        found["tokens per second"] = state.tokens_per_second()
        steps = [_mean(of, "compute", "wait") for of in times]
        outer = [_mean(of, "outer", "blocked") for of in times]
        if state.inner_steps is not None and any(steps):
            found["step"] = max(steps) / state.inner_steps
        if any(outer):
            found["outer round"] = min(filter(None, outer))
        return found


def _mean(rounds: Sequence[dict[str, float | None]], *names: str) -> float:
    """Return the mean over the rounds of the sum of some times, in seconds; 0 if they are unknown."""
    known = [sum(one[name] or 0.0 for name in names) for one in rounds if one[names[0]] is not None]
    return fmean(known) if known else 0.0


def _members_of_run(view: RunView) -> Iterator[dict[str, Any]]:
    """Yield the mean step of each member that has finished a round."""
    with view.state.lock:
        for name, spent in view.state.spent.items():
            steps = spent.rounds * (view.state.inner_steps or 0)
            if steps:
                yield _step_of(name, spent.seconds("compute") / steps, spent.seconds("wait") / steps)


def _step_of(member: str, compute: float, wait: float) -> dict[str, Any]:
    """Return a mean step as bars. It is not known when in a step a member waits, so the waits stand together."""
    parts = (("computed", 0.0, compute), ("waited", compute, compute + wait))
    bars = [
        {"start": start, "end": end, "kind": kind, "micro_batch": None} for kind, start, end in parts if end > start
    ]
    return {"id": member, "bars": bars}
