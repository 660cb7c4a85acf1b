"""The data of the page: a record gives the launcher's state, at any moment; a damaged one gives what it has."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import (
    START,
    back,
    begun,
    finished,
    inner_step,
    killed,
    made_up_reports,
    made_up_round,
    made_up_spec,
    membership_event,
    round_closed,
    state_of,
    there,
    waiting,
)

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.bounded import parse_json
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.recorder import STRANGE, line_of, report_of, to_json
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from hetero_pp.program.view import run_view as run_view_module
from hetero_pp.program.view import sources as sources_module
from hetero_pp.program.view.run_view import Curve, KeyFrames, RunView
from hetero_pp.program.view.sources import Record


def view_of(reports: Sequence[Report], **changes: Any) -> RunView:
    """Return what the page knows after these reports."""
    view = RunView(RunState(made_up_spec(**changes)))
    for report in reports:
        if view.state.apply(report):
            view.take(report)
    return view


def frame(view: RunView) -> dict[str, Any]:
    view.is_live = False  # its clock stands still
    return json.loads(view.frame())


def recorded(reports: Sequence[Report]) -> list[bytes]:
    return [f"{to_json(line)}\n".encode() for line in map(line_of, reports)]


def read(lines: Sequence[bytes]) -> tuple[list[Report], list[int]]:
    """Return the reports of a record's lines, and which lines have none."""
    found, strange = list[Report](), list[int]()
    for number, line in enumerate(lines, 1):
        try:
            found.append(report_of(parse_json(line)))
        except STRANGE:
            strange.append(number)
    return found, strange


def run_folder(path: Path, lines: Sequence[bytes], **changes: Any) -> RunFolder:
    """Write the folder of a made-up run."""
    folder = RunFolder(path)
    path.mkdir(exist_ok=True)
    save_config(made_up_spec(model={"vocabulary": 256}, **changes).config, folder.config)
    folder.metrics.write_bytes(b"".join(lines))
    return folder


@pytest.fixture
def followed() -> Iterator[Callable[[RunFolder], Record]]:
    """Follow records until the end of the test."""
    records: list[Record] = []

    def follow(folder: RunFolder) -> Record:
        records.append(Record(folder))
        records[-1].start()
        assert records[-1].wait(60)
        return records[-1]

    yield follow
    for record in records:
        record.close()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "nothing came within a minute"
        time.sleep(0.01)


# ---- the record ----


def test_a_record_holds_every_report_but_the_blobs_of_contributions() -> None:
    late = pb.RoundRecord(round=3, late=["home"], left_out=["dc"])
    reports = [
        *made_up_reports(),
        *killed(START + 1),
        back(START + 2),
        waiting(START, pb.CONTRIBUTING, "home.0", "home.1", seconds=2.5),
        Report(time=START, member="dc", activity=pb.Activity(doing=pb.WAITING_FOR_NEXT)),
        Report(time=START, member="exchange", over=pb.Over(round=2, rounds=2, finishing=["dc", "home"])),
        Report(time=START, member="exchange", begun=pb.Begun(last_round=1, damaged=["a", "b"], changes="{}", note="n")),
        Report(time=START, member="exchange", round_closed=late),
    ]
    for entry in (closed := next(one for one in reports if one.HasField("round_closed"))).round_closed.contributions:
        entry.steps, entry.tokens = 2, 200
    missing = reports[-5].waiting.missing
    missing[0].silent_seconds, missing[1].computes = 1.5, True
    found, strange = read(recorded(reports))
    assert strange == []
    for report, again in zip(reports, found, strict=True):
        if report is closed:
            assert [one.steps for one in again.round_closed.contributions] == [2, 2]
        elif not report.HasField("round_closed"):
            assert again == report
    assert summary_of(state_of(found)) == summary_of(state_of(reports))


