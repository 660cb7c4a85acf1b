"""Output without a terminal, the live display that fits a terminal, and the closing tables."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_membership_state import membership_event
from test_run_state import (
    ROUND_SECONDS,
    ROUNDS,
    START,
    TIMED,
    evaluation,
    inner_step,
    link_use,
    made_up_reports,
    made_up_round,
    made_up_spec,
    state_of,
    timed_reports,
    waiting,
)

from hetero_pp.config.lines import DIRECTIONS
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, PAUSED, SILENT, Report
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.model.inner import REMEDIES
from hetero_pp.program.report.display import LOSS_SECONDS, LiveDisplay, live_view
from hetero_pp.program.report.lines import waiting_line
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of

CONFIGS = Path(__file__).parents[2] / "configs"
END = START + ROUNDS * ROUND_SECONDS


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


def text_of(renderable: object, width: int = 100) -> str:
    console, out = plain_console(width)
    console.print(renderable)
    return out.getvalue()


def test_a_line_at_the_start_and_one_a_round() -> None:
    """The time until all have joined counts from the user's command."""
    console, out = plain_console(width=40)
    state = RunState(made_up_spec())
    with LiveDisplay(state, console, since=START - 22) as display:
        for report in made_up_reports():
            state.apply(report)
            display.refresh()
    assert out.getvalue().splitlines() == [
        "made-up: 2 replicas, 3 members, 2 outer rounds of 2 inner steps",
        "all 3 members have joined, 20 s after the start",
        "round 1/2: validation loss 4.6000, training loss dc 5.0000, home 5.5000, 8 s",
        "round 2/2: validation loss 3.6000, training loss dc 4.0000, home 4.5000, 10 s",
    ]


def test_rounds_of_time_in_lines_and_live() -> None:
    console, out = plain_console(width=40)
    state = RunState(made_up_spec(**TIMED))
    with LiveDisplay(state, console) as display:
        for report in timed_reports():
            state.apply(report)
            display.refresh()
    assert out.getvalue().splitlines() == [
        "made-up: 2 replicas, 3 members, 2 outer rounds of as many inner steps as fit into 8 s",
        "round 1/2: validation loss 4.0000, training loss dc 5.0000, home 6.0000, 8 s",
        "round 2/2: validation loss 3.0000, training loss dc 4.0000, home 5.5000, 10 s",
    ]
    shown = text_of(live_view(state, START + 21, height=40))
    assert re.search(r"seconds of this round .* 3/8\b", shown)
    assert re.search(r"dc +datacenter +8 ", shown)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_replicas_that_diverge_are_told_once_with_what_helps(is_terminal: bool) -> None:
    """In one line, although their losses arrive one by one, and at the end again. NaN arrives as the largest loss."""
    out, state = io.StringIO(), RunState(made_up_spec())
    console = Console(file=out, width=400, force_terminal=is_terminal)
    high = {"dc": 41.5, "home": MOST_LOSS}
    with LiveDisplay(state, console, lambda: START) as display:
        for report in made_up_reports():
            if report.HasField("evaluation") and report.evaluation.round > 0:
                report.evaluation.loss = high[report.evaluation.replica]
            state.apply(report)
            display.refresh()
    losses = "dc 41.5000 in round 1, home 1,000,000 or more in round 1"
    line = f"Training diverged: loss of the untrained model 6.2000, of {losses}; {REMEDIES}"
    assert out.getvalue().count("diverged") == out.getvalue().count(line) == 1
    summary = summary_of(state)
    assert [(one["replica"], one["round"], one["loss"]) for one in summary["diverged"]] == [
        ("dc", 1, 41.5),
        ("home", 1, MOST_LOSS),
    ]
    closing = io.StringIO()
    print_result(Console(file=closing, width=400), summary, Path("/runs/made-up"))
    assert f"{line}." in closing.getvalue()


def test_who_is_missing_at_the_start_and_later_is_told_once() -> None:
    console, out = plain_console()
    joined, state = made_up_reports()[:3], RunState(made_up_spec())
    reports = [
        joined[0],
        waiting(START, JOINING, "home.0", "home.1", seconds=10.2),
        *joined[1:],
        waiting(START, JOINING),
        waiting(START, CONTRIBUTING, "home.1", seconds=40.4),
    ]
    with LiveDisplay(state, console, lambda: START, START) as display:
        for report in reports:
            state.apply(report)
            display.refresh()
            display.refresh()
    assert out.getvalue().splitlines()[1:] == [
        "1 of 3 members have joined, missing: home.0, home.1; no progress for 10 s",
        "all 3 members have joined, 0 ms after the start",
        "round 2: waiting for 1 of 3 contributions from home.1; no heartbeat from home.1; no progress for 40 s",
    ]


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
        display._ended.wait(0.6)
        assert "round 2/2" in out.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_live_view_fits_the_terminal(width: int) -> None:
    state = state_of([*made_up_round(1), evaluation(START + 12, "dc", 0, 6.0)])
    lines = text_of(live_view(state, START + 12, height=40), width).splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "0:12 elapsed, about 0:04 left" in text
    assert "1/2" in text
    assert "home.0-1" in text
    assert ("8 / 4 Mbit/s" in text) == (width == 100)
    assert "42 %" in text  # busy 5 of 12 seconds
    assert "participants" in text


def test_live_view_has_a_row_for_every_link_of_a_machine_with_a_long_name() -> None:
    state = RunState(spec_of(ConfigFile(CONFIGS / "unequal_groups.yaml")))
    rates = [link_use(START + 12, name, way, 0, 987_654_321) for name in state.links for way in DIRECTIONS]
    for report in rates:
        state.apply(report)
    lines = text_of(live_view(state, START + 12, height=40), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if "988 MB" in line] == list(state.links)


def test_live_view_of_a_low_terminal_leaves_the_quiet_links_out() -> None:
    state = state_of(made_up_reports())
    lines = text_of(live_view(state, END, height=17)).splitlines()
    assert "and 2 links with less traffic" in lines[-1]
    assert any("home.0-1" in line for line in lines)
    assert len(lines) <= 17


def test_on_a_terminal_the_view_goes_away_at_a_good_end() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=40, force_terminal=True)
    with LiveDisplay(state_of(made_up_reports()), console, clock=lambda: END) as display:
        display.refresh()
    assert "home.0-1" in out.getvalue()
    assert "\x1b[2K" in out.getvalue().splitlines()[-1]


def test_result() -> None:
    console, out = plain_console()
    print_result(console, summary_of(state_of(made_up_reports())), Path("/runs/made-up"))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "dc datacenter 400 4.0000 6.0000 4.5000 3.5000" in rows
    assert "mean 800 – 6.1000 4.6000 3.6000" in rows
    forward = rows.index("home.0-1 → 8 Mbit/s 8 kB 8.02 kB 50 %")
    assert rows[forward + 1] == "← 4 Mbit/s 4 kB 4.02 kB 25 %"
    said = " ".join(rows)
    assert (
        "The first run checkpoint and the evaluation of the initial weights account for 50 kB of the payload." in said
    )
    assert "Contributions: 4 kB in total, 2,000 values kept, 16 bits per kept value." in rows
    assert "All replicas hold the same weights: sha256 0202020202020202…" in rows
    assert "2 outer rounds in 22 s, 40 tokens/s over all replicas." in rows
    assert "Files: /runs/made-up (" in said
