"""Texts and numbers that are shown of made-up runs.

Texts are in shown_runs.json: lines, events in words, lines of a host with a member, the live view, and the end. Numbers
are in shown_numbers.json: the summary, metrics, curves, and what the page gets.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from made_up_run import (
    KILLED,
    LEFT,
    ROUND_SECONDS,
    START,
    TIMED,
    back,
    begun,
    closed_without,
    evaluation,
    failure,
    inner_step,
    joined,
    killed,
    link_use,
    made_up_reports,
    made_up_round,
    made_up_spec,
    member_round,
    membership_event,
    round_closed,
    so_far,
    there,
    timed_reports,
    waiting,
)
from rewritten import agree
from rich.console import Console
from test_operate import collected
from test_view_data import frame, view_of

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.program.report.boards import Scalars
from hetero_pp.program.report.display import LiveDisplay, live_view
from hetero_pp.program.report.lines import OwnRoundLines, words_of
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of

SHOWN, NUMBERS = (Path(__file__).with_name(f"shown_{what}.json") for what in ("runs", "numbers"))
OVER, ALL_BUT_JOINED = (
    Report(time=START + 40, member="exchange", over=pb.Over(round=2, rounds=2, finishing=["dc"])),
    3,
)


def _diverged() -> list[Report]:
    """Losses arrive one by one. NaN arrives as the largest loss."""
    reports = made_up_reports()
    for report in reports:
        if report.HasField("evaluation") and report.evaluation.round > 0:
            report.evaluation.loss = {"dc": 41.5, "home": MOST_LOSS}[report.evaluation.replica]
    return reports


def _late(*excluded: Report) -> list[Report]:
    return [*there(), membership_event(START, pb.LATE, replica="dc", round=1), *excluded]


def _rejected() -> list[Report]:
    """A slot of the replica was vacant, too."""
    closed = closed_without(START + 8, 1, "home")
    closed.round_closed.left_out.append("home")
    return [*there(), *killed(START + 5), back(START + 6), closed]


def _audited(is_equal: bool) -> list[Report]:
    def judged(time: float, replica: str, equal: bool) -> Report:
        found = pb.Judgement(round=1, replica=replica, recomputed=pb.Recomputed(is_equal=equal))
        return Report(time=time, member="exchange", judged=found)

    scores = Report(time=START + 2, member="exchange")
    scores.scores.scores.add(replica="dc")
    scores.scores.scores.add(replica="home", excluded="low score")
    unaudited = membership_event(START + 3, pb.UNAUDITED, cause="its disk is full")
    trouble = [] if is_equal else [judged(START + 1, "home", False), scores, unaudited]
    return [*there(), judged(START, "dc", True), *trouble, *made_up_reports()[3:]]


def _elsewhere() -> list[Report]:
    """Hosts tell of the rounds of their own members. The launcher of the killed member is another host's."""
    over: dict[str, Any] = {"slot": "home.1", "replica": "home", "incarnation": 1, "cause": KILLED}
    gone = membership_event(START + 50, pb.INCARNATION_OVER, **over)
    past = [*there(), begun(START + 1, 0), gone, so_far(START + 60, last_round=1), joined(START + 61, "home.1", 2)]
    uses = [link_use(START + 62, "home.1-exchange", way, 2, 1000) for way in ("forward", "backward")]
    uses += [link_use(START + 62, "home.0-1", way, 2, 3000) for way in ("forward", "backward")]
    own = [evaluation(START + 63, "home", 2, 4.5), member_round("home.1", 2), member_round("dc", 2, wait=0.0)]
    steps = [inner_step(START + 62, "home.1", "home", 2, step, loss=5.0 + step) for step in range(2)]
    return [*past, *steps, *uses, *own, so_far(START + 90, last_round=1), OVER]


def _killed_and_paused() -> list[Report]:
    """A stage is killed in round 1, whose steps are trained again. Round 2 pauses, and excludes its replica."""
    again, closed = START + 1.5, closed_without(START + 20, 2, "home")
    reports = [*there(), *made_up_round(1), *killed(again), back(again + 1)]
    reports += [inner_step(again + 2 + step, "home.0", "home", 1, step, tokens=100) for step in range(2)]
    reports += [
        closed,
        membership_event(START + 14, pb.PAUSED, round=2, cause="few"),
        membership_event(START + 18, pb.WENT_ON, round=2),
        *(one for one in made_up_round(2) if one.HasField("inner_step")),
    ]
    for report in reports:
        for entry in report.round_closed.contributions:
            entry.tokens = 200
    return reports


