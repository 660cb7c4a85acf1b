"""One group, timed by an event queue. It is slow and simple, and shares only the schedule with the recurrence."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetero_pp.pipeline.schedule import Action, one_forward_one_backward

Run = Iterator["float | _Queue"]
"""A stage, as an iterator. It yields seconds of computation, or a queue to receive from."""


class _Queue:
    """One direction of a link. A message waits for the previous one, and arrived messages wait for the receiver."""

    def __init__(self, seconds: float, latency: float) -> None:
        self.seconds, self.latency = seconds, latency
        self.free_at = 0.0
        self.arrived: deque[bool] = deque()
        self.waiting: Callable[[], None] | None = None


@dataclass(frozen=True)
class Group:
    """A group of S stages: seconds per stage, and (seconds, latency) of each hop and direction."""

    micro_batches: int
    extra_in_flight: int
    forward: list[float]
    backward: list[float]
    update: list[float]
    activations: list[tuple[float, float]]
    gradients: list[tuple[float, float]]


def simulate(group: Group, steps: int) -> tuple[list[float], list[float]]:
    """Return the end of each stage, and the end of each step on the first stage."""
    stages = len(group.forward)
    down = [_Queue(*hop) for hop in group.activations]
    up = [_Queue(*hop) for hop in group.gradients]
    agenda: list[tuple[float, int, Callable[[], None]]] = []
    now = 0.0
    ends = [0.0] * stages
    step_ends: list[float] = []
    tickets = iter(range(1 << 40))

    def at(time: float, what: Callable[[], None]) -> None:
        heapq.heappush(agenda, (time, next(tickets), what))

    def send(queue: _Queue, seconds: float) -> None:
        queue.free_at = max(queue.free_at, now) + seconds
        at(queue.free_at + queue.latency, lambda: arrive(queue))

    def arrive(queue: _Queue) -> None:
        queue.arrived.append(True)
        if queue.waiting is not None:
            waiting, queue.waiting = queue.waiting, None
            waiting()

    def resume(stage: int, run: Run) -> None:
        wanted = next(run, None)
        if wanted is None:
            ends[stage] = now
        elif isinstance(wanted, _Queue):
            take(stage, run, wanted)
        else:
            at(now + wanted, lambda: resume(stage, run))

    def take(stage: int, run: Run, queue: _Queue) -> None:
        if queue.arrived:
            queue.arrived.popleft()
            resume(stage, run)
        else:
            queue.waiting = lambda: take(stage, run, queue)

    def life(stage: int) -> Run:
        for step in range(steps):
            is_first_activation = True
            for event in one_forward_one_backward(stage, stages, group.micro_batches, group.extra_in_flight):
                match event.action:
                    case Action.FORWARD:
                        yield group.forward[stage]
                    case Action.BACKWARD:
                        yield group.backward[stage]
                    case Action.SEND_ACTIVATION:
                        send(down[stage], down[stage].seconds)
                    case Action.SEND_GRADIENT:
                        send(up[stage - 1], up[stage - 1].seconds)
                    case Action.RECEIVE_ACTIVATION:
                        yield down[stage - 1]
                        if step > 0 and is_first_activation:
                            yield group.update[stage]
                        is_first_activation = False
                    case Action.RECEIVE_GRADIENT:
                        yield up[stage]
            if stage == 0:
                yield group.update[0]
                step_ends.append(now)
        if stage > 0:
            yield down[stage - 1]
            yield group.update[stage]
        if stage < stages - 1:
            send(down[stage], 0.0)

    for stage in range(stages):
        resume(stage, life(stage))
    while agenda:
        now, _, what = heapq.heappop(agenda)
        what()
    return ends, step_ends
