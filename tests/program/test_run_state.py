"""A run's state, from made-up reports: steps count once, and old rounds keep only their losses."""

from __future__ import annotations

from typing import Any

import pytest
from made_up_run import (
    KILLED,
    ROUND_SECONDS,
    ROUNDS,
    START,
    STEPS,
    TIMED,
    back,
    begun,
    closed_without,
    evaluation,
    finished,
    inner_step,
    joined,
    killed,
    link_use,
    made_up_reports,
    made_up_round,
    made_up_spec,
    membership_event,
    round_closed,
    so_far,
    state_of,
    there,
    timed_reports,
    verified,
)

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import format_share
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import LATE, LinkUse, Report
from hetero_pp.program.report.lines import round_line, trouble_lines
from hetero_pp.program.report.recorder import line_of
from hetero_pp.program.report.state import STILL_TOLD, ReplicaState, RunState, Traffic
from hetero_pp.program.report.summary import summary_of
from hetero_pp.simulator.costs import step_flops


@pytest.fixture(scope="module")
def whole() -> RunState:
    return state_of(made_up_reports())


def test_every_step_counts_once() -> None:
    # Parts of an inner step merge in any order.
    parts = [
        inner_step(START, "home.0", "home", 2, 1, gradient_norm=2.5, learning_rate=0.1, tokens=100),
        inner_step(START, "home.1", "home", 2, 1, loss=3.0),
    ]
    for order in (parts, parts[::-1]):
        replica = state_of(order).replicas["home"]
        step = replica.rounds[2][1]
        assert (step.loss, step.tokens) == (3.0, 100)
        assert (replica.steps_done, replica.loss, replica.tokens) == (4, 3.0, 100)

    # A part told twice counts once.
    part = inner_step(START, "dc", "dc", 1, 0, loss=3.0, tokens=100)
    assert state_of([part, part]).replicas["dc"].tokens == 100

    # A step whose report was lost counts. A killed member loses reports of a round that it trained ahead, and
    # resumes from a state after that round.
    replica = ReplicaState("dc", "datacenter", 3)
    replica.apply(START, inner_step(START, "dc", "dc", 1, 0, loss=3.0, tokens=10).inner_step)
    replica.keep(1, 3, 10)
    assert (replica.tokens, replica.steps(1), replica.round_loss(1)) == (30, 3, 3.0)
    replica.apply(START + 1, inner_step(START, "dc", "dc", 1, 2, loss=2.0, tokens=10).inner_step)  # it was only late
    assert (replica.tokens, replica.round_loss(1)) == (30, 2.5)


@pytest.mark.parametrize("inner_steps", [3, None])
def test_of_rounds_long_over_only_the_losses_are_kept(inner_steps: int | None) -> None:
    """The display is unchanged, and per step only the losses are kept."""
    rounds, kept = 30, ReplicaState("dc", "datacenter", inner_steps)
    whole = ReplicaState("dc", "datacenter", inner_steps)
    for round_ in range(1, rounds + 1):
        for step in range(3):
            told = inner_step(START + round_, "dc", "dc", round_, step, loss=round_ + step / 4, tokens=10).inner_step
            for replica in (kept, whole):
                replica.apply(START + round_ + step, told)
        kept.keep(round_, 3, 10)
        kept.settle(round_)
    assert sorted(kept.rounds) == list(range(rounds - STILL_TOLD + 1, rounds + 1))
    assert list(kept.training_losses()) == list(whole.training_losses())
    for round_ in range(1, rounds + 2):
        assert list(kept.losses(round_)) == whole.losses(round_)
        assert (kept.steps(round_), kept.round_loss(round_)) == (whole.steps(round_), whole.round_loss(round_))
    assert (kept.last_round, kept.steps_done, kept.tokens) == (whole.last_round, 3 * rounds, 30 * rounds)
    assert kept.index(rounds, 2) == whole.index(rounds, 2) == 3 * rounds - 1
    kept.apply(START, inner_step(START, "dc", "dc", 1, 0, loss=9.0, tokens=10).inner_step)  # reported again
    assert (kept.tokens, kept.round_loss(1), kept.steps_done) == (30 * rounds, whole.round_loss(1), 3 * rounds)
    assert kept.trained == whole.trained


def test_a_link_keeps_the_bytes_of_every_round() -> None:
    """The display of a link and of a line: a repeated report of a round replaces its bytes."""
    rounds, direction, line = 30, Traffic(1e6), Traffic(1e6)
    for round_ in (rounds, *range(rounds)):
        if round_ != 7:  # no report names this round
            for count in (50, 100 + round_):
                use = LinkUse(round=round_, wire_bytes=count, payload_bytes=count - 10, busy_seconds=0.5)
                direction.apply(START + round_, use, START)
    assert direction.wire_bytes == sum(100 + round_ for round_ in range(rounds + 1) if round_ != 7)
    assert direction.payload_bytes == direction.wire_bytes - 10 * rounds
    assert direction.busy_seconds == 0.5 * (rounds - 1)
    told = [(use.wire_bytes, use.payload_bytes) for use in map(direction.of_round, range(rounds + 2))]
    assert told == [(0, 0) if at in (7, rounds + 1) else (100 + at, 90 + at) for at in range(rounds + 2)]
    line.carried = [direction]
    assert line.busy_share(1.0) == pytest.approx(8 * (direction.wire_bytes - 100) / 1e6)