def _lined() -> list[Report]:
    """Links of one site share its line. One report is of the time before the first step."""
    return [
        inner_step(START, "dc", "dc", 1, 0, loss=5.0),
        link_use(START, "home.1-exchange", "backward", 0, 990),
        link_use(START + 5, "home.0-1", "forward", 1, 240),
        link_use(START + 5, "home.0-1", "backward", 1, 90),
        link_use(START + 5, "dc-exchange", "forward", 1, 140),
        link_use(START + 10, "dc-exchange", "backward", 2, 190),
    ]


LINED: dict[str, Any] = {
    "lines": {"dsl": {"up": "1 kbit/s", "down": "4 kbit/s"}},
    "sites": {"house": {"line": "dsl", "members": ["dc", "home.1"]}},
    "replicas": [
        {"name": "dc", "kind": "datacenter"},
        {"name": "home", "kind": "participants", "stages": {"count": 2, "line": "dsl"}, "boundary": {"rank": 8}},
    ],
}


def _times(member: str, round_: int = 1, **seconds: Any) -> Report:
    parts = {f"{part}_seconds": value for part, value in seconds.items()}
    return Report(time=START + 9 + round_, member=member, member_round=pb.MemberRound(round=round_, **parts))


def _timed_rounds() -> Iterator[Report]:
    """Yield rounds that each replica ends at another time."""
    for round_ in (1, 2):
        yield from made_up_round(round_)
        for member, seconds in (("dc", 4), ("home.0", 8)):
            time = START + ROUND_SECONDS * (round_ - 1) + seconds
            yield Report(time=time, member=member, member_round=pb.MemberRound(round=round_))


def _doing(**doings: Any) -> list[Report]:
    """A member's name has `_` for a dot."""
    step = inner_step(START + 4, "dc", "dc", 1, 0, loss=5.0)
    names = {name.replace("_", "."): doing for name, doing in doings.items()}
    told = [Report(time=START + 1, member=name, activity=pb.Activity(doing=doing)) for name, doing in names.items()]
    return [*there(), step, *told]


def _refused(member: str, kind: str, count: int) -> Report:
    return Report(time=START, member=member, refusal=pb.Refusal(kind=kind, count=count, sender="evil", reason="evil"))


def _stored() -> Report:
    report = waiting(START + 1, pb.STORING)
    report.waiting.store_error = "/runs: No space left on device"
    return report


