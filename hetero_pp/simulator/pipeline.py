"""Time of inner steps on many groups at once: the events of stage workers, as a recurrence on arrays.

Shapes: S stages, G groups of equal shape. Every event ends at max(what it waits for) + its duration. So one pass over a
step's events, in an order that all groups share, gives exact times for all of them; nothing is sampled or averaged.

The events are those of stages.worker. Computations follow the order of the schedule. Sends return at once, and each
direction of a link is a queue of its own. The optimizer step runs as soon as the norm of the whole replica is known. On
the first stage this is at the end of a step, elsewhere with the next step's first activation, or with the flush.

If links share lines, the times themselves decide which of two messages leaves first. Then every group is timed
separately, event by event (hetero_pp.simulator.fluid).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hetero_pp.pipeline.schedule import Action, Event, forward_only, one_forward_one_backward
from hetero_pp.simulator.fluid import INFINITY, Network, Path, Run, Stream, Wires, Work

Array = np.ndarray
OnSpan = Callable[[str, str, int, Array, Array], None]
"""(track, what, micro-batch, starts [G], ends [G])"""

COLUMNS = 8192
"""Most columns that are timed side by side, if the order is free. Their times stay in a core's cache."""

DRAWN_WITH_LINES = 16
"""Steps of an inner loop that are timed event by event. The others take their mean, as they differ only by jitter."""


@dataclass(frozen=True)
class Hops:
    """One direction of the links between neighbouring stages, [S - 1, G] each. Hop s joins stages s and s + 1."""

    seconds: Array
    """Seconds that one message occupies the link: its bits over the bandwidth."""
    latency: Array
    jitter: Array
    """A message takes a time drawn uniformly from [0, jitter] longer."""
    bits: float = 0.0
    """Bits of one message; used only for lines."""
    lines: tuple[tuple[int, ...], ...] = ()
    """Lines that each hop passes, as indices into `Groups.capacities`; empty if no hop passes any."""

    def columns(self, of: slice, times: int) -> Hops:
        """Return the columns `of` the groups, repeated `times` times side by side."""
        seconds, latency, jitter = (np.tile(rows[:, of], times) for rows in (self.seconds, self.latency, self.jitter))
        return replace(self, seconds=seconds, latency=latency, jitter=jitter)

    def path(self, hop: int, column: int) -> Path:
        seconds = float(self.seconds[hop, column])
        return Path(
            self.bits / seconds if seconds else INFINITY,
            self.lines[hop],
            float(self.latency[hop, column]),
            float(self.jitter[hop, column]),
        )


@dataclass(frozen=True)
class Groups:
    """G groups of S stages with one schedule; seconds are [S, G]."""

    micro_batches: int
    extra_in_flight: int
    forward: Array
    """Seconds of one micro-batch."""
    backward: Array
    update: Array
    """Seconds of one optimizer step."""
    activations: Hops
    gradients: Hops
    capacities: tuple[float, ...] = ()
    """Bits per second of the lines of each group; each direction is a line of its own."""

    @property
    def has_lines(self) -> bool:
        return any(map(any, (self.activations.lines, self.gradients.lines)))

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def count(self) -> int:
        return self.forward.shape[1]

    @property
    def has_jitter(self) -> bool:
        return bool(self.activations.jitter.any() or self.gradients.jitter.any())

    def columns(self, of: slice, times: int) -> Groups:
        """Return the columns `of` the groups, repeated `times` times side by side: [S, times * G]."""
        forward, backward, update = (np.tile(rows[:, of], times) for rows in (self.forward, self.backward, self.update))
        activations, gradients = self.activations.columns(of, times), self.gradients.columns(of, times)
        return replace(
            self, forward=forward, backward=backward, update=update, activations=activations, gradients=gradients
        )


@lru_cache(maxsize=64)
def step_order(stages: int, micro_batches: int, extra_in_flight: int) -> Sequence[tuple[int, Event]]:
    """Return all stages' events of one step, ordered so that every message is sent before it is received."""
    return _merged(step_programs(stages, micro_batches, extra_in_flight))


