"""One event simulation of groups: their stages, the links between them, and the lines that several links share.

Stages run the events of `hetero_pp.pipeline.schedule` as stage workers do. Computations follow the order of the
schedule, sends return at once, and each direction of a link is a queue of its own. The optimizer step runs as soon as
the norm of the whole replica is known. On the first stage this is at the end of a step, elsewhere with the next step's
first activation, or with the flush.

A stage runs ahead in its own time until it needs a message that was not sent yet. This is exact: a direction of a link
has one sender and one receiver, so nothing that happens later elsewhere changes its times. Only messages over access
lines meet others, so they begin in the order of time. All messages on a line share it as a fluid. Rates are max-min
fair over all lines, and no message exceeds the bandwidth of its link. Rates change only when a message begins or ends.
Simulated packets that take turns agree within 1 % (tests/simulator/test_events.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from hetero_pp.config.lines import Way
from hetero_pp.pipeline.schedule import Action, ScheduleEvent, forward_only, one_forward_one_backward

INFINITY = float("inf")
ALMOST = 1e-9  # share of a message's bits that may be left through rounding
DRAWN = 16
"""Steps of an inner loop that are simulated if they differ by jitter or by other groups on a line.

The others take their mean. Steps that differ by nothing are simulated twice, because no optimizer step precedes the
first.
"""
MOST_SHOWN = 1000  # most steps that are simulated for a timeline, because millions may fit into a round of a given time

LineWay = tuple[str, Way]  # one direction of a line, by the line's name
OnSpan = Callable[[str, str, int, float, float], None]  # (track, what, micro-batch, start, end)


@dataclass(frozen=True)
class Hop:
    """One direction of a link between neighbouring stages, for messages of one size."""

    bits: float = 0.0  # bits of one message
    bandwidth: float = INFINITY  # bits per second of the link itself
    latency: float = 0.0
    jitter: float = 0.0  # a message takes a time drawn uniformly from [0, jitter] longer
    lines: tuple[LineWay, ...] = ()  # limited lines that the messages pass

    @property
    def seconds(self) -> float:
        """Seconds that a message occupies the link."""
        return self.bits / self.bandwidth


@dataclass(frozen=True)
class GroupOfEvents:
    """A group of S stages. Seconds are those of one micro-batch on each stage; hop s joins stages s and s + 1."""

    micro_batches: int
    extra_in_flight: int
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]  # seconds of one optimizer step
    activations: Sequence[Hop]
    gradients: Sequence[Hop]
    evaluate: Sequence[float] = ()  # seconds of a forward pass of one validation batch
    evaluations: Sequence[Hop] = ()  # hops of the activations of validation batches
    evaluation_batches: int = 0
    capacities: Mapping[LineWay, float] = field(default_factory=dict)  # bits per second of every line that hops pass

    @property
    def stages(self) -> int:
        return len(self.forward)

    @cached_property
    def lines(self) -> set[str]:
        """Names of the lines that hops pass."""
        return {name for hop in (*self.activations, *self.gradients) for name, _ in hop.lines}

    def without_communication(self) -> GroupOfEvents:
        """Return the same group with links that cost nothing."""
        nothing = [Hop()] * (self.stages - 1)
        return replace(self, activations=nothing, gradients=nothing, evaluations=nothing, capacities={})


Program = Sequence[tuple[str, int]]
"""Events of a stage in a step, as (value of the action, micro-batch): looking up an enum's member takes too long."""


@lru_cache(maxsize=64)
def _training(stages: int, micro_batches: int, extra_in_flight: int) -> Sequence[Program]:
    return [_program(one_forward_one_backward(one, stages, micro_batches, extra_in_flight)) for one in range(stages)]


@lru_cache(maxsize=64)
def _evaluation(stages: int, batches: int) -> Sequence[Program]:
    return [_program(forward_only(stage, stages, batches)) for stage in range(stages)]


def _program(events: Sequence[ScheduleEvent]) -> Program:
    return [(event.action.value, event.micro_batch) for event in events]