JOINED, STEP = made_up_reports()[:3], inner_step(START, "dc", "dc", 1, 0, loss=5.0)
HOME_0_GONE = {"slot": "home.0", "replica": "home", "incarnation": 1, "cause": "gone"}
DC = {"slot": "dc", "replica": "dc"}
RUNS: dict[str, tuple[list[Report], dict[str, Any]]] = {
    "whole": ([*there(), *made_up_reports()[3:]], {}),
    "rounds of time": ([*there(), *timed_reports()], TIMED),
    "diverged": (_diverged(), {}),
    "who is missing": (
        [
            *(JOINED[0], waiting(START, pb.JOINING, "home.0", "home.1", seconds=10.2), *JOINED[1:]),
            *(waiting(START, pb.JOINING), waiting(START, pb.CONTRIBUTING, "home.1", seconds=40.4)),
        ],
        {},
    ),
    "a stage is killed": ([*there(), *killed(START)], {}),
    "it is back, and its group resumes": (
        [
            *([*there(), *killed(START + 1), back(START + 2)]),
            membership_event(START + 3, pb.RESUMED, slot="home.1", replica="home", incarnation=2, round=1, step=1),
            inner_step(START + 4, "home.1", "home", 1, 1, loss=5.0),
        ],
        {},
    ),
    "it is back, and rounds close without replicas": (
        [
            *([*there(), *killed(START + 5), back(START + 20), closed_without(START + 8, 1, "home")]),
            *(evaluation(START + 9, "dc", 1, 4.5), closed_without(START + 30, 2, "dc", late=True)),
            membership_event(START + 31, pb.INCARNATION_OVER, **HOME_0_GONE),
        ],
        {},
    ),
    "it is back too late for a round": (
        [
            *there(),
            *killed(START + 1),
            back(START + 2),
            round_closed(START + 8, 1),
            closed_without(START + 9, 2, "home"),
        ],
        {},
    ),
    "rejected": (_rejected(), {}),
    "members of other hosts": (
        [
            *([*there(), membership_event(START, pb.INCARNATION_OVER, incarnation=1, cause="nothing", **DC)]),
            *(joined(START, "dc", 2), membership_event(START, pb.SILENT, incarnation=2, cause="no heartbeat", **DC)),
            membership_event(START, pb.INCARNATION_OVER, slot="home.1", cause=LEFT, has_left=True),
        ],
        {},
    ),
    "pauses and repairs": (
        [
            *([*there(), membership_event(START, pb.PAUSED, round=2, cause="0 of 2 replicas are present")]),
            *(membership_event(START + 12, pb.WENT_ON, round=2), made_up_round(1).__next__()),
            membership_event(START, pb.HEALED, slot="dc", round=1, cause="held a norm that differs from the log"),
            membership_event(START, pb.GIVEN_UP, slot="home.1", cause=f"{KILLED}; {LEFT}"),
            membership_event(START, pb.INJECTED, slot="dc", cause="freeze of dc for 20 s (training)"),
            membership_event(START + 20, pb.PAUSED, round=2, cause="1 of 2 replicas are present"),
        ],
        {},
    ),
    "late, restored": (_late(), {"outer": {"rounds": 2, "returned": 1.0}}),
    "late, half restored": (_late(), {"outer": {"rounds": 2, "returned": 0.5}}),
    "late, discarded": (_late(), {"outer": {"rounds": 2, "returned": 0.0}}),
    "late, kept": (
        _late(membership_event(START, pb.LEFT_OUT, replica="dc", round=1)),
        {"outer": {"rounds": 2, "keep_local": True}},
    ),
    "audited": (_audited(True), {}),
    "audited, with differences": (_audited(False), {}),
    "seen by its hosts": (_elsewhere(), {}),
    "goes on with its members": ([joined(START, "dc", 5), begun(START, 3)], {}),
    "killed and paused": (_killed_and_paused(), {}),
    "lined": (_lined(), LINED),
    "timed": (
        [
            *([begun(START - 3, 0), *made_up_reports()]),
            _times("home.0", compute=3.0, wait=1.0, outer=2.0, blocked=0.5),
            *(_times("home.1", compute=1.0, wait=5.0, outer=2.0), _times("home.1", compute=1.0, wait=5.0, outer=2.0)),
        ],
        {},
    ),
    "ended by members": ([*_timed_rounds()], {}),
    "waits are told apart": (
        [
            *([*there(), _times("home.1", compute=4.0, outer=2.0, blocked=1.0, wait=2.0)]),
            _times("home.1", 2, compute=4.0, outer=2.0, blocked=1.0, wait=4.0, wait_previous=4.0, wait_next=0.0),
        ],
        {},
    ),
    "failed": (
        [
            *([*made_up_round(1), evaluation(START + 15, "dc", 2, 3.0)]),
            failure(START + 16, "home.1", "lost its link", consequence=True),
            *(failure(START + 16, "home.0", "out of memory"), failure(START + 17, "exchange", "a later one")),
        ],
        {},
    ),
    "refused": ([_refused("home.0", Kind.STRANGER, 100), _refused("home.0", "made up", 0)], {}),
    "restarted": (
        [
            *([*there(), *killed(START + 1)]),
            *[membership_event(START + 2, pb.RESTARTED, slot=one) for one in ("home.1", "exchange", "made up")],
            membership_event(START + 3, pb.GIVEN_UP, slot="home.1", cause=KILLED),
        ],
        {},
    ),
    "computing": (_doing(dc=pb.WAITING_FOR_ROUND, home_0=pb.FORWARD, home_1=pb.WAITING_FOR_PREVIOUS), {}),
    "outer round": (_doing(dc=99, home_0=pb.WAITING_FOR_NEXT, home_1=pb.OUTER_ROUND), {}),
    "nothing": ([], {}),
    "a round without steps": ([round_closed(START, 1)], {}),
    "paused": ([*there(), STEP, membership_event(START + 1, pb.PAUSED, round=1, cause="1 of 2 replicas is there")], {}),
    "waits for its disk": ([*there(), STEP, _stored()], {}),
}