def step_programs(stages: int, micro_batches: int, extra_in_flight: int) -> Sequence[Sequence[Event]]:
    return [one_forward_one_backward(s, stages, micro_batches, extra_in_flight) for s in range(stages)]


@lru_cache(maxsize=64)
def evaluation_order(stages: int, batches: int) -> Sequence[tuple[int, Event]]:
    """Return all stages' events of an evaluation, ordered like those of `step_order`."""
    return _merged([forward_only(stage, stages, batches) for stage in range(stages)])


def _merged(events_of_stages: Sequence[Sequence[Event]]) -> Sequence[tuple[int, Event]]:
    left = [list(reversed(events)) for events in events_of_stages]
    sent: set[tuple[Action, int, int]] = set()
    order: list[tuple[int, Event]] = []
    while any(left):
        before = len(order)
        for stage, events in enumerate(left):
            while events and _is_ready(stage, events[-1], sent):
                event = events.pop()
                sent.add((event.action, stage, event.micro_batch))
                order.append((stage, event))
        assert len(order) > before, "the schedule has a deadlock"
    return order


def _is_ready(stage: int, event: Event, sent: set[tuple[Action, int, int]]) -> bool:
    if event.action is Action.RECEIVE_ACTIVATION:
        return (Action.SEND_ACTIVATION, stage - 1, event.micro_batch) in sent
    if event.action is Action.RECEIVE_GRADIENT:
        return (Action.SEND_GRADIENT, stage + 1, event.micro_batch) in sent
    return True