def test_steps_of_rounds_that_are_time() -> None:
    # Steps of rounds that are time are numbered on.
    state = RunState(made_up_spec(**TIMED))
    for report in timed_reports():
        state.apply(report)
    dc, home = state.replicas["dc"], state.replicas["home"]
    assert [dc.index(1, 2), dc.index(2, 0), home.index(2, 1)] == [2, 3, 2]
    assert (dc.steps_done, home.steps_done) == (8, 3)
    assert (dc.tokens, home.tokens) == (800, 300)
    assert (home.round_loss(2), home.latest) == (5.5, (2, 1))
    assert [replica["steps"] for replica in summary_of(state)["replicas"]] == [[3, 5], [1, 2]]

    # Steps of a try that was given up are left out. A group that started the round again took fewer steps than
    # before.
    state = RunState(made_up_spec(**TIMED))
    for report in timed_reports():
        if not report.HasField("round_closed"):
            state.apply(report)
    closed = round_closed(START + 20, 2)
    for entry in closed.round_closed.contributions:
        entry.steps = 3 if entry.replica == "dc" else 2
    state.apply(closed)
    dc, home = state.replicas["dc"], state.replicas["home"]
    assert (dc.steps_done, dc.tokens, home.steps_done, home.tokens) == (6, 600, 3, 300)
    assert [replica["steps"] for replica in summary_of(state)["replicas"]] == [[3, 3], [1, 2]]


def test_pauses_count_in_no_time(whole: RunState) -> None:
    """The run stopped after round 1, and continued 1000 seconds later.

    In between, it was resumed once and did nothing.
    """
    reports = [report for report in made_up_reports() if report.time <= START + ROUND_SECONDS]
    tries = [joined(START + 1000, "dc"), begun(START + 1001, 1), joined(START + 1500, "dc"), begun(START + 1501, 1)]
    again = evaluation(START + 1505, "dc", 1, 4.5)  # training begins here
    later = [*made_up_round(2), *(finished(START + 20, member) for member in ("dc", "home.0", "home.1"))]
    for report in later:
        report.time += 1505 - ROUND_SECONDS
    state = state_of([tries[0], *reports, *tries[1:], again])
    assert (state.elapsed(), state.elapsed(START + 1507)) == (12.0, 14.0)
    for report in later:
        state.apply(report)
    assert [state.round_seconds(round_) for round_ in (1, 2)] == [8.0, 10.0]
    assert (state.elapsed(), state.training_seconds()) == (22.0, 20.0)
    assert state.seconds_left(START + 1600) == 0
    assert summary_of(state)["links"] == summary_of(whole)["links"]


def test_counters_of_a_run_of_which_the_beginning_is_missing(whole: RunState) -> None:
    """They are those of a reader of all reports, also if reports of the same rounds come in between."""
    now = START + 40
    told = so_far(now, **_fields_of(whole.tally.told(now)))
    rest = [one for one in made_up_reports() if one.time > START + ROUND_SECONDS]
    state = state_of([told, *rest, told])
    assert state.rounds == whole.rounds
    assert state.tally.credits == whole.tally.credits and state.tally.participation == 1.0
    assert (state.elapsed(now), state.training_seconds(now)) == (whole.elapsed(now), whole.training_seconds(now))
    assert {name: one.wire_bytes for name, one in state.links.items()} == {
        name: one.wire_bytes for name, one in whole.links.items()
    }
    assert state.refusals.total() == whole.refusals.total()


def _fields_of(told: pb.SoFar) -> dict[str, Any]:
    return {field.name: value for field, value in told.ListFields()}


def test_what_no_run_can_have_changes_nothing() -> None:
    # Reports that name nothing of this run change nothing.
    strangers = [
        inner_step(START, "x", "x", 1, 0, loss=1.0),
        inner_step(START, "dc", "dc", 0, 0, loss=1.0),
        inner_step(START, "dc", "dc", ROUNDS + 1, 0, loss=1.0),
        inner_step(START, "dc", "dc", 1, STEPS, loss=1.0),
        evaluation(START, "x", 1, 1.0),
        link_use(START, "x", "forward", 1, 1),
        link_use(START, "home.0-1", "sideways", 1, 1),
        verified(START, "x", 1, b"x"),
        Report(time=START, member="x"),
    ]
    assert summary_of(state_of(strangers)) == summary_of(state_of([Report(time=START, member="x")]))

    # Rounds that no run can have are not taken in. They would take memory and time without bound.
    state = state_of(made_up_reports())
    before = summary_of(state)
    far, many = round_closed(START, 5000), round_closed(START, ROUNDS)
    many.round_closed.contributions[0].steps = STEPS + 1
    late = Report(time=START, member="exchange")
    late.membership_event.CopyFrom(pb.MembershipEvent(what=LATE, replica="dc", round=5000))
    for report in (far, many, round_closed(START, 0), verified(START, "dc", 5000, b"x"), late):
        assert not state.apply(report)
    assert summary_of(state) == before


# ---- members that leave and return ----


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
