"""Output without a terminal, the live display that fits a terminal, and the closing tables."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from made_up_run import (
    START,
    inner_step,
    made_up_reports,
    made_up_round,
    made_up_spec,
    membership_event,
    state_of,
    waiting,
)
from rich.console import Console

from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, PAUSED, SILENT, Report
from hetero_pp.program.report.display import LOSS_SECONDS, LiveDisplay
from hetero_pp.program.report.lines import waiting_line
from hetero_pp.program.report.state import RunState


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


def text_of(renderable: object, width: int = 100) -> str:
    console, out = plain_console(width)
    console.print(renderable)
    return out.getvalue()


TRAINED, TRAINS = [*made_up_round(1)][:6], [*made_up_round(1)]
STEPPED = [
    *TRAINS,
    inner_step(START + 11, "dc", "dc", 2, 0, loss=1.0),
    inner_step(START + 12, "home.1", "home", 2, 0, loss=1.0),
]
ALL = {"dc": 1.0, "home.0": 1.0, "home.1": 1.0}
OF_3 = "waiting for 3 of 3 contributions"
STEP = f"round 2: training (1 of 2 inner steps; {OF_3})"
LONG = f"round 2: training (0 of 2 inner steps; {OF_3})"
LATE = "round 1: trained (2 of 2 inner steps; waiting for 2 of 3 contributions from home.0, home.1)"
SILENT_FOR = "no heartbeat from %s for 42 s; no progress for"
CLOSED = "all rounds are closed; waiting for dc (last heartbeat"


@pytest.mark.parametrize(
    ("before", "awaited", "heard", "computing", "seconds", "said"),
    [
        (STEPPED, CONTRIBUTING, ALL, "", 10, STEP),  # a step that takes long is no stall
        (STEPPED, CONTRIBUTING, ALL, "", 70, f"{STEP}; no progress for 1:10"),
        (
            STEPPED,
            CONTRIBUTING,
            ALL | {"home.1": 42.0},
            "",
            10,
            f"{STEP}; {SILENT_FOR % 'home.1'} 10 s",
        ),
        (TRAINS, CONTRIBUTING, ALL, "dc", 20, LONG),
        (TRAINS, CONTRIBUTING, ALL, "dc", 70, f"{LONG}; computing for 1:10: dc"),
        # The last words of a silent member do not count.
        (
            TRAINS,
            CONTRIBUTING,
            ALL | {"dc": 42.0},
            "dc",
            70,
            f"{LONG}; {SILENT_FOR % 'dc'} 1:10",
        ),
        (TRAINED, CONTRIBUTING, {"home.0": 1.0, "home.1": 1.0}, "", 10, f"{LATE}; no progress for 10 s"),
        # Members that finish the last round are no stall while they are heard.
        ([], FINISHING, {"dc": 1.0}, "", 20, f"{CLOSED} 1 s ago) to finish; for 20 s so far"),
        ([], FINISHING, {"dc": 12.0}, "", 20, f"{CLOSED} 12 s ago) to finish; no progress for 20 s"),
    ],
)
def test_the_line_of_a_wait_names_who_is_late_silent_or_computes(
    before: list[Report], awaited: Any, heard: dict[str, float], computing: str, seconds: float, said: str
) -> None:
    state = RunState(made_up_spec())
    for report in before:
        state.apply(report)
    told = waiting(START + 22, awaited, *heard, seconds=seconds)
    told.waiting.round = 1 if before is TRAINED else told.waiting.round
    for one in told.waiting.missing:
        one.silent_seconds, one.computes = heard[one.member], one.member == computing
    state.apply(told)
    assert waiting_line(state) == said
    if said == LONG:
        assert waiting_line(state, sees_all=False) == f"round 2: {OF_3}; computing for 20 s: dc"


@pytest.mark.parametrize("lacks", ["its loss comes", "nobody evaluates", "the member is gone", "the run pauses"])
def test_a_round_waits_for_its_loss_while_the_next_round_closes(lacks: str) -> None:
    """In a fast run the next round closes before the loss arrives. The wait for the loss is bounded."""
    console, out = plain_console()
    state, now = RunState(made_up_spec(outer={"rounds": 9})), [START + 18.5]
    display = LiveDisplay(state, console, lambda: now[0])

    def told() -> list[str]:
        display.refresh()
        return re.findall(r"^round (\d)/9: validation loss (.+?), training", out.getvalue(), re.MULTILINE)

    evaluated = [one for round_ in (1, 2) for one in made_up_round(round_) if one.HasField("evaluation")]
    for report in [one for round_ in (1, 2) for one in made_up_round(round_) if not one.HasField("evaluation")]:
        if lacks != "the member is gone" or not (report.HasField("round_closed") and report.round_closed.round == 2):
            state.apply(report)
    assert told() == []
    if lacks == "its loss comes":
        for report in evaluated:
            state.apply(report)
        assert told() == [("1", "4.6000"), ("2", "3.6000")]
    elif lacks == "the run pauses":
        state.apply(membership_event(START + 18.5, PAUSED, round=2, cause="too few"))
        assert told() == [("1", "–"), ("2", "–")]
    else:
        if lacks == "the member is gone":
            for slot, replica in (("dc", "dc"), ("home.1", "home")):
                state.apply(membership_event(START + 17, SILENT, slot=slot, replica=replica, cause="it is gone"))
        now[0] = START + 18 + LOSS_SECONDS + 0.1
        assert [found[0] for found in told()] == ["1"]


def test_the_display_refreshes_itself() -> None:
    console, out = plain_console()
    state = state_of(made_up_reports())
    with LiveDisplay(state, console) as display:
        while "round 2/2" not in out.getvalue():
            display._ended.wait(0.01)
