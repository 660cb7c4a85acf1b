"""Predicted step of a run for the page: bars of members and links, beside what the run or its rehearsal measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from hetero_pp.config.links import stage_link_name
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.view.command import show
from hetero_pp.program.view.record import Record
from hetero_pp.program.view.run_view import RunView
from hetero_pp.run.changes import Given
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.read import spec_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.simulator.prediction import Prediction, predict
from hetero_pp.simulator.timeline import Span, Timeline

_ENOUGH = 1e-9
"""Shortest gap, in seconds, that is drawn as waiting."""


def show_prediction(path: Path, overrides: Sequence[Given], runs: Path) -> None:
    """Serve the page of a YAML's prediction until an interrupt, with the run of its name or else its rehearsal."""
    file = ConfigFile(path, overrides)
    spec = spec_of(file)
    folders = [RunFolder(runs / name) for name in (spec.config.name, spec.config.rehearsal_name)]
    record = next((Record(folder) for folder in folders if folder.config.is_file()), None)
    show({spec.config.name: Predicted(file, spec, record)})


class Predicted:
    """A predicted step, beside the run or its rehearsal if there is one. Implements Source."""

    def __init__(self, file: ConfigFile, spec: RunSpec, record: Record | None) -> None:
        """Raises ConfigError for a topology that cannot be predicted."""
        self._record = record
        timeline = Timeline()
        try:
            self._found = predict(spec, timeline.of)
        except ConfigError as error:
            raise file.located(error) from None
        self._step = step_of(spec, timeline.spans)

    @property
    def view(self) -> RunView | None:
        return None if self._record is None else self._record.view

    @property
    def prediction(self) -> dict[str, Any]:
        bubbles = [replica.bubble for replica in self._found.replicas]
        beside = measured(self._record, self._found)
        return {
            "step_seconds": self._found.step_seconds,
            "utilization": self._found.utilization["absolute"],
            "bubble": max(bubbles, default=0.0),
            "values": list(values_of(self._found, beside.values)),
            "measured": beside.members,
        } | self._step

    def start(self) -> None:
        if self._record is not None:
            self._record.start()

    def wait(self, seconds: float) -> bool:
        return self._record is None or self._record.wait(seconds)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()


def step_of(spec: RunSpec, spans: Sequence[Span]) -> dict[str, Any]:
    """Return bars of members and links for the second inner step of each replica, or the only one."""
    members: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for name in dict.fromkeys(span.replica for span in spans):
        replica = _replica(spec, name)
        own = [span for span in spans if span.replica == name]
        updates = [span.end for span in own if span.track == "stage 0" and span.name == "update"]
        start, end = ([0.0, *updates[:1]] if len(updates) < 2 else updates[:2])[:2]
        within = [span for span in own if span.start >= start - _ENOUGH and span.end <= end + _ENOUGH]
        for index, member in enumerate(replica.members):
            track = sorted((one for one in within if one.track == f"stage {index}"), key=lambda one: one.start)
            members.append({"id": member, "bars": list(_with_waits(track, start, end))})
        for hop in range(len(replica.members) - 1):
            bars = [_bar(one, start) for one in within if one.track.startswith(f"hop {hop} ")]
            links.append({"id": stage_link_name(replica.name, hop), "bars": bars})
    return {"members": members, "links": links}


def _replica(spec: RunSpec, name: str) -> ReplicaSettings:
    """Return the replica that a timeline names; the first one of several alike."""
    return next(one for one in spec.config.replicas if name in (one.name, one.name.rpartition("-")[0]))


_KINDS = {"activation": "there", "gradient": "back"}


def _bar(span: Span, start: float) -> dict[str, Any]:
    what, _, number = span.name.partition(" ")
    micro_batch = int(number) if number else None
    times = {"start": span.start - start, "end": span.end - start}
    return times | {"kind": _KINDS.get(what, what), "micro_batch": micro_batch}


def _with_waits(track: Sequence[Span], start: float, end: float) -> Iterator[dict[str, Any]]:
    """Yield the bars of a member, with the gaps between them as waiting."""
    before = start
    for span in track:
        if span.start > before + _ENOUGH:
            yield {"start": before - start, "end": span.start - start, "kind": "wait", "micro_batch": None}
        yield _bar(span, start)
        before = max(before, span.end)
    if end > before + _ENOUGH:
        yield {"start": before - start, "end": end - start, "kind": "wait", "micro_batch": None}


def values_of(found: Prediction, measured: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield predicted numbers with the measured ones; None if nothing was measured."""
    for name, unit, predicted in (
        ("step", "s", found.step_seconds),
        ("round", "s", found.round_seconds),
        ("outer round", "s", found.outer_seconds),
        ("tokens per second", "", found.tokens_per_second),
    ):
        yield {"name": name, "unit": unit, "predicted": predicted, "measured": measured.get(name)}


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
    """Return the values of a comparison. A rehearsed round is shorter, so the comparison concludes the run's round."""
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

    The outer round is taken from the replica that waits least in it, because all others also wait for steps.
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