class GroupClock:
    """Times when stages and directions of links are free, and when messages arrive, [G] each; starts at 0."""

    def __init__(
        self, groups: Groups, random: np.random.Generator | None = None, on_span: OnSpan | None = None
    ) -> None:
        stages, count = groups.stages, groups.count
        self.groups = groups
        self.random = random
        self.on_span = on_span
        self.free = np.zeros((stages, count))
        """Time when each stage is free, [S, G]. Callers add what happens between inner loops."""
        self._updates_due: set[int] = set()
        """Stages that wait for the norm of the step before."""
        self.link_free = {kind: np.zeros((stages - 1, count)) for kind in ("activation", "gradient")}
        """Time when the newest message of each hop has left."""
        self._last = {kind: np.zeros((stages - 1, count)) for kind in ("activation", "gradient")}
        """Time when the newest message of each hop arrives; no message overtakes another."""
        self._arrivals: dict[tuple[str, int, int], Array] = {}

    def inner_loop(self, steps: int) -> list[Array]:
        """Run H inner steps and the flush; return when the first stage completed each optimizer step, [G] each."""
        ends = []
        for step in range(1 if self.on_span is None else steps):
            self._step(updates=step > 0)
            ends.append(self.free[0].copy())
        if len(ends) < steps:
            ends += list(ends[0] + np.cumsum(self._further_steps(steps - 1), axis=0))
            self.free[0] = ends[-1]
        self.flush()
        return ends

    def _step(self, updates: bool) -> None:
        """Run one inner step. With `updates`, every later stage begins with the optimizer step of the step before."""
        groups = self.groups
        self._updates_due = set(range(1, groups.stages)) if updates else set()
        shape = groups.stages, groups.micro_batches, groups.extra_in_flight
        if groups.has_lines:
            self._run_with_lines(step_programs(*shape), groups.forward, groups.activations)
        else:
            for stage, event in step_order(*shape):
                self._run(stage, event, groups.forward[stage], groups.activations)
        self._update(0)

    def _further_steps(self, count: int) -> Array:
        """Return the seconds of each further step, [count, G].

        A step ends when all its gradients are back at the first stage, where the next one begins: no message of one
        step is in transit in another. So its duration depends on nothing before it, and steps are timed side by side,
        each from time 0. Without jitter one step stands for all.
        """
        seconds = np.empty((count, self.groups.count))
        drawn = count if self.random is not None and self.groups.has_jitter else 1
        drawn = min(drawn, DRAWN_WITH_LINES) if self.groups.has_lines else drawn
        for left in range(0, self.groups.count, COLUMNS):
            own = slice(left, min(left + COLUMNS, self.groups.count))
            at_once = COLUMNS // (own.stop - own.start)
            for first in range(0, drawn, at_once):
                times = min(at_once, drawn - first)
                clock = GroupClock(self.groups.columns(own, times), self.random)
                clock._step(updates=True)
                seconds[first : first + times, own] = clock.free[0].reshape(times, -1)
        seconds[drawn:] = seconds[:drawn].mean(axis=0)
        return seconds

    def evaluate(self, batches: int, forward: Array, activations: Hops) -> None:
        """Run an evaluation, forward passes only, with the given times."""
        stages = self.groups.stages
        if self.groups.has_lines:
            programs = [forward_only(stage, stages, batches) for stage in range(stages)]
            self._run_with_lines(programs, forward, activations)
            return
        for stage, event in evaluation_order(stages, batches):
            self._run(stage, event, forward[stage], activations)

    def _run_with_lines(self, programs: Sequence[Sequence[Event]], forward: Array, activations: Hops) -> None:
        """Run one group after the other; equal groups run once."""
        kinds = {"activation": activations, "gradient": self.groups.gradients}
        timed: dict[bytes, int] = {}
        for column in range(self.groups.count):
            if self.random is None or not self.groups.has_jitter:
                parts = (self.free, forward, self.groups.backward, self.groups.update, *self.link_free.values())
                parts += tuple(rows for hops in kinds.values() for rows in (hops.seconds, hops.latency))
                same = timed.setdefault(b"".join(rows[:, column].tobytes() for rows in parts), column)
                if same != column:
                    for rows in (self.free, *self.link_free.values()):
                        rows[:, column] = rows[:, same]
                    continue
            time_events([Timed(self, column, forward, kinds)], self.groups.capacities, programs, due=self._updates_due)
        self._updates_due = set()

    def _run(self, stage: int, event: Event, forward: Array, activations: Hops) -> None:
        match event.action:
            case Action.FORWARD:
                self._compute(stage, "forward", event.micro_batch, forward)
            case Action.BACKWARD:
                self._compute(stage, "backward", event.micro_batch, self.groups.backward[stage])
            case Action.SEND_ACTIVATION:
                self._send("activation", stage, stage, event.micro_batch, activations)
            case Action.SEND_GRADIENT:
                self._send("gradient", stage, stage - 1, event.micro_batch, self.groups.gradients)
            case Action.RECEIVE_ACTIVATION:
                self._receive("activation", stage, stage - 1, event.micro_batch)
                if stage in self._updates_due:
                    self._updates_due.discard(stage)
                    self._update(stage)
            case Action.RECEIVE_GRADIENT:
                self._receive("gradient", stage, stage, event.micro_batch)

    def _update(self, stage: int) -> None:
        self._compute(stage, "update", 0, self.groups.update[stage])

    def shift(self, seconds: Array) -> None:
        """Delay all recorded times by `seconds`, [G]."""
        for rows in (self.free, *self.link_free.values(), *self._last.values()):
            rows += seconds

    def flush(self) -> None:
        """Pass on the last norm so that every stage completes its step. The message is too small to occupy a link."""
        hops = self.groups.activations
        for stage in range(1, self.groups.stages):
            sent = np.maximum(self.free[stage - 1], self.link_free["activation"][stage - 1])
            np.maximum(self.free[stage], sent + hops.latency[stage - 1], out=self.free[stage])
            self._update(stage)

    def _compute(self, stage: int, what: str, micro_batch: int, seconds: Array) -> None:
        free = self.free[stage]
        if self.on_span is not None:
            self.on_span(f"stage {stage}", what, micro_batch, free.copy(), free + seconds)
        free += seconds

    def _send(self, kind: str, stage: int, hop: int, micro_batch: int, hops: Hops) -> None:
        link = self.link_free[kind][hop]
        np.maximum(link, self.free[stage], out=link)
        if self.on_span is not None:
            self.on_span(f"hop {hop} {kind}", kind, micro_batch, link.copy(), link + hops.seconds[hop])
        link += hops.seconds[hop]
        arrival = link + hops.latency[hop]
        if self.random is not None:
            arrival += self.random.random(len(arrival)) * hops.jitter[hop]
            np.maximum(arrival, self._last[kind][hop], out=arrival)
            self._last[kind][hop] = arrival
        self._arrivals[kind, hop, micro_batch] = arrival

    def _receive(self, kind: str, stage: int, hop: int, micro_batch: int) -> None:
        np.maximum(self.free[stage], self._arrivals.pop((kind, hop, micro_batch)), out=self.free[stage])

    def tell(self, track: str, what: str, micro_batch: int, starts: float, ends: float) -> None:
        """Report a span of the first group to `on_span`."""
        if self.on_span is not None:
            self.on_span(track, what, micro_batch, np.array([starts]), np.array([ends]))


