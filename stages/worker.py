"""Runs a stage's events in schedule order: receives from neighbours, computes, sends.

Clipping by the norm of the whole replica costs no extra round trip: squared norms ride on the last gradient of a
step towards the first stage, which steps at once; the total rides on the next step's first activation (or on a flush
at the end of the inner loop), and every other stage steps just before it uses that activation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_pp.coefficients import Symbols, noise_key
from hetero_pp.errors import LinkClosed, MalformedMessage
from hetero_pp.link.protocol import LinkEnd, Message
from hetero_pp.link.token_ids import pack_tokens, unpack_tokens
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, FLUSH, GRADIENT, LinkHeader, Purpose
from hetero_pp.schedule import Action, Event, forward_only, one_forward_one_backward
from stages.stage import Stage


@dataclass(frozen=True)
class WorkerSettings:
    """What the schedule and the checks of incoming messages need."""

    micro_batches: int
    micro_batch_size: int
    sequence_length: int
    extra_in_flight: int
    receive_timeout: float | None
    replica: str
    seed: int
    overlap: bool = False
    """Whether rounds are trained ahead: a neighbour may be at another one, and then its group is formed anew."""


@dataclass
class Timing:
    """Seconds since the last reset."""

    compute: float = 0.0
    wait: float = 0.0


@dataclass
class Activity:
    """What another thread can see of a worker that trains."""

    done: int = 0
    """Events of the schedule."""
    waits: bool = False
    """For a neighbour."""


@dataclass
class _Step:
    """One inner step, or one evaluation, under way."""

    round: int
    step: int
    global_step: int
    purpose: Purpose
    is_last: bool = False
    """Whether no other step of its round follows, where that is told."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Message] = field(default_factory=dict)
    came: dict[int, Symbols] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Symbols | None] = field(default_factory=dict)
    squared_norm_after: float | None = None
    loss: float = 0.0
    rows: int = 0
    backwards_left: int = 0


