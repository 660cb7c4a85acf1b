"""Time of inner steps of groups whose machines have lines: an event simulation that treats bytes as a fluid.

All messages that pass a line at one time share it fairly. Rates are max-min fair over all lines, and no message exceeds
the bandwidth of its link. Rates change only when a message begins or ends, so everything between two events is linear
and the times are exact for the model. Simulated packets that take turns agree within 1 %
(tests/simulator/test_fluid.py).

Through a line, stages of a group wait for each other in an order that no schedule fixes: which of two messages arrives
first depends on all earlier times. So the recurrence on arrays of hetero_pp.simulator.pipeline does not apply.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hetero_pp.pipeline.schedule import Action, Event

INFINITY = float("inf")
ALMOST = 1e-9
"""Share of a message's bits that may be left through rounding."""

Stream = tuple[str, int]
"""("activation" or "gradient", hop)"""
OnFlow = Callable[[Stream, int, float, float], None]
"""(stream, micro-batch, time its first bit leaves, time its last bit has left)"""
OnCompute = Callable[[int, str, int, float, float], None]
"""(stage, what, micro-batch, start, end)"""


@dataclass(frozen=True)
class Path:
    """Path of one direction of a hop: its own limit, and the lines that other paths share."""

    bandwidth: float
    """Bits per second of the link itself; infinity if it has no limit."""
    lines: tuple[int, ...]
    latency: float
    jitter: float


@dataclass(frozen=True)
class Network:
    """All paths of a group, and the lines that they pass."""

    capacities: Sequence[float]
    """Bits per second of every line; each direction is a line of its own."""
    paths: Mapping[Stream, Path]


def fair_rates(streams: Sequence[Stream], network: Network) -> list[float]:
    """Return the bits per second of each stream, max-min fair.

    All rates grow evenly until a line or a link is full.
    """
    rates = dict.fromkeys(streams, 0.0)
    left = dict(enumerate(network.capacities))
    growing = set(streams)
    while growing:
        users = {line: sum(line in network.paths[one].lines for one in growing) for line in left}
        steps = [left[line] / count for line, count in users.items() if count]
        steps += [network.paths[one].bandwidth - rates[one] for one in growing]
        step = min(steps)
        if step == INFINITY:
            return [INFINITY if one in growing else rates[one] for one in streams]
        for one in growing:
            rates[one] += step
        for line, count in users.items():
            left[line] -= step * count
        full = {line for line, count in users.items() if count and left[line] <= 1e-12 * network.capacities[line]}
        growing = {
            one
            for one in growing
            if rates[one] < network.paths[one].bandwidth * (1 - 1e-12) and full.isdisjoint(network.paths[one].lines)
        }
    return [rates[one] for one in streams]


@dataclass
class _Flow:
    """Messages of one stream: the one in transit, and those that wait behind it."""

    waiting: deque[int] = field(default_factory=deque)
    left: float = 0.0
    began: float = 0.0
    last_arrival: float = 0.0


class Wires:
    """Messages in transit on all paths of a group, and their arrival times. Bits cross at fair rates."""

    def __init__(
        self,
        network: Network,
        bits: Mapping[Stream, float],
        random: np.random.Generator | None = None,
        on_flow: OnFlow | None = None,
    ) -> None:
        """Create empty wires. `bits` is the size of one message of each stream."""
        self._network = network
        self._bits = bits
        self._random = random
        self._on_flow = on_flow
        self._flows = {stream: _Flow() for stream in network.paths}
        self._active: tuple[Stream, ...] = ()
        self._rates_of: dict[tuple[Stream, ...], list[float]] = {(): []}
        self._now = 0.0

    def send(self, stream: Stream, micro_batch: int, now: float) -> None:
        """Queue a message of a stream at the time `now`, which `advance` must have reached."""
        flow = self._flows[stream]
        flow.waiting.append(micro_batch)
        if len(flow.waiting) == 1:
            self._begin(stream, now)

    def _begin(self, stream: Stream, now: float) -> None:
        flow = self._flows[stream]
        flow.left, flow.began = self._bits[stream], now
        self._active = tuple(one for one in self._flows if one == stream or one in self._active)

    def next_end(self) -> float:
        """Return the time when the next message has left, if no other is sent before."""
        rates = self._rates()
        return min(
            (
                self._now + (0.0 if rate == INFINITY else self._flows[one].left / rate)
                for one, rate in zip(self._active, rates, strict=True)
            ),
            default=INFINITY,
        )

    def advance(self, now: float) -> list[tuple[Stream, int, float]]:
        """Let bits cross until `now`, at most `next_end`; return the messages that have left, and their arrivals."""
        rates, ended = self._rates(), []
        for stream, rate in zip(self._active, rates, strict=True):
            flow = self._flows[stream]
            flow.left = 0.0 if rate == INFINITY else flow.left - rate * (now - self._now)
            if flow.left <= ALMOST * self._bits[stream]:
                ended.append(stream)
        self._now = now
        return [self._end(stream, now) for stream in ended]

    def _end(self, stream: Stream, now: float) -> tuple[Stream, int, float]:
        flow, path = self._flows[stream], self._network.paths[stream]
        micro_batch = flow.waiting.popleft()
        if self._on_flow is not None:
            self._on_flow(stream, micro_batch, flow.began, now)
        if flow.waiting:
            self._begin(stream, now)
        else:
            self._active = tuple(one for one in self._active if one != stream)
        arrival = now + path.latency
        if self._random is not None:
            arrival += path.jitter * float(self._random.random())
        flow.last_arrival = max(flow.last_arrival, arrival)  # no message overtakes another
        return stream, micro_batch, flow.last_arrival

    def _rates(self) -> list[float]:
        found = self._rates_of.get(self._active)
        if found is None:
            found = self._rates_of[self._active] = fair_rates(self._active, self._network)
        return found


