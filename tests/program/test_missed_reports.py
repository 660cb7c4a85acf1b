"""Readers of reports. The exchange remembers only the newest, so any report may be missed, or arrive twice."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up_run import membership_event, so_far
from mixed_run import MIXED
from rich.console import Console

from hetero_pp.config.changes import NO_CHANGES, REPLICAS, replicas_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.messages.messages_pb2 import (
    CONTRIBUTING,
    FINISHING,
    GIVEN_UP,
    HEALED,
    INCARNATION_OVER,
    JOINING,
    LATE,
    PAUSED,
    RESTARTED,
    SILENT,
    SUSPENDED,
    WENT_ON,
    Report,
)
from hetero_pp.program.launch.command import begin_folder
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.program.report.display import LiveDisplay, live_view
from hetero_pp.program.report.lines import OwnRoundLines, round_line
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of

ROUNDS = 11
"""More than `STILL_TOLD`, so that readers drop the details of some rounds."""


@pytest.fixture(scope="module")
def recorded(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, list[Report]]:
    """Return all reports of a real run, mixed with events of a run with failures."""
    config = ConfigFile(MIXED, [f"data.corpus={corpus}", f"outer.rounds={ROUNDS}", "inner.steps=1"]).config
    spec = RunSpec(config, load_tokenizer(config.data).vocabulary)
    reports: list[Report] = []
    run_in_process(spec, begin_folder(spec, tmp_path_factory.mktemp("recorded")), reports.append)
    return spec, _with_trouble(spec, reports)


def _with_trouble(spec: RunSpec, reports: list[Report]) -> list[Report]:
    found: list[Report] = []
    trouble = iter(_trouble(spec))
    for report in reports:
        found.append(report)
        event = next(trouble, None) if report.WhichOneof("event") in ("evaluation", "round_closed") else None
        if event is not None:
            event.time = report.time
            found.append(event)
    assert next(trouble, None) is None
    return found


def _trouble(spec: RunSpec) -> list[Report]:
    last = list(spec.members)[-1]
    replica = spec.members[last].replica.name
    slot = {"slot": last, "replica": replica, "cause": f"{last} was killed by SIGKILL"}
    events = [
        membership_event(0.0, what, **slot)
        for what in (RESTARTED, SILENT, SUSPENDED, INCARNATION_OVER, GIVEN_UP, HEALED)
    ]
    events += [membership_event(0.0, what, replica=replica, round=2) for what in (LATE, PAUSED, WENT_ON)]
    for awaited in (JOINING, CONTRIBUTING, FINISHING):
        waits = Report(member="exchange")
        waits.waiting.awaited, waits.waiting.round, waits.waiting.seconds = awaited, 3, 20.0
        waits.waiting.missing.add(member=last)
        events.append(waits)
    joined = Report(member=last)
    joined.joined.incarnation = 2
    goes_on = Report(member="exchange")
    goes_on.begun.last_round = 2
    added = [{"name": "more", "kind": "datacenter"}, *replicas_of(spec.config)]
    goes_on.begun.changes = NO_CHANGES.changed(spec.config, 3, {REPLICAS: added}).to_json()
    return [*events, joined, goes_on]


def _optional(spec: RunSpec) -> RunSpec:
    """Return the run with its group made optional."""
    data = spec.config.model_dump(mode="json")
    data["replicas"][1]["optional"] = True
    return RunSpec(type(spec.config).model_validate(data), spec.shape.vocabulary)


def _read_all(spec: RunSpec, reports: Sequence[Report]) -> RunState:
    """Apply reports to every reader that needs no file, and render all that they show."""
    state, shown = RunState(spec), Console(file=io.StringIO(), width=80)
    display = LiveDisplay(state, shown, since=reports[0].time if reports else 0.0)
    hosts = [OwnRoundLines(spec, members, lambda line: None) for members in (["dc"], ["home.0"], list(spec.members))]
    for number, report in enumerate(reports):
        state.apply(report)
        for host in hosts:
            host.on_report(report)
        if number % 50 == 0:
            display.refresh()
            shown.print(live_view(state, report.time, 40))
    display._say_what_is_new(is_last=True)
    for round_ in state.closed:
        round_line(state, round_)
    assert state.is_over in (True, False)
    print_result(shown, summary_of(state), Path("runs"))
    return state


def _parts(reports: list[Report]) -> st.SearchStrategy[list[Report]]:
    """Draw a suffix, a prefix, any subset, or reports that are repeated at once or later."""
    numbers = st.integers(0, len(reports))
    chosen = st.lists(st.booleans(), min_size=len(reports), max_size=len(reports))
    again = st.tuples(numbers, numbers, numbers)
    return st.one_of(
        numbers.map(lambda first: reports[first:]),
        numbers.map(lambda last: reports[:last]),
        chosen.map(lambda kept: [one for one, is_kept in zip(reports, kept, strict=True) if is_kept]),
        chosen.map(
            lambda twice: [one for one, is_twice in zip(reports, twice, strict=True) for _ in range(1 + is_twice)]
        ),
        again.map(lambda cuts: reports[cuts[0] :] + reports[cuts[1] :] + reports[: cuts[2]]),
    )


def test_no_reader_relies_on_having_seen_all_reports(recorded: tuple[RunSpec, list[Report]]) -> None:
    spec, reports = recorded
    specs = spec, _optional(spec)

    @given(st.sampled_from(specs), _parts(reports))
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def read(spec: RunSpec, part: list[Report]) -> None:
        _read_all(spec, part)

    read()


def _without(reports: Sequence[Report], *events: str) -> list[Report]:
    return [report for report in reports if report.WhichOneof("event") not in events]


@pytest.mark.parametrize("member", ["home.1", "home.2"])
def test_a_host_that_missed_who_joined_shows_the_rounds_of_its_group(
    member: str, recorded: tuple[RunSpec, list[Report]]
) -> None:
    """The member returns to an optional group after the exchange has forgotten how its neighbours joined."""
    own = [
        one for one in _without(recorded[1], "joined", "begun", "membership_event", "waiting") if one.member == member
    ]
    shown: list[list[str]] = []
    for spec in recorded[0], _optional(recorded[0]):
        shown.append([])
        host = OwnRoundLines(spec, [member], shown[-1].append)
        for report in [so_far(own[0].time), *own]:
            host.on_report(report)
    assert shown[0][1:] == shown[1][1:]  # behind the state of the run
    assert len(shown[0]) == 1 + ROUNDS