class GroupClock:
    """Times when the stages and links of a group are free, in seconds; starts at 0."""

    def __init__(
        self, group: GroupOfEvents, random: np.random.Generator | None = None, on_span: OnSpan | None = None
    ) -> None:
        """`random` draws jitter; there is none without it."""
        self.group, self.random, self.on_span = group, random, on_span
        self.free = [0.0] * group.stages  # Time when each stage is free. Callers add what happens between inner loops.
        self.left = {(kind, hop): 0.0 for kind in ("activation", "gradient") for hop in range(group.stages - 1)}
        """Time when the newest message of each hop has left."""

    def evaluate(self) -> None:
        """Run the forward passes of an evaluation."""
        group = self.group
        programs = _evaluation(group.stages, group.evaluation_batches)
        _Simulation([self], [programs], 1, replace(group, forward=group.evaluate, activations=group.evaluations))

    def finish(self, first_stage: float) -> None:
        """Complete the last optimizer step of each stage, once the first stage has completed its own.

        The last norm passes from stage to stage. Its message is too small to occupy a link.
        """
        self.free[0] = first_stage
        for stage, hop in enumerate(self.group.activations, start=1):
            sent = max(self.free[stage - 1], self.left["activation", stage - 1])
            start = max(self.free[stage], sent + hop.latency)
            self.free[stage] = start + self.group.update[stage]
            if self.on_span is not None:
                self.on_span(f"stage {stage}", "update", 0, start, self.free[stage])


@dataclass(frozen=True)
class StepTimes:
    """When a group's first stage completes optimizer steps."""

    first: float  # end of the first step of an inner loop
    each: float  # mean seconds of the others


def inner_loops(clocks: Sequence[GroupClock], steps: Sequence[int]) -> list[StepTimes]:
    """Advance groups by the inner steps of each. Groups that share a line are simulated together."""
    clusters: list[tuple[set[str], list[int]]] = []  # lines, and the groups that share them directly or through others
    for index, clock in enumerate(clocks):
        touched = [one for one in clusters if one[0] & clock.group.lines]
        clusters = [one for one in clusters if one not in touched]
        lines = clock.group.lines.union(*(one[0] for one in touched))
        clusters.append((lines, sorted([index, *(other for one in touched for other in one[1])])))
    found: dict[int, StepTimes] = {}
    for _, cluster in clusters:
        together = [clocks[index] for index in cluster]
        hops = [hop for one in together if one.random for hop in (*one.group.activations, *one.group.gradients)]
        limit = DRAWN if len(cluster) > 1 or any(hop.jitter for hop in hops) else 2
        if any(one.on_span is not None for one in together):
            limit = MOST_SHOWN
        timed = min(limit, *(steps[index] for index in cluster))
        shapes = [(one.group.stages, one.group.micro_batches, one.group.extra_in_flight) for one in together]
        simulated = _Simulation(together, [_training(*shape) for shape in shapes], timed)
        for index, ends in zip(cluster, simulated.step_ends, strict=True):
            each = (ends[-1] - ends[0]) / (timed - 1) if timed > 1 else 0.0
            clocks[index].finish(ends[-1] + (steps[index] - timed) * each)
            found[index] = StepTimes(ends[0], each)
    return [found[index] for index in range(len(clocks))]


def fair_rates(hops: Sequence[Hop], capacities: Mapping[LineWay, float]) -> list[float]:
    """Return the bits per second of a message on each hop, max-min fair.

    All rates grow evenly until a line or a link is full.
    """
    rates, growing, left = [0.0] * len(hops), set(range(len(hops))), dict(capacities)
    while growing:
        users = {line: sum(line in hops[one].lines for one in growing) for line in left}
        step = min(
            [left[line] / count for line, count in users.items() if count]
            + [hops[one].bandwidth - rates[one] for one in growing]
        )
        if step == INFINITY:
            return [INFINITY if one in growing else rate for one, rate in enumerate(rates)]
        for one in growing:
            rates[one] += step
        for line, count in users.items():
            left[line] -= step * count
        full = {line for line, count in users.items() if count and left[line] <= 1e-12 * capacities[line]}
        growing = {
            one
            for one in growing
            if rates[one] < hops[one].bandwidth * (1 - 1e-12) and full.isdisjoint(hops[one].lines)
        }
    return rates