ENDS = ("whole", "rounds of time", "diverged", "audited", "audited, with differences", "killed and paused")
"""Runs of which the end is kept."""
LIVE = ("timed", "a stage is killed", "pauses and repairs")
"""Runs of which the live view is kept."""
PARTS: dict[str, Sequence[str]] = {
    "whole": ("summary", "metrics", "history", "frame", "curves"),
    "rounds of time": ("summary", "curves"),
    "ended by members": ("curves",),
    "killed and paused": ("summary",),
    "lined": ("summary",),
    "timed": ("metrics", "history"),
    "waits are told apart": ("metrics", "frame"),
    "failed": ("summary", "frame"),
    "refused": ("summary", "metrics"),
    "goes on with its members": ("summary",),
    "restarted": ("metrics",),
    "seen by its hosts": ("metrics of home.0",),
    "a stage is killed": ("history", "frame"),
    "it is back, and rounds close without replicas": ("history", "frame"),
    "it is back, and its group resumes": ("history", "frame"),
    "members of other hosts": ("history",),
    **dict.fromkeys(("computing", "outer round", "nothing", "a round without steps", "paused"), ("frame",)),
    "waits for its disk": ("frame",),
}
"""Numbers that are kept of a run."""


def _state(run: str) -> RunState:
    reports, changes = RUNS[run]
    state = RunState(made_up_spec(**changes))
    for report in reports:
        state.apply(report)
    return state


def _text(renderable: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue().splitlines()


def _end(run: str) -> list[str]:
    out = io.StringIO()
    print_result(Console(file=out, width=160), summary_of(_state(run)), Path("/runs/made-up"))
    return [line.strip() for line in out.getvalue().splitlines() if line.strip(" ─")]


def _shown(run: str) -> dict[str, list[str]]:
    """Return all texts. The clock of the display is that of the reports.

    Lines of the end are those that differ from the end of a whole run.
    """
    reports, changes = RUNS[run]
    state, out, now = RunState(made_up_spec(**changes)), io.StringIO(), START
    events, hosts = list[str](), {"dc": list[str](), "home.0": list[str](), "home.1": list[str]()}
    followers = [OwnRoundLines(state.spec, [name], told.append) for name, told in hosts.items()]
    with LiveDisplay(state, Console(file=out, width=100), lambda: now, START - 22) as display:
        for report in reports:
            now = report.time
            if state.apply(report) and (news := state.news) and news.is_line:
                events.append(words_of(news, state.spec))
            display.refresh()
            for host in followers:
                host.on_report(report)
    end = [line for line in _end(run) if run == "whole" or line not in _end("whole")] if run in ENDS else []
    live = _text(live_view(state, now + 1, height=40), 100) if run in LIVE else []
    found = {"lines": out.getvalue().splitlines(), "events": events, "live": live, "end": end}
    found |= {f"host of {name}": told for name, told in hosts.items()}
    return {part: text for part, text in found.items() if text}


def _numbers(run: str, part: str) -> Any:
    """Return a part of what a run is in numbers. Its settings, which every new key changes, are left out."""
    reports, changes = RUNS[run]
    if part == "summary":
        return summary_of(_state(run))
    if part.startswith("metrics"):
        found = collected(_state(run), *part.split()[2:])
        return {" ".join(key): value for key, value in found.items() if key[0] != "build_info"}
    if part == "curves":
        state, curves = RunState(made_up_spec(**changes)), defaultdict[str, list[list[Any]]](list)
        sink = Mock(write=lambda one: curves[f"{one.tag} by {one.axis}"].append([one.step, one.value]))
        scalars = Scalars(state, [sink])
        for report in reports:
            state.apply(report)
            scalars.on_report(report)
        scalars.close()
        return curves
    view = view_of(reports, **changes)
    if part == "history":
        return {key: value for key, value in view.history("x").items() if key != "settings"}
    return frame(view)


@pytest.mark.parametrize("width", [80, 100])
def test_the_live_view_fits_the_terminal(width: int) -> None:
    for run in RUNS:
        view = _text(live_view(_state(run), START + 25, height=40), width)
        assert max(map(len, view)) <= width and len(view) <= 40, run


def test_what_is_shown_of_runs() -> None:
    found = {f"{run}: {part}": text for run in RUNS for part, text in _shown(run).items()}
    agree(SHOWN, found)


def test_numbers_of_runs() -> None:
    found = {f"{run}: {part}": _numbers(run, part) for run, parts in PARTS.items() for part in parts}
    agree(NUMBERS, found)