class StageWorker:
    """One stage between its links. `upstream` is None on the first stage, `downstream` on the last."""

    def __init__(
        self, stage: Stage, settings: WorkerSettings, upstream: LinkEnd | None, downstream: LinkEnd | None
    ) -> None:
        self.stage = stage
        self.settings = settings
        self.timing = Timing()
        self.activity = Activity()
        self.gradient_norm = math.nan
        """Of the whole replica, in the last step that was applied here."""
        self.learning_rate = math.nan
        self.was_last = False
        """Whether the last step was told to be the last of its round."""
        self._upstream = upstream
        self._downstream = downstream
        self._pending_step: int | None = None
        self._norm_to_announce: float | None = None
        spec = stage.spec
        self._train_events = one_forward_one_backward(
            spec.index, spec.count, settings.micro_batches, settings.extra_in_flight
        )
        self._actions: dict[Action, Callable[[_Step, int], None]] = {
            Action.RECEIVE_ACTIVATION: self._receive_activation,
            Action.FORWARD: self._forward,
            Action.SEND_ACTIVATION: self._send_activation,
            Action.RECEIVE_GRADIENT: self._receive_gradient,
            Action.BACKWARD: self._backward,
            Action.SEND_GRADIENT: self._send_gradient,
        }

    def drop(self) -> None:
        """Forget a step that does not end, and one that waits for its norm. Not while one is under way."""
        self._pending_step = self._norm_to_announce = None
        self.stage.drop()

    def relink(self, upstream: LinkEnd | None, downstream: LinkEnd | None) -> None:
        """Go on with other links between the same stages, between two inner loops or after `drop`."""
        self._upstream, self._downstream = upstream, downstream

    def inner_step(
        self, round_: int, step: int, global_step: int, tokens: Tensor | None, is_last: bool = False
    ) -> float | None:
        """One inner step; `tokens` [batch, L + 1] on the first stage. Returns the loss on the last stage.

        With `is_last` the first stage tells all others that the inner loop ends with this step.
        """
        under_way = _Step(round_, step, global_step, ACTIVATION, is_last, backwards_left=self.settings.micro_batches)
        if tokens is not None:
            under_way.tokens = dict(enumerate(tokens.chunk(self.settings.micro_batches)))
        self._run(self._train_events, under_way)
        if self._downstream is not None and under_way.squared_norm_after is None:
            raise MalformedMessage("found no squared norm on the last gradient of a step")
        self._pending_step = global_step
        self.was_last = under_way.is_last
        if self.stage.spec.is_first:
            own = self._own_squared_norm()
            self._apply(math.sqrt(own + (under_way.squared_norm_after or 0.0)))
        return under_way.loss if self.stage.spec.is_last else None

    def flush(self, round_: int) -> None:
        """End the inner loop: pass the last gradient norm on, so that every stage has stepped."""
        if self._upstream is not None:
            header = self._receive(self._upstream, FLUSH, round_, 0, 0).header
            if not header.HasField("gradient_norm"):
                raise MalformedMessage("found no gradient norm on the flush of an inner loop")
            self._apply(_a_norm(header.gradient_norm))
        if self._downstream is not None:
            self._downstream.send(Message(self._header(FLUSH, round_, 0, 0, announces_norm=True)))
        self._norm_to_announce = None

    def evaluate(self, round_: int, batches: Sequence[Tensor], count: int) -> tuple[float, int] | None:
        """Mean loss over `count` batches [B, L + 1], given on the first stage, and its rows; told by the last stage.

        A batch holds at most as many sequences as a micro-batch.
        """
        under_way = _Step(round_, 0, 0, EVALUATION, tokens=dict(enumerate(batches)))
        spec = self.stage.spec
        self._run(forward_only(spec.index, spec.count, count), under_way)
        return (under_way.loss / under_way.rows, under_way.rows) if spec.is_last else None

    def _run(self, events: Sequence[Event], under_way: _Step) -> None:
        for event in events:
            self._actions[event.action](under_way, event.micro_batch)
            self.activity.done += 1

    # ---- compute ----

    def _forward(self, under_way: _Step, index: int) -> None:
        started = time.perf_counter()
        message = under_way.received.pop(index, None)
        came = under_way.came.pop(index, None)
        tokens = under_way.tokens[index]
        if under_way.purpose == EVALUATION:
            output = self.stage.evaluate(tokens, came)
        else:
            output = self.stage.forward(index, tokens, came, self.settings.micro_batches)
        if message is not None and self._upstream is not None:
            self._upstream.recycle(message)
        if self.stage.spec.is_last:
            rows = len(tokens) if under_way.purpose == EVALUATION else 1
            under_way.loss += output.item() * rows
            under_way.rows += rows
        else:
            under_way.outputs[index] = output
        self.timing.compute += time.perf_counter() - started

    def _backward(self, under_way: _Step, index: int) -> None:
        started = time.perf_counter()
        message = under_way.received.pop(index, None)
        hop = self.stage.spec.index - 1
        key = noise_key(self.settings.seed, self.settings.replica, hop, under_way.global_step, index)
        under_way.gradients[index] = self.stage.backward(index, under_way.came.pop(index, None), key)
        if message is not None and self._downstream is not None:
            self._downstream.recycle(message)
        under_way.backwards_left -= 1
        self.timing.compute += time.perf_counter() - started

    def _own_squared_norm(self) -> float:
        return self.stage.optimizer.gradient_norm().item() ** 2

    def _apply(self, norm: float) -> None:
        """The optimizer step that was waiting for the norm of the whole replica."""
        if self._pending_step is None:
            raise MalformedMessage("found a gradient norm, but no step waits for one")
        started = time.perf_counter()
        self.learning_rate = self.stage.step(self._pending_step, torch.tensor(norm))
        self.gradient_norm = self._norm_to_announce = norm
        self._pending_step = None
        self.timing.compute += time.perf_counter() - started

    # ---- messages ----

    def _receive_activation(self, under_way: _Step, index: int) -> None:
        assert self._upstream is not None
        message = self._receive(self._upstream, under_way.purpose, under_way.round, under_way.step, index)
        batch, length = self.settings.micro_batch_size, self.settings.sequence_length
        if under_way.purpose == EVALUATION and 0 < message.header.rows < batch:
            batch = message.header.rows
        if not message.tensors:
            raise MalformedMessage("found no token ids beside an activation")
        packed, *wire = message.tensors
        under_way.tokens[index] = unpack_tokens(packed, self.stage.module.shape.vocabulary, batch, length)
        shape = (batch, length, self.stage.boundary.dimensions)
        under_way.came[index] = self.stage.boundary.format.from_wire(tuple(wire), shape)
        under_way.received[index] = message
        under_way.is_last |= message.header.is_last
        if message.header.HasField("gradient_norm"):
            self._apply(_a_norm(message.header.gradient_norm))
        elif under_way.purpose == ACTIVATION and self._pending_step is not None:
            raise MalformedMessage("found no gradient norm on the first activation after a step")

    def _send_activation(self, under_way: _Step, index: int) -> None:
        assert self._downstream is not None
        header = self._header(under_way.purpose, under_way.round, under_way.step, index, announces_norm=True)
        tokens = under_way.tokens[index] if under_way.purpose == ACTIVATION else under_way.tokens.pop(index)
        packed = pack_tokens(tokens, self.stage.module.shape.vocabulary)
        header.rows = len(tokens)
        header.is_last = under_way.is_last and index == 0
        symbols = self.stage.boundary.encode_activation(under_way.outputs.pop(index))
        self._downstream.send(Message(header, (packed, *self.stage.boundary.format.to_wire(symbols))))

    def _receive_gradient(self, under_way: _Step, index: int) -> None:
        assert self._downstream is not None
        message = self._receive(self._downstream, GRADIENT, under_way.round, under_way.step, index)
        batch, length = self.settings.micro_batch_size, self.settings.sequence_length
        shape = (batch, length, self.stage.boundary.dimensions)
        under_way.came[index] = self.stage.boundary.format.from_wire(message.tensors, shape)
        under_way.received[index] = message
        if message.header.HasField("squared_norm"):
            under_way.squared_norm_after = _a_norm(message.header.squared_norm)

    def _send_gradient(self, under_way: _Step, index: int) -> None:
        assert self._upstream is not None
        symbols = under_way.gradients.pop(index)
        assert symbols is not None
        header = self._header(GRADIENT, under_way.round, under_way.step, index)
        if under_way.backwards_left == 0:
            header.squared_norm = self._own_squared_norm() + (under_way.squared_norm_after or 0.0)
        self._upstream.send(Message(header, self.stage.boundary.format.to_wire(symbols)))

    def _header(
        self, purpose: Purpose, round_: int, step: int, micro_batch: int, announces_norm: bool = False
    ) -> LinkHeader:
        header = LinkHeader(purpose=purpose, round=round_, step=step, micro_batch=micro_batch)
        if announces_norm and self._norm_to_announce is not None:
            header.gradient_norm = self._norm_to_announce
            self._norm_to_announce = None
        return header

    def _receive(self, link: LinkEnd, purpose: Purpose, round_: int, step: int, micro_batch: int) -> Message:
        started, self.activity.waits = time.perf_counter(), True
        message = link.receive(self.settings.receive_timeout)
        self.activity.waits = False
        self.timing.wait += time.perf_counter() - started
        header = message.header
        found = (header.purpose, header.round, header.step, header.micro_batch)
        if self.settings.overlap and header.round != round_:
            raise LinkClosed(f"the neighbouring stage is at round {header.round}, and this one at round {round_}")
        if found != (purpose, round_, step, micro_batch):
            raise MalformedMessage(
                f"found a message of purpose, round, step, micro-batch {found}, "
                f"expected {(purpose, round_, step, micro_batch)}"
            )
        return message


def _a_norm(value: float) -> float:
    """The value, if a norm can have it: a NaN here would become every weight."""
    if not math.isfinite(value) or value < 0:
        raise MalformedMessage(f"found a gradient norm of {value}: training diverged, or the message is damaged")
    return value