def test_lines_that_no_run_has_are_skipped_in_bounded_memory(
    tmp_path: Path, followed: Callable[[RunFolder], Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = recorded(made_up_reports())
    closed = json.loads(recorded([round_closed(START, 1)])[0])
    sent = closed["contributions"][0] | {"steps": 4_000_000_000}
    hostile = [
        closed | {"round": 4_000_000_000, "contributions": []},
        closed | {"round": 0, "contributions": []},
        closed | {"contributions": [sent]},
        closed | {"contributions": [{"unknown": {}}, 3]},
        *({"time": START, "member": "dc", "event": f"{'x' * 5000}{number}"} for number in range(300)),
        {"time": START, "member": "exchange", "event": "begun", "last_round": 0, "changes": "[]"},
    ]
    folder = run_folder(tmp_path, [*lines[:5], *(f"{json.dumps(line)}\n".encode() for line in hostile), *lines[5:]])
    apply = RunState.apply

    def breaks(state: RunState, report: Report) -> bool:
        if report.HasField("begun"):
            raise KeyError("made up")
        return apply(state, report)

    monkeypatch.setattr(RunState, "apply", breaks)
    view = followed(folder).view
    assert summary_of(view.state) == summary_of(state_of(made_up_reports()))
    numbers = [int(problem.split("line ")[1].split()[0].strip(":")) for problem in view.problems]
    assert numbers == list(range(6, 26))  # the first ones are named
    assert max(map(len, view.problems)) < 200


def test_a_record_is_followed_while_it_is_written(tmp_path: Path, followed: Callable[[RunFolder], Record]) -> None:
    lines = recorded(made_up_reports())
    half = len(lines) // 2
    folder = run_folder(tmp_path, [*lines[:half], lines[half][:20]])
    record = followed(folder)
    assert record.view.problems == []  # the half line is being written
    with folder.metrics.open("ab") as file:
        file.write(lines[half][20:] + b"".join(lines[half + 1 :]))
    wait_until(lambda: record.view.state.is_over)
    assert summary_of(record.view.state) == summary_of(state_of(made_up_reports()))


def test_a_record_that_is_replaced_is_read_again(tmp_path: Path, followed: Callable[[RunFolder], Record]) -> None:
    folder = run_folder(tmp_path, recorded(made_up_reports()))
    record = followed(folder)
    before = record.view
    part = tmp_path / "metrics.jsonl.part"
    part.write_bytes(b"".join(recorded([*there() * 50, begun(START, 1)])))
    part.replace(folder.metrics)
    wait_until(lambda: record.view is not before and bool(record.view.history("x")["marks"]))
    assert not record.view.state.closed


def test_a_record_that_a_full_disk_keeps_behind_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: Callable[[RunFolder], Record]
) -> None:
    monkeypatch.setattr(sources_module, "is_running", lambda _: True)
    monkeypatch.setattr(sources_module, "_SECONDS_BETWEEN_LOOKS", 0.0)
    record = followed(run_folder(tmp_path, recorded([*there(), begun(START, 1)])))
    assert record.view.stale == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    wait_until(lambda: bool(record.view.stale))
    assert "; 0 B are free on its disk; `hetero-pp status " in frame(record.view)["message"]
    monkeypatch.undo()
    wait_until(lambda: not record.view.stale)


def test_a_folder_without_a_record_or_with_a_damaged_summary_says_so(
    tmp_path: Path, followed: Callable[[RunFolder], Record]
) -> None:
    folder = run_folder(tmp_path, [])
    folder.metrics.unlink()
    folder.summary.write_text("{")
    problems = followed(folder).view.problems
    assert "metrics.jsonl is missing" in problems[0] and "summary.json was skipped" in problems[1]
    os.mkfifo(folder.metrics)
    assert "found a pipe or a device" in followed(folder).view.problems[0]


# ---- history and frames ----


def test_a_pause_between_two_sittings_takes_no_room_on_the_page() -> None:
    """The second sitting reports present members before it tells the first one again. It began 50 hours later."""
    hours = 180_000.0
    now = [
        Report(time=START + hours + second, member=name, joined=pb.Joined(incarnation=2))
        for second, name in enumerate(("dc", "home.0"))
    ]
    later = [*made_up_round(2), finished(START + 20, "dc")]
    for report in later:
        report.time += hours
    first = [report for report in made_up_reports() if report.time <= START + 10]
    view = view_of([*now, *first, begun(START + hours + 5, 1), *later])
    marks = [one["time"] for one in view.history("x")["marks"]]
    assert marks == sorted(marks) and {one["kind"] for one in view.history("x")["marks"]} == {"joined", "begun"}
    history = view.history("x")
    assert history["span"] < 30 and [one["closed"] for one in history["rounds"]] == sorted(
        one["closed"] for one in history["rounds"]
    )
    assert frame(view)["time"] < 30 and frame(view)["elapsed"] < 30
    closed = [json.loads(view.frame(when))["rounds_closed"] for when in (0.0, 9.9, 10.1, 29.0)]
    assert closed == [0, 0, 1, 2]
    assert [time for time, *_ in history["steps"]["dc"]] == sorted(time for time, *_ in history["steps"]["dc"])


def test_changes_add_up_to_the_history() -> None:
    view, half = view_of(made_up_reports()[:20]), made_up_reports()[20:]
    version, before = view.version, view.history("x")
    changes = view.history("x", version)
    assert not any(changes[key] for key in ("rounds", "marks", "steps")) and "cost" not in changes
    for report in half:
        assert view.state.apply(report)
        view.take(report)
    changes, history = view.history("x", version), view.history("x")
    rounds = {one["round"]: one for one in (*before["rounds"], *changes["rounds"])}
    assert list(rounds.values()) == history["rounds"]
    assert changes["cost"] == history["cost"] != before["cost"]
    for name, points in history["steps"].items():
        told = [*before["steps"].get(name, []), *changes["steps"].get(name, [])]
        assert list({step: (time, step, loss) for time, step, loss in told}.values()) == [*map(tuple, points)]
    view.end("over", False)
    assert {"outcome": "over", "is_live": False}.items() <= view.history("x", view.version).items()


def test_memory_of_curves_and_frames_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view_module, "MOST_POINTS", 10)
    monkeypatch.setattr(run_view_module, "MOST_FRAMES", 10)
    curve, frames = Curve(), KeyFrames(1.0)
    for step in range(1000):
        curve.add(float(step), step, 1.0, step)
        if frames.is_due(float(step)):
            frames.add(float(step), str(step))
    steps = [step for _, step, _ in curve.since(-1)]
    assert len(steps) <= 20 and steps[0] == 0 and steps[-1] > 900
    assert len(list(frames.some(1000))) <= 11
    assert frames.at(0.5) == "0" and 300 < int(frames.at(500.0) or 0) <= 500
    assert len(list(frames.some(3))) == 3


