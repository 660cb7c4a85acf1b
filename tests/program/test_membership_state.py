"""Display of members that leave and return, of late contributions and of pauses. It shows nothing if all is well."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from test_run_state import (
    START,
    begun,
    finished,
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
from hetero_pp.program.report.lines import round_line, trouble_lines, words_of
from hetero_pp.program.report.recorder import line_of
from hetero_pp.program.report.state import RunState
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


def test_an_optional_group_in_which_nobody_is_any_more_is_no_trouble() -> None:
    data = made_up_spec().config.model_dump(mode="json")
    data["replicas"][1]["optional"] = True
    spec = RunSpec(type(made_up_spec().config).model_validate(data), made_up_spec().shape.vocabulary)
    slots = [{"slot": f"home.{n}", "replica": "home", "incarnation": 1, "cause": "it has left"} for n in (0, 1)]
    left = [membership_event(START + 1, pb.INCARNATION_OVER, **slot) for slot in slots]
    for gone, lines in ((left[:1], 1), (left, 0)):
        state = state_of([*there(), *gone], spec)
        assert len(list(trouble_lines(state, START + 5))) == lines


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
