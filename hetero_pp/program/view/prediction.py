"""Predicted step of a run for the page: bars of members and links, beside what the run or its rehearsal measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hetero_pp.config.alike import alike, label_of
from hetero_pp.config.lines import stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.program.report.state import RunState
from hetero_pp.simulator.charts import Span, Timeline
from hetero_pp.simulator.prediction import Prediction, predict

_ENOUGH = 1e-9  # shortest gap, in seconds, that is drawn as waiting
_KINDS = {"activation": "there", "gradient": "back"}

Measured = tuple[Mapping[str, float], Sequence[dict[str, Any]]]
"""Quantities by the names that the page shows, and how each member spends a mean step; empty if unknown."""
NOT_MEASURED: Measured = {}, []


class PredictedStep:
    """The prediction of one run, which takes about a second."""

    def __init__(self, spec: RunSpec) -> None:
        """Raises ConfigError for a topology that cannot be predicted."""
        timeline = Timeline()
        self.found = predict(spec, timeline.of)
        self._step = _step_of(spec, timeline.spans)

    def beside(self, values: Mapping[str, float], members: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the prediction beside what was measured, in the form that the page reads."""
        predicted = (
            ("step", "s", self.found.step_seconds),
            ("round", "s", self.found.round_seconds),
            ("outer round", "s", self.found.outer_seconds),
            ("tokens per second", "", self.found.tokens_per_second),
        )
        return {
            "step_seconds": self.found.step_seconds,
            "utilization": self.found.utilization["absolute"],
            "bubble": max((replica.bubble for replica in self.found.replicas), default=0.0),
            "values": [
                {"name": name, "unit": unit, "predicted": value, "measured": values.get(name)}
                for name, unit, value in predicted
            ],
            "measured": members,
        } | self._step


def _step_of(spec: RunSpec, spans: Sequence[Span]) -> dict[str, Any]:
    """Return bars of members and links for the second inner step, or the only one, of the first of replicas alike."""
    first = {label_of(replicas): replicas[0] for replicas in alike(spec)}
    members: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for name in dict.fromkeys(span.replica for span in spans):
        replica = first[name]
        own = [span for span in spans if span.replica == name]
        updates = [span.end for span in own if span.track == "stage 0" and span.name == "update"]
        start, end = ([0.0, *updates[:1]] if len(updates) < 2 else updates[:2])[:2]
        within = [span for span in own if span.start >= start - _ENOUGH and span.end <= end + _ENOUGH]
        for index, member in enumerate(replica.members):
            track = sorted((span for span in within if span.track == f"stage {index}"), key=lambda span: span.start)
            bars, before = list[dict[str, Any]](), start
            for span in [*track, None]:  # the gaps between its bars are waiting
                until = end if span is None else span.start
                if until > before + _ENOUGH:
                    gap = {"start": before - start, "end": until - start, "kind": "wait", "micro_batch": None}
                    bars.append(gap)
                if span is not None:
                    bars.append(_bar(span, start))
                    before = max(before, span.end)
            members.append({"id": member, "bars": bars})
        for hop in range(len(replica.members) - 1):
            bars = [_bar(span, start) for span in within if span.track.startswith(f"hop {hop} ")]
            links.append({"id": stage_link_name(replica.name, hop), "bars": bars})
    return {"members": members, "links": links}


def _bar(span: Span, start: float) -> dict[str, Any]:
    what, _, number = span.name.partition(" ")
    micro_batch = int(number) if number.isdecimal() else None
    kind = what if micro_batch is not None else span.name
    times = {"start": span.start - start, "end": span.end - start}
    return times | {"kind": _KINDS.get(kind, kind), "micro_batch": micro_batch}


def measured_of_rehearsal(found: Mapping[str, Any], predicted: Prediction) -> Measured:
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
        _mean_step(name, one["compute"] / steps, (one["wait_previous"] + one["wait_next"]) / steps)
        for name, one in found["members"].items()
        if steps
    ]
    return values, members


def measured_of_run(state: RunState) -> Measured:
    """Return what a run took so far: the means over its closed rounds, of the slowest replica.

    The outer round is taken from the replica that waits least in it, because all others also wait for steps.
    """

    def mean(name: str, *parts: str) -> float:
        """Return the mean over the rounds of a replica of the sum of some times; 0 if they are unknown."""
        rounds = [state.times(round_, name) for round_ in state.closed]
        known = [sum(times[part] or 0.0 for part in parts) for times in rounds if times[parts[0]] is not None]
        return fmean(known) if known else 0.0

    with state.lock:
        members, values = [], dict[str, float]()
        for name, member in state.members.items():
            if steps := member.rounds * (state.changed.steps_of(member.replica) or 0):
                members.append(_mean_step(name, member.seconds["compute"] / steps, member.seconds["wait"] / steps))
        if state.closed:
            values["tokens per second"] = state.tokens_per_second()
            known = [round_ for round_ in state.closed if round_ == 1 or round_ - 1 in state.closed]
            if known:
                values["round"] = fmean(map(state.round_seconds, known))
            slowest = max(mean(name, "compute", "wait") for name in state.replicas)
            if state.inner_steps is not None and slowest:
                values["step"] = slowest / state.inner_steps
            if outer := [seconds for name in state.replicas if (seconds := mean(name, "outer", "blocked"))]:
                values["outer round"] = min(outer)
        return values, members


def _mean_step(member: str, compute: float, wait: float) -> dict[str, Any]:
    """Return a mean step as bars. It is not known when in a step a member waits, so the waits stand together."""
    parts = (("computed", 0.0, compute), ("waited", compute, compute + wait))
    bars = [
        {"start": start, "end": end, "kind": kind, "micro_batch": None} for kind, start, end in parts if end > start
    ]
    return {"id": member, "bars": bars}