@dataclass(frozen=True)
class Timed:
    """One group of a clock that is timed event by event, perhaps together with groups of other clocks."""

    clock: GroupClock
    column: int
    """Number of the group within its clock."""
    forward: Array
    """Seconds of one micro-batch, [S, G]."""
    hops: Mapping[str, Hops]
    """Hops by kind of message."""
    offset: int = 0
    """Number of its first stage among the stages of all groups."""
    lines: Sequence[int] | None = None
    """Index of each of its lines among the lines of all groups; None if there is no other group."""

    def path(self, kind: str, hop: int) -> Path:
        path = self.hops[kind].path(hop, self.column)
        return path if self.lines is None else replace(path, lines=tuple(self.lines[place] for place in path.lines))


def time_events(
    groups: Sequence[Timed],
    capacities: Sequence[float],
    programs: Sequence[Sequence[Event]],
    due: Collection[int] = (),
    steps: int = 1,
    first: Collection[int] = (),
) -> Run:
    """Advance the clocks of groups that share lines by some runs of their programs. The arguments are as in `Work`."""
    offsets = [one.offset for one in groups]
    streams: dict[Stream, tuple[Timed, str, int]] = {
        (kind, one.offset + hop): (one, kind, hop)
        for one in groups
        for kind in one.hops
        for hop in range(one.clock.groups.stages - 1)
    }

    def seconds(rows_of: Callable[[Timed], Array]) -> list[float]:
        return [float(value) for one in groups for value in rows_of(one)[:, one.column]]

    def on_flow(stream: Stream, micro_batch: int, starts: float, ends: float) -> None:
        one, kind, hop = streams[stream]
        one.clock.tell(f"hop {hop} {kind}", kind, micro_batch, starts, ends)

    def on_compute(stage: int, what: str, micro_batch: int, starts: float, ends: float) -> None:
        one = groups[bisect(offsets, stage) - 1]
        one.clock.tell(f"stage {stage - one.offset}", what, micro_batch, starts, ends)

    is_told = any(one.clock.on_span is not None and one.column == 0 for one in groups)
    work = Work(
        programs,
        seconds(lambda one: one.forward),
        seconds(lambda one: one.clock.groups.backward),
        seconds(lambda one: one.clock.groups.update),
        frozenset(due),
        steps,
        frozenset(first),
    )
    network = Network(capacities, {stream: one.path(kind, hop) for stream, (one, kind, hop) in streams.items()})
    bits = {stream: one.hops[kind].bits for stream, (one, kind, _) in streams.items()}
    run = Run(
        work,
        Wires(network, bits, groups[0].clock.random, on_flow if is_told else None),
        seconds(lambda one: one.clock.free),
        {stream: float(one.clock.link_free[kind][hop, one.column]) for stream, (one, kind, hop) in streams.items()},
        on_compute if is_told else None,
    )
    run.to_the_end()
    for one in groups:
        one.clock.free[:, one.column] = run.free[one.offset : one.offset + one.clock.groups.stages]
    for stream, (one, kind, hop) in streams.items():
        one.clock.link_free[kind][hop, one.column] = run.left[stream]
    return run
