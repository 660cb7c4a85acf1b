"""Predicted step of a run for the page: bars of members and links, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_pp.config.links import stage_link_name
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.view.command import show
from hetero_pp.program.view.measured import measured
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
