"""The comparison of a rehearsal with its prediction, from made-up reports: every number is known."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, Way
from hetero_pp.config.run_config import LONGEST_RUN_NAME, RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.messages.messages_pb2 import LinkUse, MemberRound, Report, RoundRecord
from hetero_pp.program.join import command
from hetero_pp.program.rehearse import (
    NOTHING_TIMED,
    AsRehearsal,
    MeasuredInput,
    OwnLine,
    Predictions,
    RehearsalComparison,
    Timings,
    closing_lines,
    compare,
    print_comparison,
    verdict,
)
from hetero_pp.program.report.output import SafeConsole
from hetero_pp.program.report.state import RunState
from hetero_pp.rpc.admission_client import Rate

ROUNDS, STEPS = 3, 4
YAML = """\
name: homes
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 4, vocabulary: 300}
data: {tokenizer: nowhere/tokenizer.json, sequence_length: 32, validation_sequences: 4}
inner: {steps: 40}
outer: {rounds: 7}
lines: {dsl: {up: 2 Mbit/s, down: 10 Mbit/s, latency: 3 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: {count: 2, line: dsl}, batch_size: 4, micro_batches: 2,
     boundary: {rank: 8}}
"""


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture
def spec(yaml: Path) -> RunSpec:
    return RunSpec(ConfigFile(yaml).as_rehearsal(ROUNDS, STEPS).config, None)


def member_round(member: str, round_: int, seconds: dict[str, float]) -> Report:
    fields: dict[str, Any] = {f"{part}_seconds": value for part, value in seconds.items()}
    fields["wait_seconds"] = seconds.get("wait_previous", 0.0) + seconds.get("wait_next", 0.0)
    return Report(member=member, member_round=MemberRound(round=round_, **fields))


def reports_of(spec: RunSpec, **more: float) -> list[Report]:
    """Return the reports of a rehearsal that took what is predicted, and longer by what `more` says of its parts."""
    prediction, found, time = Predictions.of(spec).rehearsed, list[Report](), 1000.0
    inner = {one.name: one.inner_seconds for one in prediction.replicas}
    longest = max(inner.values())
    for round_ in range(1, ROUNDS + 1):
        for one in prediction.replicas:
            for stage in one.stages:
                compute = stage.utilization * prediction.round_seconds
                wait = "wait_previous" if stage.member == "home.1" else "wait_next"
                parts = {"compute": compute, wait: inner[one.name] - compute + more.get(stage.member, 0.0)}
                if one.name == "dc":
                    parts = {"compute": compute}
                outer = prediction.outer_seconds + longest - inner[one.name] + more.get("outer", 0.0)
                found.append(member_round(stage.member, round_, parts | {"outer": outer}))
            step = one.step_seconds + more.get("step", 0.0)
            for index in range(STEPS):
                told = Report(time=time + index * step, member=one.stages[0].member)
                told.inner_step.replica, told.inner_step.round, told.inner_step.step = one.name, round_, index
                found.append(told)
            for link in one.links:
                for way, size in (("forward", link.forward_bytes), ("backward", link.backward_bytes)):
                    use = LinkUse(link=link.name, direction=way, round=round_, wire_bytes=round(size))
                    found.append(Report(link_use=use))
        time += prediction.round_seconds + more.get("home.1", 0.0) + more.get("outer", 0.0)
        if round_ == 1:
            time += 60.0  # the start of the connections
        found.append(Report(time=time, member=EXCHANGE, round_closed=RoundRecord(round=round_)))
    return found


def timings_of(spec: RunSpec, reports: list[Report]) -> Timings:
    timings = Timings(spec)
    for report in reports:
        timings.apply(report)
    return timings


def compared(spec: RunSpec, reports: list[Report]) -> RehearsalComparison:
    predictions = Predictions.of(spec)
    return compare(spec, timings_of(spec, reports), predictions.rehearsed, predictions.whole)


def test_a_rehearsal_that_took_what_was_predicted(spec: RunSpec) -> None:
    """The first round is not timed. For the whole run the same follows as from the prediction."""
    found = compared(spec, reports_of(spec))
    assert found.timed == 2 and found.parts == []
    assert found.measured == pytest.approx(found.predicted, rel=1e-3, abs=1e-9)
    whole = found.whole_run
    assert (whole.rounds, whole.steps, whole.is_bound) == (7, 40, False)
    for kind in ("absolute", "relative"):
        assert whole.utilization[kind] == pytest.approx(whole.predicted[kind], rel=0.02)
    assert whole.days * 86400 == pytest.approx(7 * Predictions.of(spec).whole.round_seconds, rel=0.02)
    assert next(closing_lines(found)).startswith("All measured times and bytes are within 3%")
    console = SafeConsole(width=80, file=StringIO())
    print_comparison(console, found)  # no line has a mark, so that the column of marks is empty
    assert "a round" in console.file.getvalue()  # type: ignore[attr-defined]


def test_which_rounds_are_timed(spec: RunSpec) -> None:
    # The last of overlapping rounds is not timed. No next round is trained while its contributions are in
    # transit.
    outer = spec.config.outer.model_copy(update={"overlap": 1})
    overlapping = RunSpec(spec.config.model_copy(update={"outer": outer}), None)
    assert timings_of(overlapping, reports_of(spec)).timed == [2]
    assert timings_of(spec, reports_of(spec)).timed == [2, 3]

    # A single round is what the slowest member did in it.
    reports = [one for one in reports_of(spec) if _round(one) == 1]
    prediction = Predictions.of(spec).rehearsed
    found = compare(spec, timings_of(spec, reports), prediction, prediction)
    inner = max(one.inner_seconds for one in prediction.replicas)
    assert found.timed == 1 and found.measured["round_seconds"] == pytest.approx(inner + prediction.outer_seconds)


def _round(report: Report) -> int:
    told: Any = getattr(report, report.WhichOneof("event") or "")
    return int(told.round)


@pytest.mark.parametrize(
    ("more", "what", "component"),
    [
        ({"outer": 1.0}, "round_seconds", "the outer round"),
        ({"home.1": 1.0}, "round_seconds", "the inner loop"),
        ({"step": 1.0, "home.1": 1.0}, "replicas.home.step_seconds", "waits of home.1 for messages"),
    ],
)
def test_where_both_part(spec: RunSpec, more: dict[str, float], what: str, component: str) -> None:
    found = compared(spec, reports_of(spec, **more))
    parting = next(one for one in found.parts if one.what == what)
    assert parting.component == component and parting.measured - parting.predicted == pytest.approx(1.0, rel=0.01)
    line = next(line for line in closing_lines(found) if line.startswith(f"<< {what}: measured "))
    assert line.endswith(f"; most of it is {component}.")


def test_what_a_host_is_told_of_its_line(spec: RunSpec) -> None:
    rates: dict[Way, Rate] = {"up": Rate(1e6, is_limited=True), "down": Rate(4e7, is_limited=False)}
    slow, good = OwnLine(spec, "home.0", rates), OwnLine(spec, "home.1", {})
    inner = Predictions.of(spec).rehearsed.replicas[1].inner_seconds
    for report in reports_of(spec, **{"home.1": inner}):
        slow.on_report(report)
    reached, told = slow.lines()
    assert reached == (
        "the line of this host reached 1 Mbit/s up, at least 40 Mbit/s down; the run's YAML expects 2 Mbit/s up"
    )
    assert "too slow for this boundary" in told and "home.1 waited" in told and "home would train" in told
    assert list(good.lines()) == ["no round of the rehearsal was complete, so nothing is known of the group"]
    assert set(slow.watched(spec, ["home.0"])) == {"exchange", "dc", "home.1"}


@pytest.mark.parametrize(("up", "told"), [(0.0, 0), (2e5, 1)])
def test_a_line_too_slow_to_be_measured_is_not_reported(
    up: float, told: int, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange would refuse a line without bandwidth, in the name of an honest host."""
    rates, client, own = (Rate(up, True), Rate(1e6, True)), MagicMock(), MagicMock(slot="home.0")
    monkeypatch.setattr(command, "measure", lambda *_: rates)
    monkeypatch.setattr(command, "ExchangeClient", lambda *_, **__: client)
    assert command._measured_line(own, spec) == dict(zip(("up", "down"), rates, strict=True))
    assert client.report.call_count == told


def test_a_line_that_holds_nobody_up_is_good_enough(spec: RunSpec) -> None:
    """Idle time with free links does not count, and a datacenter has no neighbours."""
    free = compared(spec, reports_of(spec))
    free = replace(free, measured={**free.measured, "replicas.home.exposed_communication": 0.04})
    assert "the line is good enough" in verdict(spec, "home.0", free) and "waited 4.0%" in verdict(spec, "home.0", free)
    assert verdict(spec, "dc", free).startswith("dc has no neighbours to hold up; dc would train ")


def test_a_configuration_becomes_a_rehearsal(yaml: Path, tmp_path: Path) -> None:
    """Its id and its name differ, and it needs no tokenizer. A YAML cannot do so."""
    config = ConfigFile(yaml, ["outer.weights=equal"]).config
    found = config.as_rehearsal(9, 100)
    assert (found.outer.rounds, found.inner.steps, found.name) == (7, 40, "homes-rehearsal")
    assert RunSpec(found, None).run != RunSpec(config.model_copy(update={"name": found.name}), None).run
    longest = config.model_copy(update={"name": "x" * LONGEST_RUN_NAME}).as_rehearsal(1, 1)
    assert RunConfig.model_validate(longest.model_dump(mode="json")).name.endswith("x-rehearsal")
    save_config(found, tmp_path / "config.yaml")
    for path, changes in ((tmp_path / "config.yaml", []), (yaml, ["rehearsal.rounds=2", "rehearsal.steps=2"])):
        with pytest.raises(ConfigError, match="rehearsal: found the mark of a rehearsal, expected the YAML of a run"):
            ConfigFile(path, changes)
    assert ConfigFile(tmp_path / "config.yaml", kept=True).config == found


def test_the_prediction_is_for_what_is_rehearsed(yaml: Path, spec: RunSpec) -> None:
    """Nine replicas of a fleet would be those of another run."""
    given = ["simulate.fleets={home: {count: 9}}"]
    found = RunSpec(ConfigFile(yaml, given).as_rehearsal(ROUNDS, STEPS).config, None)
    assert Predictions.of(found) == Predictions.of(spec)


def without_times(report: Report) -> Report:
    """Return a report in which a member says that it took no time at all."""
    if report.HasField("member_round"):
        report.member_round.CopyFrom(MemberRound(round=report.member_round.round))
    return report


def test_members_that_report_no_time_or_no_step_do_not_end_the_comparison(spec: RunSpec) -> None:
    """The host of the exchange, and each host that joined, would otherwise read a traceback."""
    timeless = [without_times(one) for one in reports_of(spec)]
    found = compared(spec, [one for one in timeless if not one.HasField("inner_step")])
    json.dumps(found.as_json(), allow_nan=False)
    assert found.measured["tokens_per_second"] == 0.0
    assert "home.0" in verdict(spec, "home.0", found) and list(closing_lines(found))
    begun = [one for one in reports_of(spec) if not (one.HasField("member_round") and one.member == "home.1")]
    mode, console = AsRehearsal(ROUNDS, STEPS), SafeConsole(width=120, file=StringIO())
    mode.begin(spec)
    for one in begun:
        mode.on_report(one)
    with pytest.raises(RunFailed, match=f"^homes-rehearsal: {NOTHING_TIMED}$"):
        mode.conclude(console, RunState(spec), RunFolder(Path("nowhere")))


def measured_file(tmp_path: Path, **changes: Any) -> Path:
    content = {"members": {"dc": {}, "home.0": {}, "home.1": {}}, "lines": {"home.1": {"up": 1.5e6, "down": 9e6}}}
    costs = dict.fromkeys(("forward", "backward", "update", "contribute", "apply", "evaluate"), "0.25 s")
    content |= {"costs": {"hardware": {}, "measured": {"dc": costs}}}
    path = tmp_path / "rehearsal.json"
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))
    return path


