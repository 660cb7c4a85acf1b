"""Metrics and health of made-up reports, the server, and the options of an operator."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from made_up_run import (
    START,
    begun,
    evaluation,
    failure,
    inner_step,
    joined,
    link_use,
    made_up_spec,
    member_round,
    round_closed,
    state_of,
    waiting,
)
from mixed_run import MIXED
from prometheus_client.core import Metric
from typer.testing import CliRunner

from hetero_pp.messages.messages_pb2 import (
    CONTRIBUTING,
    JOINING,
    PAUSED,
    RESTARTED,
    SILENT,
    STORING,
    WENT_ON,
    MembershipEventKind,
    Over,
    Refusal,
    Report,
)
from hetero_pp.program.cli import app
from hetero_pp.program.launch.command import Invocation
from hetero_pp.program.operate import metrics as metrics_module
from hetero_pp.program.operate.metrics import RunCollector
from hetero_pp.program.operate.observed import SILENT_SECONDS, Condition, Observed, health_of
from hetero_pp.program.operate.operations import Operations, operated
from hetero_pp.program.report.lines import STALL_SECONDS
from hetero_pp.program.report.state import Outcome, RunState

Found = dict[tuple[str, ...], float]
"""(name, label values in the order of the labels' names ...) -> value."""


def collected(state: RunState, *members: str, now: float = START + 30) -> Found:
    """Return the samples of a state, as a host with these members sees it, or with all."""
    observed = Observed(lambda: now)
    observed.follow(state, members or None)
    return samples(RunCollector(observed).collect())


def samples(families: Iterable[Metric]) -> Found:
    found: Found = {}
    for family in families:
        for one in family.samples:
            labels = [one.labels[name] for name in sorted(one.labels)]
            found[(one.name.removeprefix("hetero_pp_"), *labels)] = one.value
    return found


def membership_event(
    time: float, what: MembershipEventKind, slot: str = "", replica: str = "", cause: str = "why"
) -> Report:
    report = Report(time=time, member="exchange")
    told = report.membership_event
    told.what, told.slot, told.replica, told.cause, told.round = what, slot, replica, cause, 1
    return report


# ---- health ----


def told(*reports: Report) -> RunState:
    return state_of([*(joined(START, one) for one in ("dc", "home.0", "home.1")), begun(START, 0), *reports])


STEP = inner_step(START + 1, "dc", "dc", 1, 0, loss=5.0)
PAUSE = membership_event(START + 2, PAUSED, cause="1 of 2 replicas is present")
STORE_ERROR = Report(time=START + 2, member="exchange")
STORE_ERROR.waiting.awaited, STORE_ERROR.waiting.store_error = STORING, "/log: cannot be written"
COMPUTING = waiting(START + 2, CONTRIBUTING, "home.0", seconds=500.0)
COMPUTING.waiting.missing[0].computes = True
OVER = Report(time=START + 9, member="exchange", over=Over(round=2, rounds=2))


@pytest.mark.parametrize(
    ("reports", "after", "condition", "reason"),
    [
        ([], 5, Condition.STARTING, ""),
        ([STEP], 5, Condition.RUNNING, ""),
        ([round_closed(START + 1, 1)], 5, Condition.RUNNING, ""),  # before the reports of its steps
        ([STEP], SILENT_SECONDS + 2, Condition.STALLED, "no report for"),
        ([STEP, PAUSE], 5, Condition.PAUSED, "round 1 is paused: 1 of 2 replicas is present"),
        ([STEP, PAUSE, membership_event(START + 3, WENT_ON)], 5, Condition.RUNNING, ""),
        ([STEP, STORE_ERROR], 3, Condition.STALLED, "/log: cannot be written"),
        ([STEP, waiting(START + 2, CONTRIBUTING, "home.0", seconds=20.0)], 5, Condition.RUNNING, ""),
        ([STEP, waiting(START + 2, CONTRIBUTING, "home.0", seconds=20.0)], STALL_SECONDS, Condition.STALLED, "home.0"),
        ([STEP, COMPUTING], 5, Condition.RUNNING, ""),
        ([waiting(START + 2, JOINING, "home.1", seconds=90.0)], 5, Condition.STALLED, "no progress for"),
        ([STEP, failure(START + 2, "dc", "out of memory")], 5, Condition.FAILED, "dc: out of memory"),
        ([STEP, failure(START + 2, "dc", "out of memory"), OVER], 5, Condition.FAILED, "dc: out of memory"),
        ([STEP, PAUSE, OVER], SILENT_SECONDS + 99, Condition.OVER, ""),
    ],
)
def test_health(reports: list[Report], after: float, condition: Condition, reason: str) -> None:
    found = health_of(told(*reports), START + after)
    assert found.condition is condition
    assert reason in found.reason
    assert bool(found.reason) is not found.is_well


def test_silence_is_measured_by_the_time_of_the_exchange() -> None:
    # Silence is normal where a host hears only its own members.
    assert health_of(told(STEP), START + SILENT_SECONDS + 99, sees_all=False).is_well

    # Time is the exchange s even if this host s clock is wrong.
    clock = iter([9e9, 9e9 + SILENT_SECONDS - 1, 9e9 + SILENT_SECONDS + 1])
    observed = Observed(lambda: next(clock))
    observed.follow(told(STEP))
    observed.on_report(STEP)
    assert [observed.health().condition for _ in range(2)] == [Condition.RUNNING, Condition.STALLED]


# ---- metrics of made-up reports ----


def test_every_outcome_of_a_contribution_is_counted_once() -> None:
    """Rounds that are long over are counted as often as recent ones."""
    expected: dict[Outcome, int] = {}
    reports = [joined(START, "dc"), joined(START, "home.0"), joined(START, "home.1"), begun(START, 0)]
    for round_ in range(1, 31):
        record = round_closed(START + 10 * round_, round_)
        outcome = [Outcome.INCLUDED, Outcome.LATE, Outcome.REJECTED, Outcome.LOST, Outcome.ABSENT][round_ % 5]
        if outcome is not Outcome.INCLUDED:
            del record.round_closed.contributions[1]
        record.round_closed.late.extend(["home"] if outcome is Outcome.LATE else [])
        record.round_closed.left_out.extend(["home"] if outcome is Outcome.REJECTED else [])
        if outcome is Outcome.LOST:
            reports += [membership_event(record.time - 6, SILENT, "home.1", "home"), joined(record.time - 3, "home.1")]
        reports.append(record)
        expected[outcome] = expected.get(outcome, 0) + 1
    observed, state = Observed(), RunState(made_up_spec(outer={"rounds": 30}))
    observed.follow(state)
    collector = RunCollector(observed)
    for report in reports:
        state.apply(report)
        found = samples(collector.collect())  # a scrape after each report
    assert {one: found["contributions_total", one, "home"] for one in expected} == expected
    assert found["contributions_total", "included", "dc"] == 30


def test_counters_never_fall_and_begin_when_they_are_known() -> None:
    # A counter never falls. A restarted process counts its round anew.
    observed, state = Observed(), told()
    observed.follow(state)
    collector, found = RunCollector(observed), []
    for payload in (5000, 100, 6000):
        state.apply(link_use(START, "home.0-1", "forward", 1, payload))
        found.append(samples(collector.collect())["link_wire_bytes_total", "forward", "home.0-1"])
    assert found == [5010, 5010, 6010]

    # Counters of a resumed run appear once its earlier reports are known.
    state = state_of([joined(START, "dc")])
    assert not [name for name, *_ in collected(state) if name.endswith("_total")]
    state.apply(begun(START, 1))
    assert ("rounds_closed_total",) in collected(state)


def test_no_text_of_a_member_or_a_stranger_is_a_label() -> None:
    lie = '"} evil'
    refusal = Report(time=START, member=lie, refusal=Refusal(sender=lie, reason=lie, kind=lie, count=3))
    reports = [
        refusal,
        membership_event(START, RESTARTED, lie, lie, lie),
        joined(START, lie),
        evaluation(START, lie, 1, 1.0),
    ]
    found = collected(told(*reports, member_round(lie, 1), failure(START, lie, lie)))
    assert not [key for key in found if any("evil" in part for part in key)]
    assert found["refusals_total", "unexpected"] == 3


# ---- the server ----


def get(url: str, **headers: str) -> tuple[int, str]:
    """Return the status and the body of an answer."""
    try:
        with urlopen(Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("reports", "status", "expected"),
    [
        ([STEP], 200, {"condition": "running", "run": "made-up", "round": 0, "rounds": 2}),
        ([STEP, PAUSE], 503, {"condition": "paused", "reason": "round 1 is paused: 1 of 2 replicas is present"}),
        ([failure(START, "dc", "x" * 5000)], 503, {"condition": "failed", "reason": "dc: " + "x" * 996}),
    ],
)
def test_healthz(reports: list[Report], status: int, expected: Mapping[str, Any], capsys: Any) -> None:
    with operated("0") as operations:
        url = capsys.readouterr().out.split("health: ")[1].strip()
        assert url.startswith("http://127.0.0.1:")
        assert get(url) == (200, '{"condition": "starting"}\n')
        operations.observed.follow(told(*reports))
        operations.observed.on_report(STEP)
        code, text = get(url)
        assert (code, json.loads(text).items() >= expected.items()) == (status, True)
        assert get(url.replace("healthz", "other"))[0] == 404
        assert "hetero_pp_build_info" in get(url.replace("healthz", "metrics"))[1]


@pytest.mark.parametrize(("listen", "status"), [("0", 400), ("0.0.0.0:0", 200)])
def test_a_foreign_page_that_binds_its_name_to_this_machine_reads_nothing(
    listen: str, status: int, capsys: Any
) -> None:
    with operated(listen):
        url = capsys.readouterr().out.split("health: ")[1].strip().replace("0.0.0.0", "127.0.0.1")
        assert get(url, host="evil.example")[0] == get(url, host="evil.example:80")[0] == status
        assert get(url, host="localhost")[0] == get(url, host="localhost:80")[0] == 200


def test_a_client_that_sends_byte_by_byte_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(metrics_module, "SECONDS_OF_A_CONNECTION", 0.3)
    with operated("0"):
        port = int(capsys.readouterr().out.split("http://127.0.0.1:")[1].split("/")[0])
        over = threading.Event()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow, suppress(OSError):
            while not select.select([slow], [], [], 0.05)[0]:
                slow.sendall(b"x")
            over.set()
            assert slow.recv(1) == b""
        assert over.is_set()


@pytest.mark.parametrize("command", ["launch", "serve", "join"])
def test_a_port_in_use_is_one_line_before_anything_starts(command: str, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, [command, "none.yaml", "--metrics", str(port), "--runs", str(tmp_path)])
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert done.output.startswith(f"hetero-pp: --metrics {port}: cannot listen (Address already in use)")


@pytest.mark.parametrize("arguments", [("serve", str(MIXED)), ("join", "hpp1.ticket")])
def test_serve_and_join_take_the_options_of_an_operator(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is common with `launch`, which further tests run."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    answers: list[tuple[int, str]] = []

    def take_part(*given: Any) -> None:
        last = given[-1]
        operations: Operations = last.operations if isinstance(last, Invocation) else last
        operations.observed.follow(told(STEP, PAUSE))
        answers.append(get(f"http://127.0.0.1:{port}/healthz"))

    monkeypatch.setattr("hetero_pp.program.launch.command.run_on_this_host", take_part)
    monkeypatch.setattr("hetero_pp.program.join.command.join", take_part)
    done = CliRunner().invoke(app, [*arguments, "--metrics", str(port), "--log-format", "json"])
    assert [status for status, _ in answers] == [503]
    assert json.loads(done.output)["text"].startswith(f"metrics: http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (("--metrics", "some:where"), "found `some:where`, expected PORT or ADDRESS:PORT, such as `9464`"),
        (("--otlp", "host:4317"), "found `host:4317`, expected a URL such as `http://localhost:4317`"),
        (("--board", "paper"), "found `paper`, expected one of wandb, trackio"),
        (("--log-format", "xml"), "found `xml`, expected `text` or `json`"),
        (("--only", "dc", "--board", "trackio"), "--only dc: found --otlp or --board"),
    ],
)
def test_a_wrong_option_is_one_line(option: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["launch", str(MIXED), "--runs", str(tmp_path), *option])
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert expected in done.output
    assert done.output.count("\n") == 1