def test_a_step_that_is_trained_again_replaces_its_point() -> None:
    curve = Curve()
    for step in (0, 1, 2):
        curve.add(float(step), step, 5.0, step)
    curve.add(9.0, 1, 4.0, 3)
    assert curve.since(-1) == [[0.0, 0, 5.0], [9.0, 1, 4.0]]
    assert curve.since(2) == [[9.0, 1, 4.0]]


def test_what_members_may_make_up_changes_nothing() -> None:
    lies = [
        inner_step(START, "home.0", "home", 1, 0, loss=1e308),
        inner_step(START, "home.0", "nobody", 1, 0, loss=1.0),
        Report(time=START, member="nobody", member_round=pb.MemberRound(round=1, compute_seconds=1.0)),
        Report(time=START, member="nobody", activity=pb.Activity(doing=pb.FORWARD)),
        Report(time=float("nan"), member="dc", computes=pb.Computes(device="x")),
    ]
    view = view_of([*there(), *lies, membership_event(START, 999, cause="made up")])  # type: ignore[arg-type]
    assert view.history("x")["marks"][-1]["kind"] == "joined"
    assert view.history("x")["steps"] == {}
    assert {one["device"] for one in frame(view)["members"].values()} == {None}
    assert frame(view)["members"].keys() == {"dc", "home.0", "home.1"}
