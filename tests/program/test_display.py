"""Output without a terminal, the live display that fits a terminal, and the closing tables."""

from __future__ import annotations

import io
import re
from pathlib import Path
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
from rewritten import agree
from rich.console import Console

from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, PAUSED, SILENT, Report
from hetero_pp.program.report.display import LOSS_SECONDS, LiveDisplay
from hetero_pp.program.report.lines import waiting_line
from hetero_pp.program.report.state import RunState


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


TRAINED, TRAINS = [*made_up_round(1)][:6], [*made_up_round(1)]
STEPPED = [
    *TRAINS,
    inner_step(START + 11, "dc", "dc", 2, 0, loss=1.0),
    inner_step(START + 12, "home.1", "home", 2, 0, loss=1.0),
]
ALL = {"dc": 1.0, "home.0": 1.0, "home.1": 1.0}
WAITS: dict[str, tuple[list[Report], Any, dict[str, float], str, float]] = {
    "a step that takes long is no stall": (STEPPED, CONTRIBUTING, ALL, "", 10),
    "a step takes more than a minute": (STEPPED, CONTRIBUTING, ALL, "", 70),
    "a member is silent": (STEPPED, CONTRIBUTING, ALL | {"home.1": 42.0}, "", 10),
    "a member computes": (TRAINS, CONTRIBUTING, ALL, "dc", 20),
    "a member computes for more than a minute": (TRAINS, CONTRIBUTING, ALL, "dc", 70),
    "the last words of a silent member do not count": (TRAINS, CONTRIBUTING, ALL | {"dc": 42.0}, "dc", 70),
    "all have trained": (TRAINED, CONTRIBUTING, {"home.0": 1.0, "home.1": 1.0}, "", 10),
    "a member that finishes is heard": ([], FINISHING, {"dc": 1.0}, "", 20),
    "a member that finishes is silent": ([], FINISHING, {"dc": 12.0}, "", 20),
}
"""Reports before it, what is awaited, seconds since each member was heard, the member that computes, and seconds."""


def test_the_line_of_a_wait_names_who_is_late_silent_or_computes() -> None:
    """The second line is that of a host that does not get the reports of all members."""
    found = {}
    for name, (before, awaited, heard, computing, seconds) in WAITS.items():
        state = state_of(before)
        told = waiting(START + 22, awaited, *heard, seconds=seconds)
        told.waiting.round = 1 if before is TRAINED else told.waiting.round
        for one in told.waiting.missing:
            one.silent_seconds, one.computes = heard[one.member], one.member == computing
        state.apply(told)
        found[name] = [waiting_line(state), waiting_line(state, sees_all=False)]
    agree(Path(__file__).with_name("waits.json"), found)


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
