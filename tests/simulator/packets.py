"""One group whose machines have lines, simulated packet by packet, as a reference for hetero_pp.simulator.events.

Every line serves one packet at a time, and its streams take turns. A stream has a limited number of packets under way,
as a sender that waits for acknowledgements. A slow line further on therefore slows it down, and the other streams get
the rest.

It shares only the schedule with the fluid model.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from hetero_pp.pipeline.schedule import Action, one_forward_one_backward

Stream = tuple[str, int]
PACKETS = 150
"""Packets of the smaller message. All packets have one size."""
WINDOW = 6
"""Packets of a stream under way."""


@dataclass(frozen=True)
class Machine:
    """A stage: seconds of computation, and bits per second of its line."""

    forward: float
    backward: float
    update: float
    up: float
    down: float


class _Line:
    """A line that serves the packets of its streams in turn."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.queues: dict[Stream, deque[Callable[[], None]]] = {}
        self.turns: deque[Stream] = deque()
        self.is_busy = False


class Packets:
    """One timed step of a group."""

    def __init__(
        self, machines: Sequence[Machine], micro_batches: int, extra: int, bits: dict[str, float], latency: float
    ) -> None:
        self.machines, self.bits, self.latency = machines, bits, latency
        self.ups = [_Line(machine.up) for machine in machines]
        self.downs = [_Line(machine.down) for machine in machines]
        self.packet = min(bits.values()) / PACKETS
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.tickets = count()
        self.now = 0.0
        self.programs = [
            deque(one_forward_one_backward(stage, len(machines), micro_batches, extra))
            for stage in range(len(machines))
        ]
        self.arrived: set[tuple[Stream, int]] = set()
        self.waiting: dict[tuple[Stream, int], int] = {}
        self.unsent: dict[Stream, deque[int]] = {}
        self.under_way: dict[Stream, int] = {}
        self.end = 0.0

    def step_seconds(self) -> float:
        """Return the seconds until the first stage has made its optimizer step."""
        for stage in range(len(self.machines)):
            self._go_on(stage)
        while self.agenda:
            self.now, _, happen = heapq.heappop(self.agenda)
            happen()
        return self.end + self.machines[0].update

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self.tickets), happen))

    def _go_on(self, stage: int) -> None:
        program, machine = self.programs[stage], self.machines[stage]
        while program:
            event = program[0]
            batch = event.micro_batch
            if event.action in (Action.RECEIVE_ACTIVATION, Action.RECEIVE_GRADIENT):
                is_activation = event.action is Action.RECEIVE_ACTIVATION
                key = (("activation", stage - 1) if is_activation else ("gradient", stage), batch)
                if key not in self.arrived:
                    self.waiting[key] = stage
                    return
            program.popleft()
            if event.action is Action.SEND_ACTIVATION:
                self._send(("activation", stage), batch)
            elif event.action is Action.SEND_GRADIENT:
                self._send(("gradient", stage - 1), batch)
            elif event.action in (Action.FORWARD, Action.BACKWARD):
                seconds = machine.forward if event.action is Action.FORWARD else machine.backward
                self._at(seconds, lambda: self._go_on(stage))
                return
        if stage == 0:
            self.end = self.now

    def _send(self, stream: Stream, batch: int) -> None:
        self.unsent.setdefault(stream, deque()).extend([batch] * round(self.bits[stream[0]] / self.packet))
        self._fill(stream)

    def _fill(self, stream: Stream) -> None:
        while self.unsent[stream] and self.under_way.get(stream, 0) < WINDOW:
            self.under_way[stream] = self.under_way.get(stream, 0) + 1
            batch = self.unsent[stream].popleft()
            is_last = not self.unsent[stream] or self.unsent[stream][0] != batch
            kind, hop = stream
            ends = (hop, hop + 1) if kind == "activation" else (hop + 1, hop)
            self._serve(self.ups[ends[0]], stream, self._then(self.downs[ends[1]], stream, batch, is_last))

    def _then(self, down: _Line, stream: Stream, batch: int, is_last: bool) -> Callable[[], None]:
        def come() -> None:
            self.under_way[stream] -= 1
            if is_last:
                self._at(self.latency, lambda: self._arrive((stream, batch)))
            self._fill(stream)

        return lambda: self._serve(down, stream, come)

    def _serve(self, line: _Line, stream: Stream, then: Callable[[], None]) -> None:
        queue = line.queues.setdefault(stream, deque())
        if not queue:
            line.turns.append(stream)
        queue.append(then)
        if not line.is_busy:
            self._next(line)

    def _next(self, line: _Line) -> None:
        line.is_busy = bool(line.turns)
        if not line.turns:
            return
        stream = line.turns.popleft()
        then = line.queues[stream].popleft()
        if line.queues[stream]:
            line.turns.append(stream)

        def left() -> None:
            self._next(line)
            then()

        self._at(self.packet / line.rate, left)

    def _arrive(self, key: tuple[Stream, int]) -> None:
        self.arrived.add(key)
        if key in self.waiting:
            self._go_on(self.waiting.pop(key))