def test_a_plan_takes_measured_lines_and_costs(yaml: Path, tmp_path: Path) -> None:
    """The latency remains that of the YAML, and other members keep their lines."""
    config = MeasuredInput(measured_file(tmp_path)).applied(ConfigFile(yaml).config, layers=4)
    assert config.simulate.measured["dc"].forward == 0.25
    spec = RunSpec(config, None)
    lines = {name: (line.up, line.down, line.latency) for name, line in spec.lines.items()}
    assert lines == {"home.0": (2e6, 1e7, 0.003), "home.1": (1.5e6, 9e6, 0.003)}
    home = config.replicas[1]
    assert isinstance(home, ParticipantsReplica) and [len(own) for own in home.layer_ranges(4)] == [2, 2]
    dc = MeasuredInput(measured_file(tmp_path, lines={"dc": {"up": 3e6, "down": 4e6}})).applied(config, layers=4)
    assert RunSpec(dc, None).lines["dc"].up == 3e6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"costs": None}, "`costs` is missing"),
        ({"lines": {"home.1": {"up": -1, "down": 2}}}, "found no rehearsal"),
        ({"lines": []}, "found no rehearsal"),
        ({"members": {"hume.0": {}}}, "found hume.0, which is not a member of this run"),
    ],
)
def test_a_plan_names_a_file_that_is_no_rehearsal_of_it(
    yaml: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=r"^--measured .*rehearsal\.json: ") as error:
        MeasuredInput(measured_file(tmp_path, **changes)).applied(ConfigFile(yaml).config, layers=4)
    assert named in str(error.value)
