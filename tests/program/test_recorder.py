"""Files that a recorder writes to the run's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_up_run import (
    START,
    evaluation,
    inner_step,
    link_use,
    made_up_reports,
    made_up_round,
    made_up_spec,
)

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import DIRECTIONS
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import WAITING_FOR_PREVIOUS, Activity, MemberRound, Refusal, Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.launch.command import MOST_REFUSALS_OF_A_MEMBER, Invocation, _Recording
from hetero_pp.program.report.recorder import Recorder, line_of, reports_until
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from hetero_pp.simulator.memory import disk_use


def record(folder: Path, reports: list[Report], failed: str | None = None, spec: RunSpec | None = None) -> RunState:
    spec = spec or made_up_spec()
    state = RunState(spec)
    recorder = Recorder(spec, RunFolder(folder), state)
    for report in reports:
        state.apply(report)
        recorder.on_report(report)
    if failed is not None:
        state.fail(failed)
    recorder.close()
    return state


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    record(folder, made_up_reports())
    return folder


def test_a_killed_run_keeps_its_lines(tmp_path: Path) -> None:
    spec = made_up_spec()
    recorder = Recorder(spec, RunFolder(tmp_path), RunState(spec))
    recorder.on_report(inner_step(START, "dc", "dc", 1, 0, loss=1.0))
    assert lines(tmp_path)[0]["loss"] == 1.0
    recorder.close()
    recorder.on_report(inner_step(START, "dc", "dc", 1, 1, loss=1.0))  # it arrives too late
    assert len(lines(tmp_path)) == 1


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    record(tmp_path, [inner_step(START, "dc", "dc", 1, 0, loss=math.nan, gradient_norm=math.inf)])
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["gradient_norm"]) == (None, None)
    assert json.loads((tmp_path / "summary.json").read_text())["replicas"][0]["loss"] is None


@pytest.mark.renders
def test_a_run_that_failed_half_way(tmp_path: Path) -> None:
    record(tmp_path, list(made_up_round(1)), failed="home.0 was killed by SIGKILL")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["failed"], summary["rounds"]) == ("home.0 was killed by SIGKILL", 1)
    assert (tmp_path / "loss.png").exists()


def _hostile_reports() -> list[Report]:
    """Return out-of-range reports, which members could once send and earlier versions may have recorded."""
    last = 2**32 - 1
    uses = [link_use(START, "home.0-1", "forward", round_, 2**63) for round_ in range(3, 3000)]
    times = [inner_step(time, "dc", "dc", 1, 0, loss=1.0) for time in (-math.inf, math.inf, math.nan)]
    huge = [
        inner_step(START, "dc", "dc", 1, 0, loss=1e308),
        inner_step(START, "home.1", "home", 1, 0, loss=1e308),
        inner_step(START, "dc", "dc", 1, 1, loss=-math.inf),
        evaluation(START, "dc", 1, 1e308),
        evaluation(START, "home", 1, 1e308),
        evaluation(START, "dc", 1, -math.inf),
        evaluation(START, "dc", last, 1.0),
        inner_step(START, "dc", "dc", last, 0, loss=1.0),
        link_use(START, "home.0-1", "backward", last, 1),
        Report(time=START, member="dc", member_round=MemberRound(round=last, compute_seconds=1e308)),
        Report(time=START, member="dc", refusal=Refusal(kind=Kind.MALFORMED, count=2**64 - 1)),
    ]
    return [*uses, *times, *huge]


def test_a_record_outlives_reports_that_are_out_of_range(tmp_path: Path) -> None:
    # A record outlives reports that are out of range. The summary leaves them out and equals the one without
    # them. Memory keeps nothing of them.
    honest = made_up_reports()
    state = record(tmp_path / "hostile", [*_hostile_reports(), *honest, *_hostile_reports()])
    record(tmp_path / "honest", honest)
    summaries = [json.loads((tmp_path / one / "summary.json").read_text()) for one in ("hostile", "honest")]
    assert summaries[0] == summaries[1]
    kept = [len(way._wire) + len(way._recent) for link in state.links.values() for way in link.ways.values()]
    kept += [len(replica.validation_loss) for replica in state.replicas.values()]
    assert max(kept) < 10

    # A run goes on over a record of reports that are out of range.
    record(tmp_path, [*made_up_reports(), *_hostile_reports()])
    complaints: list[str] = []
    spec = made_up_spec()
    state = RunState(spec)
    for report in reports_until(spec.config, RunFolder(tmp_path), 2, complaints.append):
        state.apply(report)
    assert complaints[0].startswith("skipped ") and complaints[0].endswith(" unreadable lines of metrics.jsonl")
    assert summary_of(state)["rounds"] == 2
    assert all(0 < loss < 10 for replica in state.replicas.values() for loss in replica.validation_loss.values())


@pytest.mark.parametrize("overlap", [0, 1])
def test_steps_that_were_trained_ahead_of_the_last_checkpoint_are_reported_again(overlap: int, tmp_path: Path) -> None:
    record(tmp_path, made_up_reports())
    config = made_up_spec().config
    config = config.model_copy(update={"outer": config.outer.model_copy(update={"overlap": overlap})})
    reports = reports_until(config, RunFolder(tmp_path), 1, lambda _: None)
    steps = {one.inner_step.round for one in reports if one.HasField("inner_step")}
    assert steps == set(range(1, 2 + overlap))


def test_what_a_member_says_that_it_refused_is_shown_as_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(member: str, sender: str, count: int) -> Report:
        return Report(time=START, member=member, refusal=Refusal(sender=sender, kind=Kind.MALFORMED, count=count))

    said: list[str] = []
    monkeypatch.setattr(_Recording, "say", lambda _, line: said.append(line))
    (shown := RunFolder(tmp_path / "shown")).path.mkdir()
    recording = _Recording(made_up_spec(), shown, resume=False, invocation=Invocation())
    reports = [refused("home.1", f"dc {number}", 1) for number in range(100)] + [refused("exchange", "home.1:1", 3)]
    for report in reports:
        recording.on_report(report)
    recording.recorder.close()
    assert said[:1] == ["home.1 reports that it refused dc 0: "]
    assert said[-1] == "refused home.1: "
    assert len(said) == MOST_REFUSALS_OF_A_MEMBER + 1
    summary = summary_of(record(tmp_path, reports))
    assert (summary["refusals"], summary["refusals_told_by"]) == (103, {"exchange": 3, "home.1": 100})


def test_the_forecast_of_the_record_covers_every_report(tmp_path: Path) -> None:
    """Steps of a second: each direction is reported after each step, and each member's activity twice a second."""
    spec, time = made_up_spec(inner={"steps": 40}), 1_764_158_400.123456
    reports = [Report(time=time, member=name, member_round=MemberRound(round=1)) for name in spec.members]
    for step in range(40):
        for name, member in spec.members.items():
            values = {"loss": 4.123456789012345, "gradient_norm": 1.234567890123456, "learning_rate": 0.00123456789}
            reports.append(inner_step(time, name, member.replica.name, 1, step, tokens=4096, **values))
            reports += [Report(time=time, member=name, activity=Activity(doing=WAITING_FOR_PREVIOUS))] * 2
        for link in spec.links:
            reports += [link_use(time, link, way, 1, 10**7, busy=1.234567890123) for way in DIRECTIONS]
    written = len("".join(json.dumps(line) + "\n" for line in map(line_of, reports)))
    predicted = disk_use(spec, ["exchange"])["metrics"].n_bytes / spec.latest.rounds
    assert written < predicted < 1.5 * written
