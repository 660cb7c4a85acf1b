"""Display of members that leave and return, of late contributions and of pauses. It shows nothing if all is well."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_run_state import (
    START,
    begun,
    finished,
    inner_step,
    made_up_reports,
    made_up_round,
    made_up_spec,
    round_closed,
    state_of,
)

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import format_share
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.display import live_view
from hetero_pp.program.report.lines import round_line, trouble_lines, words_of
from hetero_pp.program.report.recorder import line_of
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of
from hetero_pp.simulator.costs import step_flops

KILLED = "home.1 was killed by SIGKILL"
LEFT = "no restart is left, so the run continues without it"
RESTART = f"{KILLED}; restarting it (attempt 1 of 3 within 10 min)"


def membership_event(time: float, what: pb.MembershipEventKind, **values: Any) -> Report:
    return Report(time=time, member="exchange", membership_event=pb.MembershipEvent(what=what, **values))


def joined(time: float, member: str, incarnation: int) -> Report:
    return Report(time=time, member=member, joined=pb.Joined(incarnation=incarnation))


def closed_without(time: float, round_: int, replica: str, late: bool = False) -> Report:
    report = round_closed(time, round_)
    record = report.round_closed
    kept = [one for one in record.contributions if one.replica != replica]
    del record.contributions[:]
    record.contributions.extend(kept)
    record.late.extend([replica] * late)
    return report


def killed(time: float) -> Iterator[Report]:
    """Yield the reports of a killed stage. Its launcher reports first."""
    home = {"replica": "home", "incarnation": 1}
    yield membership_event(time, pb.RESTARTED, slot="home.1", cause=RESTART)
    yield membership_event(time, pb.INCARNATION_OVER, slot="home.1", cause=KILLED, **home)
    yield membership_event(time, pb.SUSPENDED, slot="home.1", cause=KILLED, **home)


def back(time: float) -> Report:
    return joined(time, "home.1", 2)


def there() -> list[Report]:
    """Return the reports of a run that all three members have joined and that has begun."""
    return [*(joined(START - 2, member, 1) for member in ("dc", "home.0", "home.1")), begun(START - 1, 0)]


def said(reports: list[Report], **changes: Any) -> list[str]:
    state = RunState(made_up_spec(**changes))
    return [
        words_of(one, state.spec) for report in reports if state.apply(report) and (one := state.news) and one.is_line
    ]


def text_of(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(renderable)
    return out.getvalue()


def result_of(state: RunState) -> list[str]:
    out = io.StringIO()
    print_result(Console(file=out, width=160), summary_of(state), Path("/runs/made-up"))
    return out.getvalue().splitlines()


def test_nothing_is_shown_if_nothing_happened() -> None:
    # Nothing is shown if nothing happened.
    reports = [*there(), *made_up_reports()[3:]]
    state = state_of(reports)
    assert said(reports) == []
    assert round_line(state, 2).endswith("home 4.5000, 10 s")
    found = summary_of(state)["membership_state"]
    assert found.pop("participation") == 1.0
    assert not any(found.values())
    assert not any("Participation" in line or "joined" in line for line in result_of(state))

    # Members that a run goes on with have not joined again.
    reports = [joined(START, "dc", 5), begun(START, 3)]
    assert said(reports) == []
    assert summary_of(state_of(reports))["membership_state"]["members"] == {}


def test_the_live_view_says_who_is_gone_while_it_is() -> None:
    state = state_of(
        [*there(), *killed(START), membership_event(START, pb.PAUSED, round=2, cause="1 of 2 replicas are there")]
    )
    shown = text_of(live_view(state, START + 5, height=40))
    assert "round 2 pauses for 5 s: 1 of 2 replicas are there" in shown
    assert f"{KILLED}; its slot is vacant" in shown
    assert len(text_of(live_view(state, START + 5, height=18)).splitlines()) <= 18
    state.apply(membership_event(START + 6, pb.WENT_ON, round=2))
    state.apply(back(START + 6))
    shown = text_of(live_view(state, START + 7, height=40))
    assert "pauses" not in shown
    assert "vacant" not in shown


def test_an_optional_group_in_which_nobody_is_any_more_is_no_trouble() -> None:
    data = made_up_spec().config.model_dump(mode="json")
    data["replicas"][1]["optional"] = True
    spec = RunSpec(type(made_up_spec().config).model_validate(data), made_up_spec().shape.vocabulary)
    slots = [{"slot": f"home.{n}", "replica": "home", "incarnation": 1, "cause": "it has left"} for n in (0, 1)]
    left = [membership_event(START + 1, pb.INCARNATION_OVER, **slot) for slot in slots]
    for gone, lines in ((left[:1], 1), (left, 0)):
        state = state_of([*there(), *gone], spec)
        assert len(list(trouble_lines(state, START + 5))) == lines


def with_tokens(report: Report, tokens: int) -> Report:
    for one in report.round_closed.contributions:
        one.tokens = tokens
    return report


def test_what_faults_cost_is_in_the_summary_and_at_the_end() -> None:
    reports = [*there(), *made_up_round(1)]
    reports = [with_tokens(one, 200) for one in reports]
    again = START + 1.5
    reports += [*killed(again), back(again + 1)]
    reports += [inner_step(again + 2 + step, "home.0", "home", 1, step, tokens=100) for step in range(2)]
    reports += [
        with_tokens(closed_without(START + 20, 2, "home"), 200),
        membership_event(START + 14, pb.PAUSED, round=2, cause="few"),
        membership_event(START + 18, pb.WENT_ON, round=2),
    ]
    reports += [one for one in made_up_round(2) if one.HasField("inner_step")]
    state = state_of(reports)
    found = summary_of(state)
    assert found["membership_state"]["participation"] == 3 / 4
    assert found["membership_state"]["not_counted"] == [
        {"round": 2, "replica": "home", "cause": "home did not take part"}
    ]
    assert found["membership_state"]["suspended"] == {"home": 1}
    assert found["membership_state"]["pauses"] == [{"round": 2, "seconds": 4.0, "cause": "few"}]
    home = {"taken_again": 1, "restarts": 1, "healed": 0, "incarnation": 2, "gone": None}
    assert found["membership_state"]["members"] == {"home.1": home}
    assert found["goodput"]["share"] == pytest.approx(600 / 1000)  # 200 of 1000 were trained twice, 200 excluded
    assert found["goodput"]["tokens_per_second"] == pytest.approx(600 / 20)
    assert found["replicas"][1]["tokens"] == 400
    lines = result_of(state)
    assert "home.1: restarted once." in lines  # a process that is restarted joins again
    assert "home: returned to the start of a round once." in lines
    assert "home: excluded from 1 round (2)." in lines
    assert "Below quorum: 1 pause, 4 s in total." in lines
    assert "Participation 75 %; included contributions: 30 tokens/s, 60 % of the trained tokens." in lines


def test_the_line_of_a_round_has_its_speed_and_on_a_known_accelerator_mfu_and_memory() -> None:
    spec = made_up_spec()
    reports = [*there(), *made_up_round(1)]
    closed = next(one for one in reports if one.HasField("round_closed"))
    for entry, tokens in zip(closed.round_closed.contributions, (1000, 600), strict=True):
        entry.tokens, entry.steps = tokens, 2
    assert round_line(state_of(reports), 1).endswith(", 8 s, 200 tokens/s")
    rounds = Report(time=START + 9, member="dc")
    rounds.member_round.round, rounds.member_round.device_bytes = 1, 61_200_000_000
    flops = 2 * step_flops(spec, spec.members["dc"]) / 8
    known = f"MFU {format_share(flops / 989e12)}, "
    for device, told in (("cuda:0 NVIDIA H100 80GB HBM3", known), ("cuda:0 NVIDIA B1", "")):
        computes = Report(time=START, member="dc", computes=pb.Computes(device=device))
        line = round_line(state_of([computes, *reports, rounds]), 1)
        assert line.endswith(f", 8 s, 200 tokens/s, {told}61.2 GB of GPU memory")


def test_who_has_ended_is_not_waited_for() -> None:
    # A run is over though a member that was given up never finished.
    reports = [one for one in made_up_reports() if not (one.HasField("finished") and one.member == "home.1")]
    assert not state_of(reports).is_over
    assert state_of([*reports, membership_event(START + 1, pb.GIVEN_UP, slot="home.1", cause=KILLED)]).is_over
    gone = membership_event(START + 1, pb.INCARNATION_OVER, slot="home.1", replica="home", incarnation=1, cause=KILLED)
    assert state_of([*reports, gone]).is_over
    assert not state_of([gone, *(finished(START, name) for name in ("dc", "home.0"))]).is_over  # rounds are left

    # A run is over though a replica that took no part in the last round never finished.
    reports = [one for one in made_up_reports() if one.member != "dc" or not one.HasField("finished")]
    assert not state_of(reports).is_over
    over = Report(time=START + 50, member="exchange", over=pb.Over(round=2, rounds=2, finishing=["home"]))
    assert state_of([*reports, over]).is_over
    over.over.finishing.append("dc")
    assert not state_of([*reports, over]).is_over
    assert line_of(over)["finishing"] == ["home", "dc"]


def test_participation_counts_each_missed_round_in_whatever_order_it_is_told() -> None:
    earlier = [*there(), *killed(START + 5), closed_without(START + 8, 1, "home"), back(START + 9)]
    now = [joined(START + 100, member, 3) for member in ("dc", "home.0", "home.1")]
    state = state_of([*now, *earlier, round_closed(START + 110, 2)])
    assert state.tally.participation == 3 / 4  # the summary names the missed round, too
    assert not state.vacant


def judged(time: float, round_: int, replica: str, is_equal: bool) -> Report:
    found = pb.Judgement(round=round_, replica=replica, recomputed=pb.Recomputed(is_equal=is_equal))
    return Report(time=time, member="exchange", judged=found)
