"""The schedule: rules for every list of events, that the lists fit together, and the time they take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_pp.pipeline.schedule import Action, ScheduleEvent, forward_only, one_forward_one_backward

STAGES = st.integers(1, 6)
MICRO_BATCHES = st.integers(1, 12)
EXTRA = st.integers(0, 3)
SENDS = {Action.SEND_ACTIVATION: 1, Action.SEND_GRADIENT: -1}
RECEIVES = {Action.RECEIVE_ACTIVATION: -1, Action.RECEIVE_GRADIENT: 1}


def _group(stages: int, micro_batches: int, extra: int) -> list[list[ScheduleEvent]]:
    return [one_forward_one_backward(stage, stages, micro_batches, extra) for stage in range(stages)]


def _of(events: list[ScheduleEvent], action: Action) -> list[int]:
    return [event.micro_batch for event in events if event.action is action]


@settings(deadline=None)
@given(STAGES, MICRO_BATCHES, EXTRA)
def test_every_micro_batch_goes_forward_and_back_once_in_order(stages: int, micro_batches: int, extra: int) -> None:
    for stage, events in enumerate(_group(stages, micro_batches, extra)):
        assert _of(events, Action.FORWARD) == list(range(micro_batches))
        assert _of(events, Action.BACKWARD) == list(range(micro_batches))
        most, in_flight = min(micro_batches, (stages - 1 - stage) * (1 + extra) + 1), 0
        for event in events:
            in_flight += {Action.FORWARD: 1, Action.BACKWARD: -1}.get(event.action, 0)
            assert 0 <= in_flight <= most  # never a backward before its forward
        forwards_first = events.index(ScheduleEvent(Action.BACKWARD, 0))
        assert len(_of(events[:forwards_first], Action.FORWARD)) == most  # the bound is reached


@settings(deadline=None)
@given(STAGES, MICRO_BATCHES, EXTRA)
def test_messages_surround_the_compute_that_needs_or_makes_them(stages: int, micro_batches: int, extra: int) -> None:
    for stage, events in enumerate(_group(stages, micro_batches, extra)):
        expected: list[ScheduleEvent] = []
        for event in events:
            if event.action not in (Action.FORWARD, Action.BACKWARD):
                continue
            forward, index = event.action is Action.FORWARD, event.micro_batch
            source, target = (stage > 0, stage < stages - 1) if forward else (stage < stages - 1, stage > 0)
            receive, send = (
                (Action.RECEIVE_ACTIVATION, Action.SEND_ACTIVATION)
                if forward
                else (Action.RECEIVE_GRADIENT, Action.SEND_GRADIENT)
            )
            expected += [ScheduleEvent(receive, index)] * source + [event] + [ScheduleEvent(send, index)] * target
        assert events == expected


@settings(deadline=None)
@given(STAGES, MICRO_BATCHES, EXTRA)
def test_no_order_of_execution_deadlocks(stages: int, micro_batches: int, extra: int) -> None:
    _simulate(_group(stages, micro_batches, extra), transfer=0.0)


@settings(deadline=None)
@given(STAGES, MICRO_BATCHES)
def test_without_extras_it_is_the_textbook(stages: int, micro_batches: int) -> None:
    """Narayanan et al. 2021: p - s - 1 warm-up forwards, then one forward and one backward in turn, then the rest."""
    for stage, events in enumerate(_group(stages, micro_batches, 0)):
        warm_up = min(micro_batches, stages - stage - 1)
        expected = "F" * warm_up + "FB" * (micro_batches - warm_up) + "B" * warm_up
        compute = {Action.FORWARD: "F", Action.BACKWARD: "B"}
        assert "".join(compute.get(event.action, "") for event in events) == expected


@settings(deadline=None)
@given(STAGES, MICRO_BATCHES)
def test_an_evaluation_only_goes_forward(stages: int, micro_batches: int) -> None:
    group = [forward_only(stage, stages, micro_batches) for stage in range(stages)]
    for events in group:
        assert _of(events, Action.FORWARD) == list(range(micro_batches))
        assert not any(event.action in (Action.BACKWARD, Action.SEND_GRADIENT) for event in events)
    _simulate(group, transfer=0.0)


@dataclass
class _Clock:
    """The position of a stage in its list of events, and the time at which it gets there."""

    position: int = 0
    time: float = 0.0


def _simulate(group: list[list[ScheduleEvent]], transfer: float, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the time of all stages. Links are FIFO, carry one message at a time and hold any number."""
    clocks = [_Clock() for _ in group]
    links: dict[tuple[int, int], deque[tuple[int, float]]] = {}
    free: dict[tuple[int, int], float] = {}
    costs = {Action.FORWARD: forward, Action.BACKWARD: backward}
    moved = True
    while moved:
        moved = False
        for stage, (clock, events) in enumerate(zip(clocks, group, strict=True)):
            while clock.position < len(events):
                event = events[clock.position]
                if event.action in SENDS:
                    link = (stage, stage + SENDS[event.action])
                    free[link] = max(free.get(link, 0.0), clock.time) + transfer
                    links.setdefault(link, deque()).append((event.micro_batch, free[link]))
                elif event.action in RECEIVES:
                    queue = links.get((stage + RECEIVES[event.action], stage))
                    if not queue:
                        break
                    index, arrived = queue.popleft()
                    assert index == event.micro_batch
                    clock.time = max(clock.time, arrived)
                else:
                    clock.time += costs[event.action]
                clock.position += 1
                moved = True
    assert [clock.position for clock in clocks] == [len(events) for events in group], "deadlock"
    assert not any(links.values()), "a message nobody received"
    return max(clock.time for clock in clocks)


@pytest.mark.parametrize(
    ("extra", "transfer", "utilization"), [(0, 0.0, 64 / 67), (1, 0.0, 64 / 67), (0, 0.3, 0.831), (1, 0.3, 0.947)]
)
def test_utilization_is_what_the_design_says(extra: int, transfer: float, utilization: float) -> None:
    """S = 4 and 64 micro-batches. A backward takes as long as two forwards."""
    time = _simulate(_group(4, 64, extra), transfer)
    assert 64 * 3.0 / time == pytest.approx(utilization, abs=0.01 if transfer else 1e-9)