@dataclass(frozen=True)
class Work:
    """Events of the stages, and the seconds of each computation."""

    programs: Sequence[Sequence[Event]]
    """Events of each stage in one step."""
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    updates_due: frozenset[int]
    """Stages that make an optimizer step once the first activation of the first step has arrived."""
    steps: int = 1
    """Number of times that the programs run.

    A stage that receives activations makes its optimizer step in the next one.
    """
    first: frozenset[int] = frozenset()
    """Stages that make an optimizer step at the end of each step."""


class Run:
    """Runs programs over wires, starting when each stage and each stream is free; records when they are free again."""

    def __init__(
        self,
        work: Work,
        wires: Wires,
        free: Sequence[float],
        busy_until: Mapping[Stream, float],
        on_compute: OnCompute | None = None,
    ) -> None:
        self.free = list(free)
        """Time when each stage has finished."""
        self.left = dict(busy_until)
        """Time when the last message of each stream has left.

        New messages queue behind those that were in transit before.
        """
        self._work, self._wires, self._on_compute = work, wires, on_compute
        self.step_ends: dict[int, list[float]] = {stage: [] for stage in work.first}
        """Times when these stages completed each optimizer step."""
        self._place = [0] * len(work.programs)
        self._steps_left = [work.steps] * len(work.programs)
        self._updates_due = set(work.updates_due)
        self._arrived: set[tuple[Stream, int]] = set()
        self._waiting: dict[tuple[Stream, int], int] = {}
        self._order = itertools.count()
        self._moments: list[tuple[float, int, Callable[[float], None]]] = []

    def to_the_end(self) -> None:
        """Run until every program is done and every message has arrived."""
        for stage, free in enumerate(self.free):
            self._at(free, partial(self._go_on, stage))
        while True:
            flow_ends = self._wires.next_end()
            if self._moments and self._moments[0][0] < flow_ends:
                now, _, happen = heapq.heappop(self._moments)
                self._flow(now)
                happen(now)
            elif flow_ends < INFINITY:
                self._flow(flow_ends)
            else:
                return

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._moments, (time, next(self._order), happen))

    def _flow(self, now: float) -> None:
        for stream, micro_batch, arrival in self._wires.advance(now):
            self.left[stream] = now
            self._at(arrival, partial(self._arrive, (stream, micro_batch)))

    def _arrive(self, key: tuple[Stream, int], now: float) -> None:
        self._arrived.add(key)
        if key in self._waiting:
            self._go_on(self._waiting.pop(key), now)

    def _go_on(self, stage: int, now: float) -> None:
        """Process events that take no time, until the next computation or a message that has not arrived."""
        program = self._work.programs[stage]
        while self._place[stage] < len(program):
            event = program[self._place[stage]]
            if event.action in _RECEIVED:
                kind, behind = _RECEIVED[event.action]
                key = ((kind, stage - behind), event.micro_batch)
                if key not in self._arrived:
                    self._waiting[key] = stage
                    return None
                self._arrived.discard(key)
            self._place[stage] += 1
            if event.action in _SENT:
                kind, behind = _SENT[event.action]
                self._send((kind, stage - behind), event.micro_batch, now)
            elif event.action is Action.FORWARD:
                return self._compute(stage, "forward", event.micro_batch, now, self._work.forward[stage])
            elif event.action is Action.BACKWARD:
                return self._compute(stage, "backward", event.micro_batch, now, self._work.backward[stage])
            elif event.action is Action.RECEIVE_ACTIVATION and stage in self._updates_due:
                self._updates_due.discard(stage)
                return self._compute(stage, "update", 0, now, self._work.update[stage])
        if stage in self._work.first:
            self._at(now + self._work.update[stage], partial(self._end_step, stage))
        else:
            self._end_step(stage, now)
        return None

    def _end_step(self, stage: int, now: float) -> None:
        self.free[stage] = now
        if stage in self.step_ends:
            self.step_ends[stage].append(now)
        self._steps_left[stage] -= 1
        if self._steps_left[stage]:
            self._place[stage] = 0
            self._updates_due |= {stage} - self._work.first
            self._go_on(stage, now)

    def _send(self, stream: Stream, micro_batch: int, now: float) -> None:
        if now >= self.left[stream]:
            self._wires.send(stream, micro_batch, now)
        else:  # an earlier message is still leaving
            self._at(self.left[stream], partial(self._wires.send, stream, micro_batch))

    def _compute(self, stage: int, what: str, micro_batch: int, now: float, seconds: float) -> None:
        if self._on_compute is not None:
            self._on_compute(stage, what, micro_batch, now, now + seconds)
        self._at(now + seconds, partial(self._go_on, stage))


_RECEIVED = {Action.RECEIVE_ACTIVATION: ("activation", 1), Action.RECEIVE_GRADIENT: ("gradient", 0)}
_SENT = {Action.SEND_ACTIVATION: ("activation", 0), Action.SEND_GRADIENT: ("gradient", 1)}
"""Kind of a message, and how many hops before the stage's own hop it crosses."""