class _Transfer:
    """One direction of a hop: the messages that wait to be sent, and the arrivals of those that were."""

    def __init__(self, number: int, clock: GroupClock, key: tuple[str, int], hop: Hop) -> None:
        self.number, self.clock, self.key, self.hop, self.seconds = number, clock, key, hop, hop.seconds
        self.arrivals = deque[float]()  # arrivals that the receiver has not reached
        self.newest = 0.0  # newest arrival; no message overtakes another
        self.receiver: _StageInTime | None = None  # receiver, if it waits
        self.queue = deque[int]()  # micro-batches whose messages pass lines: the first is in transit
        self.bits_left = self.began = 0.0


class _StageInTime:
    """A stage that runs its program some times."""

    def __init__(self, clock: GroupClock, group: GroupOfEvents, index: int, program: Program) -> None:
        self.clock, self.index, self.program = clock, index, program
        self.seconds = {Action.FORWARD.value: group.forward[index], Action.BACKWARD.value: group.backward[index]}
        self.update = group.update[index]
        self.streams: dict[str, _Transfer] = {}
        self.now, self.place, self.rounds = clock.free[index], 0, 0
        self.step_ends = list[float]()


class _Simulation:
    """Runs programs of groups until all are done, and advances their clocks."""

    def __init__(
        self,
        clocks: Sequence[GroupClock],
        programs: Sequence[Sequence[Program]],
        steps: int,
        evaluation: GroupOfEvents | None = None,
    ) -> None:
        """`programs`: the events of each group's stages in a step. With `evaluation`, no optimizer steps are made."""
        self._trains, self._steps = evaluation is None, steps
        self._capacities: dict[LineWay, float] = {}
        self._active: tuple[_Transfer, ...] = ()
        self._rates: dict[tuple[_Transfer, ...], list[float]] = {}
        self._agenda: list[tuple[float, int, _StageInTime | _Transfer]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._ready: list[_StageInTime] = []
        firsts = []
        for clock, own_programs in zip(clocks, programs, strict=True):
            group = evaluation or clock.group
            self._capacities |= group.capacities
            stages = [_StageInTime(clock, group, index, program) for index, program in enumerate(own_programs)]
            for kind, hops in (("activation", group.activations), ("gradient", group.gradients)):
                sent, received = _ACTIONS[kind]
                for index, hop in enumerate(hops):
                    stream = _Transfer(next(self._order), clock, (kind, index), hop)
                    source, target = (index, index + 1) if kind == "activation" else (index + 1, index)
                    stages[source].streams[sent] = stages[target].streams[received] = stream
            self._ready += stages
            firsts.append(stages[0])
        self._run()
        self.step_ends = [stage.step_ends for stage in firsts]
        """Times when the first stage of each group completed each optimizer step."""

    def _run(self) -> None:
        while True:
            while self._ready:
                self._advance_stage(self._ready.pop())
            rates = self._rates.get(self._active)
            if rates is None:
                rates = fair_rates([one.hop for one in self._active], self._capacities)
                self._rates[self._active] = rates
            ends = [self._now + one.bits_left / rate for one, rate in zip(self._active, rates, strict=True)]
            next_end = min(ends, default=INFINITY)
            if self._agenda and self._agenda[0][0] < next_end:
                now, _, what = heapq.heappop(self._agenda)
                self._carry_until(now, rates)
                if isinstance(what, _StageInTime):
                    self._ready.append(what)
                else:
                    self._begin(what)
            elif next_end < INFINITY:
                self._carry_until(next_end, rates)
            else:
                return

    def _advance_stage(self, stage: _StageInTime) -> None:
        """Run a stage until it needs a message that was not sent, or sends over lines later than others may."""
        now, clock, program = stage.now, stage.clock, stage.program
        while True:
            if stage.place == len(program):
                if self._trains and stage.index == 0:
                    now = self._compute(stage, "update", 0, now, stage.update)
                    stage.step_ends.append(now)
                stage.rounds += 1
                if stage.rounds == self._steps:
                    break
                stage.place = 0
            action, micro_batch = program[stage.place]
            if action in stage.seconds:
                now = self._compute(stage, action, micro_batch, now, stage.seconds[action])
            else:
                stream = stage.streams[action]
                if action in _RECEIVES:
                    if not stream.arrivals:
                        stream.receiver = stage
                        break
                    now = max(now, stream.arrivals.popleft())
                    # The norm of the step before came with the first activation of this one.
                    if stage.rounds and micro_batch == 0 and action == Action.RECEIVE_ACTIVATION.value:
                        now = self._compute(stage, "update", 0, now, stage.update)
                elif not stream.hop.lines:  # it shares the link with none, so its end is known at once
                    start = max(now, stream.clock.left[stream.key])
                    self._leave(stream, micro_batch, start, start + stream.seconds)
                elif now > self._now:
                    heapq.heappush(self._agenda, (now, next(self._order), stage))
                    break
                else:
                    stream.queue.append(micro_batch)
                    if len(stream.queue) == 1:
                        self._begin(stream)
            stage.place += 1
        stage.now = clock.free[stage.index] = now

    def _compute(self, stage: _StageInTime, what: str, micro_batch: int, now: float, seconds: float) -> float:
        if stage.clock.on_span is not None:
            stage.clock.on_span(f"stage {stage.index}", what, micro_batch, now, now + seconds)
        return now + seconds

    def _leave(self, stream: _Transfer, micro_batch: int, start: float, end: float) -> None:
        """Record that a message has left, and when it arrives."""
        clock, (kind, hop) = stream.clock, stream.key
        clock.left[stream.key] = end
        if clock.on_span is not None:
            clock.on_span(f"hop {hop} {kind}", kind, micro_batch, start, end)
        arrival = end + stream.hop.latency
        if clock.random is not None and stream.hop.jitter:
            arrival += stream.hop.jitter * float(clock.random.random())
        stream.newest = max(stream.newest, arrival)
        stream.arrivals.append(stream.newest)
        if stream.receiver is not None:
            self._ready.append(stream.receiver)
            stream.receiver = None

    def _begin(self, stream: _Transfer) -> None:
        """Begin the first message of a stream's queue, once the last message of an earlier simulation has left."""
        left = stream.clock.left[stream.key]
        if left > self._now:
            heapq.heappush(self._agenda, (left, next(self._order), stream))
        else:
            stream.bits_left, stream.began = stream.hop.bits, self._now
            self._active = tuple(sorted((*self._active, stream), key=lambda one: one.number))

    def _carry_until(self, now: float, rates: Sequence[float]) -> None:
        """Let bits cross until `now`; messages that have left make room for the next of their streams."""
        ended = []
        for stream, rate in zip(self._active, rates, strict=True):
            stream.bits_left -= rate * (now - self._now)
            if stream.bits_left <= ALMOST * stream.hop.bits:
                ended.append(stream)
        self._now = now
        if ended:
            self._active = tuple(one for one in self._active if one not in ended)
        for stream in ended:
            self._leave(stream, stream.queue.popleft(), stream.began, now)
            if stream.queue:
                self._begin(stream)


_ACTIONS = {
    "activation": (Action.SEND_ACTIVATION.value, Action.RECEIVE_ACTIVATION.value),
    "gradient": (Action.SEND_GRADIENT.value, Action.RECEIVE_GRADIENT.value),
}
_RECEIVES = frozenset(received for _, received in _ACTIONS.values())
