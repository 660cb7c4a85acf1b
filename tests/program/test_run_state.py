"""A run's state and its summary, from made-up reports. Other tests of this folder use the same reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import LATE, LinkUse, Report
from hetero_pp.program.report.state import STILL_TOLD, DirectionState, LineWay, ReplicaState, RunState
from hetero_pp.program.report.summary import summary_of

ROUNDS, STEPS = 2, 2
START = 1000.0
ROUND_SECONDS = 10.0


def made_up_spec(**changes: Any) -> RunSpec:
    """Return a run of one datacenter and a group of two stages.

    The group's link has 8 Mbit/s forward and 4 Mbit/s backward.
    """
    settings = {
        "name": "made-up",
        "inner": {"steps": STEPS},
        "outer": {"rounds": ROUNDS},
        "links": {"home": {"bandwidth": "8 Mbit/s", "backward": {"bandwidth": "4 Mbit/s"}}},
        "replicas": [
            {"name": "dc", "kind": "datacenter"},
            {"name": "home", "kind": "participants", "stages": 2, "link": "home", "boundary": {"rank": 8}},
        ],
    }
    return RunSpec(RunConfig.model_validate(settings | changes), 256)


def inner_step(time: float, member: str, replica: str, round_: int, step: int, **values: Any) -> Report:
    return Report(time=time, member=member, inner_step=pb.InnerStep(replica=replica, round=round_, step=step, **values))


def evaluation(time: float, replica: str, round_: int, loss: float) -> Report:
    return Report(time=time, member=replica, evaluation=pb.Evaluation(replica=replica, round=round_, loss=loss))


def link_use(time: float, link: str, direction: str, round_: int, payload: int, busy: float = 0.0) -> Report:
    """Return a report of a link's use. It has ten wire bytes more than payload bytes."""
    sizes = {"payload_bytes": payload, "wire_bytes": payload + 10}
    use = LinkUse(link=link, direction=direction, round=round_, busy_seconds=busy, **sizes)
    return Report(time=time, member="whoever", link_use=use)


def round_closed(time: float, round_: int) -> Report:
    """Return a record in which each replica contributes 500 values in 1000 bytes, in two blobs."""
    blobs = [pb.BlobEntry(block=block, size=500, kept_values=250) for block in ("layers.0", "norm")]
    sent = [pb.ContributionEntry(replica=name, weight=1, digest=b"\x01\x02", blobs=blobs) for name in ("dc", "home")]
    return Report(time=time, member="exchange", round_closed=pb.RoundRecord(round=round_, contributions=sent))


def verified(time: float, replica: str, round_: int, sha256: bytes) -> Report:
    hashed = pb.RoundVerified(replica=replica, round=round_, parameters_sha256=sha256)
    return Report(time=time, member="exchange", round_verified=hashed)


def failure(time: float, member: str, cause: str, consequence: bool = False) -> Report:
    return Report(time=time, member=member, failure=pb.Failure(cause=cause, consequence=consequence))


def joined(time: float, member: str) -> Report:
    return Report(time=time, member=member, joined=pb.Joined())


def begun(time: float, last_round: int) -> Report:
    return Report(time=time, member="exchange", begun=pb.Begun(last_round=last_round))


def member_round(member: str, round_: int, wait: float = 2.0) -> Report:
    parts: dict[str, Any] = {
        "compute_seconds": 5.0,
        "wait_seconds": wait,
        "outer_seconds": 2.5,
        "evaluation_seconds": 0.5,
    }
    return Report(time=START + 10, member=member, member_round=pb.MemberRound(round=round_, **parts))


def waiting(time: float, awaited: pb.Awaited, *missing: str, seconds: float = 0.0) -> Report:
    lacking = [pb.Missing(member=member) for member in missing]
    told = pb.Waiting(awaited=awaited, round=2, seconds=seconds, missing=lacking)
    return Report(time=time, member="exchange", waiting=told)


def so_far(time: float, **values: Any) -> Report:
    """Return the counters of a run, which a host that joins is told behind what holds."""
    return Report(time=time, member="exchange", so_far=pb.SoFar(**values))


def finished(time: float, member: str) -> Report:
    return Report(time=time, member=member, finished=pb.Nothing())


def made_up_round(round_: int) -> Iterator[Report]:
    """Yield the reports of a round of ten seconds. Losses fall by one per round."""
    start, loss = START + (round_ - 1) * ROUND_SECONDS, 6.0 - round_
    for step in range(STEPS):
        time = start + step
        yield inner_step(time, "dc", "dc", round_, step, loss=loss, gradient_norm=1.5, learning_rate=0.1, tokens=100)
        yield inner_step(time, "home.0", "home", round_, step, gradient_norm=2.5, learning_rate=0.1, tokens=100)
        yield inner_step(time, "home.1", "home", round_, step, loss=loss + step)
    yield link_use(start + 2, "home.0-1", "forward", round_, 1000, busy=1.0)
    yield round_closed(start + 8, round_)
    for replica in ("dc", "home"):
        yield verified(start + 8.5, replica, round_, bytes([round_]) * 32)
    yield evaluation(start + 9, "dc", round_, loss - 0.5)
    yield evaluation(start + 9, "home", round_, loss - 0.3)
    yield link_use(start + 10, "home.0-1", "forward", round_, 4000, busy=5.0)
    yield link_use(start + 10, "home.0-1", "backward", round_, 2000, busy=2.5)
    yield link_use(start + 10, "dc-exchange", "forward", round_, 1000)


def made_up_reports() -> list[Report]:
    """Return the reports of a run of twenty seconds, after two seconds for its start."""
    reports = [joined(START - 2, member) for member in ("dc", "home.0", "home.1")]
    reports += [evaluation(START - 1, "dc", 0, 6.0), evaluation(START - 1, "home", 0, 6.2)]
    reports.append(link_use(START - 1, "dc-exchange", "backward", 0, 50_000))
    for round_ in range(1, ROUNDS + 1):
        reports += made_up_round(round_)
    end = START + ROUNDS * ROUND_SECONDS
    return [*reports, *(finished(end, member) for member in ("dc", "home.0", "home.1"))]


def state_of(reports: list[Report], spec: RunSpec | None = None) -> RunState:
    state = RunState(made_up_spec() if spec is None else spec)
    for report in reports:
        state.apply(report)
    return state


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
    rounds, direction, line = 30, DirectionState(1e6), LineWay(1e6)
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


def timed_reports() -> Iterator[Report]:
    """Yield reports of rounds that last 8 s.

    The datacenter takes 3 and 5 steps, the group takes 1 and 2.
    """
    for round_, (fast, slow) in enumerate(((3, 1), (5, 2)), start=1):
        start = START + (round_ - 1) * ROUND_SECONDS
        for step in range(fast):
            yield inner_step(start + step, "dc", "dc", round_, step, loss=6.0 - round_, tokens=100)
        for step in range(slow):
            yield inner_step(start + 3 * step, "home.0", "home", round_, step, tokens=100)
            yield inner_step(start + 3 * step, "home.1", "home", round_, step, loss=7.0 - round_ + step)
        yield evaluation(start + 9, "dc", round_, 5.0 - round_)
        yield evaluation(start + 9, "home", round_, 5.0 - round_)
        yield round_closed(start + 8, round_)


TIMED = {"inner": {"seconds": 8}}


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
