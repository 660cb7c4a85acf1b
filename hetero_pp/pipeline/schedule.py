"""1F1B schedule as a pure list of events: the stage workers run it, the simulator times it.

In the textbook (Narayanan et al. 2021, figure 4), r + 1 forwards precede the first backward of a stage with r hops to
the last one. That cannot hide a link: a message to the last stage and back takes longer than the
stages' compute. `extra_in_flight` more micro-batches per remaining hop fill that time, at the price of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """Action of a stage on one micro-batch. Sends return at once and run beside the compute."""

    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"


@dataclass(frozen=True)
class ScheduleEvent:
    action: Action
    micro_batch: int


def one_forward_one_backward(
    stage: int, stages: int, micro_batches: int, extra_in_flight: int = 1
) -> list[ScheduleEvent]:
    """Return the events of one inner step on one stage, in order.

    Every stage ends its last backward before it sends that gradient. So the squared gradient norm, which travels with
    the last message, is complete.
    """
    remaining = stages - 1 - stage
    warm_up = min(micro_batches, remaining * (1 + extra_in_flight))
    events: list[ScheduleEvent] = []
    for index in range(warm_up):
        events += forward_events(stage, stages, index)
    for index in range(warm_up, micro_batches):
        events += forward_events(stage, stages, index)
        events += _backward_events(stage, stages, index - warm_up)
    for index in range(micro_batches - warm_up, micro_batches):
        events += _backward_events(stage, stages, index)
    return events


def forward_only(stage: int, stages: int, micro_batches: int) -> list[ScheduleEvent]:
    """Return the events of an evaluation on one stage."""
    return [event for index in range(micro_batches) for event in forward_events(stage, stages, index)]


def forward_events(stage: int, stages: int, index: int) -> list[ScheduleEvent]:
    """Receive, compute and send one micro-batch's activation.

    The first stage receives nothing, the last sends nothing.
    """
    received = [Action.RECEIVE_ACTIVATION] if stage > 0 else []
    sent = [Action.SEND_ACTIVATION] if stage < stages - 1 else []
    return [ScheduleEvent(action, index) for action in (*received, Action.FORWARD, *sent)]


def _backward_events(stage: int, stages: int, index: int) -> list[ScheduleEvent]:
    received = [Action.RECEIVE_GRADIENT] if stage < stages - 1 else []
    sent = [Action.SEND_GRADIENT] if stage > 0 else []
    return [ScheduleEvent(action, index) for action in (*received, Action.BACKWARD, *sent)]
