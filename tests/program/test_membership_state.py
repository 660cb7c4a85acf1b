"""Display of members that leave and return, of late contributions and of pauses. It shows nothing if all is well."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_run_state import (
    ROUND_SECONDS,
    START,
    begun,
    evaluation,
    finished,
    inner_step,
    made_up_reports,
    made_up_round,
    made_up_spec,
    round_closed,
    so_far,
    state_of,
)

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import format_share
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.display import live_view
from hetero_pp.program.report.lines import OwnRoundLines, round_line, trouble_lines, words_of
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
    yield membership_event(time, pb.SUSPENDED, slot="home.0", cause=KILLED, **home)


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
    reports = [*there(), *made_up_reports()[3:]]
    state = state_of(reports)
    assert said(reports) == []
    assert round_line(state, 2).endswith("home 4.5000, 10 s")
    found = summary_of(state)["membership_state"]
    assert found.pop("participation") == 1.0
    assert not any(found.values())
    assert not any("Participation" in line or "joined" in line for line in result_of(state))


_DC_OVER = membership_event(START, pb.INCARNATION_OVER, slot="dc", replica="dc", incarnation=1, cause="nothing")
_DC_SILENT = membership_event(START, pb.SILENT, slot="dc", replica="dc", incarnation=2, cause="no heartbeat for 15 s")
_LATE = membership_event(START, pb.LATE, replica="dc", round=3)
_TOO_LARGE = membership_event(START, pb.LEFT_OUT, replica="dc", round=3)
_FEW = "0 of 2 replicas are present, 1 are required"


@pytest.mark.parametrize(
    ("reports", "outer", "told"),
    [
        (
            [*there(), *killed(START), back(START + 1)],
            {},
            [
                RESTART,
                "home returns to the start of its round and waits for home.1",
                "home.1 has joined again (incarnation 2)",
            ],
        ),
        (  # a member of another host: the exchange tells
            [*there(), _DC_OVER, joined(START, "dc", 2), _DC_SILENT],
            {},
            [
                "dc: nothing; its slot is vacant",
                "dc has joined again (incarnation 2)",
                "dc: no heartbeat for 15 s; its slot is vacant",
            ],
        ),
        ([*there(), joined(START, "home.1", 1)], {}, ["home.1 has joined"]),
        (
            [_LATE],
            {"returned": 1.0},
            ["dc was too late for round 3: its contribution is restored to its error feedback"],
        ),
        (
            [_LATE],
            {"returned": 0.5},
            ["dc was too late for round 3: 50 % of its contribution is restored to its error feedback"],
        ),
        ([_LATE], {"returned": 0.0}, ["dc was too late for round 3: its contribution is discarded"]),
        (
            [_LATE, _TOO_LARGE],
            {"keep_local": True},
            [
                "dc was too late for round 3: it continues from its own parameters",
                "dc: its contribution to round 3 is far larger than expected and is excluded: 50 % of its contribution "
                "is restored to its error feedback",
            ],
        ),
        (
            [
                membership_event(START, pb.PAUSED, round=2, cause=_FEW),
                membership_event(START + 12, pb.WENT_ON, round=2),
                membership_event(START, pb.HEALED, slot="dc", round=1, cause="held a norm that differs from the log"),
                membership_event(START, pb.GIVEN_UP, slot="home.1", cause=f"{KILLED}; {LEFT}"),
                membership_event(START, pb.INJECTED, slot="dc", cause="freeze of dc for 20 s (training)"),
            ],
            {},
            [
                f"round 2 is paused: {_FEW}; it continues when more replicas join",
                "round 2 continues after 12 s",
                "after round 1, dc held a norm that differs from the log; it recovers from the run log",
                f"{KILLED}; {LEFT}",
                "injected fault: freeze of dc for 20 s (training)",
            ],
        ),
    ],
)
def test_membership_events_in_words(reports: list[Report], outer: dict[str, Any], told: list[str]) -> None:
    assert said(reports, outer={"rounds": 2} | outer) == told


def test_members_that_a_run_goes_on_with_have_not_joined_again() -> None:
    reports = [joined(START, "dc", 5), begun(START, 3)]
    assert said(reports) == []
    assert summary_of(state_of(reports))["membership_state"]["members"] == {}


def test_a_rounds_line_says_whom_it_does_not_count() -> None:
    state = state_of([*there(), *killed(START + 5), back(START + 20), closed_without(START + 8, 1, "home")])
    state.apply(evaluation(START + 9, "dc", 1, 4.5))
    state.apply(closed_without(START + 30, 2, "dc", late=True))
    assert round_line(state, 1) == (
        f"round 1/2: validation loss dc 4.5000, home –, training loss dc –, home –, 0 ms; excluded: home ({KILLED})"
    )
    assert "excluded: dc was late" in round_line(state, 2)
    state.apply(
        membership_event(START + 31, pb.INCARNATION_OVER, slot="home.0", replica="home", incarnation=1, cause="gone")
    )
    assert round_line(state, 2).endswith("excluded: dc was late; not evaluated: home (home.0: gone)")


def test_a_rejected_contribution_is_named_even_if_a_slot_of_its_replica_was_vacant() -> None:
    closed = closed_without(START + 8, 1, "home")
    closed.round_closed.left_out.append("home")
    state = state_of([*there(), *killed(START + 5), back(START + 6), closed])
    assert "excluded: home sent a contribution that is too large" in round_line(state, 1)


def test_a_replica_that_came_back_too_late_for_a_round() -> None:
    reports = [*there(), *killed(START + 1), back(START + 2), round_closed(START + 8, 1)]
    state = state_of([*reports, closed_without(START + 18, 2, "home")])
    assert "excluded: home did not take part" in round_line(state, 2)


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


def test_a_run_is_over_though_a_member_that_was_given_up_never_finished() -> None:
    reports = [one for one in made_up_reports() if not (one.HasField("finished") and one.member == "home.1")]
    assert not state_of(reports).is_over
    assert state_of([*reports, membership_event(START + 1, pb.GIVEN_UP, slot="home.1", cause=KILLED)]).is_over
    gone = membership_event(START + 1, pb.INCARNATION_OVER, slot="home.1", replica="home", incarnation=1, cause=KILLED)
    assert state_of([*reports, gone]).is_over
    assert not state_of([gone, *(finished(START, name) for name in ("dc", "home.0"))]).is_over  # rounds are left


def test_a_run_is_over_though_a_replica_that_took_no_part_in_the_last_round_never_finished() -> None:
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


def test_a_host_shows_what_happens_to_others_and_goes_on_once() -> None:
    lines: list[str] = []
    own = OwnRoundLines(made_up_spec(), ["dc"], lines.append)
    for report in [so_far(START), *there()[:3], begun(START, 1), *killed(START + ROUND_SECONDS), begun(START + 20, 1)]:
        own.on_report(report)
    assert lines[1:] == [
        "all 3 members have joined",
        "resuming after round 1",
        RESTART,
        "home returns to the start of its round and waits for home.1",
    ]


def judged(time: float, round_: int, replica: str, is_equal: bool) -> Report:
    found = pb.Judgement(round=round_, replica=replica, recomputed=pb.Recomputed(is_equal=is_equal))
    return Report(time=time, member="exchange", judged=found)


def test_the_end_tells_what_audits_found() -> None:
    scores = Report(time=START + 2, member="exchange")
    scores.scores.scores.add(replica="dc")
    scores.scores.scores.add(replica="home", excluded="low score")
    audited = [*there(), judged(START, 1, "dc", True), judged(START + 1, 1, "home", False), scores]
    audited.append(membership_event(START + 3, pb.UNAUDITED, cause="its disk is full"))
    lines = result_of(state_of([*audited, *made_up_reports()[3:]]))
    assert (
        "Audits: 2 rounds of replicas computed again, 1 differed from what was contributed (see metrics.jsonl)."
        in lines
    )
    assert "Scores: 2 replicas, excluded: home (`hetero-pp audit scores`)." in lines
    assert "Unaudited: its disk is full." in lines
    equal = result_of(state_of([*there(), judged(START, 1, "dc", True), *made_up_reports()[3:]]))
    assert "Audits: 1 round of replicas computed again, all as contributed." in equal
    never = state_of([*there(), *made_up_reports()[3:]])
    scored = never.spec.config.model_copy(update={"audit": AuditSettings.model_validate({"gauntlet": {}})})
    never.spec = RunSpec(scored, 256)
    assert "Unaudited: no validator has judged a round." in result_of(never)
