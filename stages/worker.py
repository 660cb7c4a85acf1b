"""Runs a stage's events in schedule order: receives from neighbours, computes, sends.

Clipping by the gradient norm of the whole replica needs no additional round trip. The last gradient of a step carries
the squared norms towards the first stage, which steps at once. The first activation of the next step carries the total
norm back, or a flush message at the end of the inner loop. Each later stage steps just before it uses that activation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from hetero_pp.core.device import computing
from hetero_pp.core.errors import HeteroPPError, LinkClosed, LinkError, MalformedMessage
from hetero_pp.link.protocol import ACKNOWLEDGED_EVERY, LinkEnd, Message, pack_tokens, unpack_tokens
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, FLUSH, GRADIENT, Doing, LinkHeader, Purpose
from hetero_pp.model.inner import REMEDIES
from hetero_pp.pipeline.coefficients import Symbols, is_finite, noise_key
from hetero_pp.pipeline.schedule import Action, ScheduleEvent, forward_only, one_forward_one_backward
from hetero_pp.store.faults import NO_FAULTS
from stages.sender import MakeMessage, Sender, Tensors, copies_of
from stages.stage import Stage
from stages.transcript import Entry, NoTranscript, Way

LARGEST_NORM = torch.finfo(torch.float32).max
_ROUNDING = 1e-5  # largest relative error of the sum of squared norms
_OF_BACKWARD = (Action.RECEIVE_GRADIENT, Action.BACKWARD, Action.SEND_GRADIENT)


@dataclass
class Timing:
    """Seconds since the last reset."""

    compute: float = 0.0
    waited_previous: float = 0.0  # for messages of the previous stage
    waited_next: float = 0.0  # for messages of the next stage


@dataclass
class ActivityMeter:
    """Progress of a training worker, for other threads."""

    done: int = 0  # number of finished events of the schedule
    waits: bool = False  # whether the worker waits for a neighbour
    action: Action = Action.FORWARD  # action of the present or last event

    @property
    def doing(self) -> Doing:
        """The action of this moment, as it is reported."""
        if self.waits:
            is_gradient = self.action is Action.RECEIVE_GRADIENT
            return Doing.WAITING_FOR_NEXT if is_gradient else Doing.WAITING_FOR_PREVIOUS
        return Doing.BACKWARD if self.action in _OF_BACKWARD else Doing.FORWARD


@dataclass(frozen=True)
class WorkerSettings:
    """Settings for the schedule and for checks of incoming messages."""

    micro_batches: int
    micro_batch_size: int
    sequence_length: int
    extra_in_flight: int
    receive_timeout: float | None
    replica: str
    seed: int
    overlap: bool = False
    """Whether rounds overlap.

    A neighbour may then be in another round; the link is closed, and the group gets a new generation.
    """


@dataclass
class _Step:
    """State of one inner step or one evaluation."""

    round: int
    step: int
    global_step: int
    purpose: Purpose
    is_last: bool = False  # whether this is the last step of its round, if known
    tokens: dict[int, Tensor] = field(default_factory=dict)  # token ids [B, L + 1] in host memory
    received: dict[int, Message] = field(default_factory=dict)
    noted: dict[int, Entry] = field(default_factory=dict)
    came: dict[int, Symbols] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Token ids that came with an activation, on the stage's device."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Symbols | None] = field(default_factory=dict)
    squared_norm_after: float | None = None
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    """Loss and weight of each micro-batch; read at the end, because reading waits for the device."""
    backwards_left: int = 0
    gradients_left: int = 0  # gradients of this step that the next stage has not sent yet

    @property
    def loss(self) -> float:
        """Weighted sum of the losses, in their order."""
        total = 0.0
        for loss, weight in self.losses:  # not `sum`, which rounds differently since Python 3.12
            total += loss.item() * weight
        return total


class StageWorker:
    """One pipeline stage with its links. `upstream` is None on the first stage, `downstream` on the last."""

    def __init__(
        self, stage: Stage, settings: WorkerSettings, upstream: LinkEnd | None, downstream: LinkEnd | None
    ) -> None:
        self.stage = stage
        self.settings = settings
        self.transcript = NoTranscript()  # set to another one if the run is audited by recomputation
        self.timing = Timing()
        self.activity = ActivityMeter()
        self.gradient_norm = math.nan  # gradient norm of the whole replica in the last step that this stage applied
        self.learning_rate = math.nan
        self.was_last = False  # whether the last step was marked as the last of its round
        self.applied = 0  # steps of the round that are applied, those of earlier holders of the slot included
        self.faults = NO_FAULTS  # faults to be injected into its computation
        self._may_repeat = False
        """Whether a norm may come that no step waits for: the first step after `resume` repeats the one before."""
        self._upstream = upstream
        self._downstream = downstream
        self._pending_step: int | None = None
        self._norm_to_announce: float | None = None
        self._own_squared = 0.0  # squared gradient norm of this stage in the newest step
        self._copies = copies_of(stage.device)
        self._sender = Sender(stage.device)
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

    @property
    def is_computing(self) -> bool:
        """Whether the stage computes or sends what it has computed, and does not only wait. For other threads."""
        return not self.activity.waits or self._sender.is_busy

    def drop(self) -> None:
        """Discard an incomplete step, and a step that waits for its gradient norm. Must not be called during a step."""
        self._pending_step = self._norm_to_announce = None
        self.stage.drop()

    def suspend(self) -> tuple[int, bool]:
        """Discard an incomplete step, but not one that waits for its gradient norm. Must not be called during a step.

        Returns the steps of the round that are applied, and whether another one waits.
        """
        if self._pending_step is None:
            self.stage.drop()
        return self.applied, self._pending_step is not None

    def resume(self, step: int, keeps: bool, is_same: bool) -> None:
        """Go on at a step of the round, counted from 0, after `suspend` and `relink`, or at the start of the round.

        The group has applied all earlier steps, and this stage them or all but one if it `keeps` its own. A stage that
        lacks the last one gets the norm with the first activation, because each stage that knows the norm repeats it.
        `is_same`: whether all stages of the group have trained the round since its start.
        """
        self.transcript.begin(step if is_same else 0)  # a new stage lacks the messages before, which neighbours sign
        if not keeps:
            self.drop()
            self.gradient_norm = math.nan
        elif self.applied == step:
            self.drop()
            # A stage that began at this step knows no norm. Then all later stages have applied the step before.
            self._norm_to_announce = None if math.isnan(self.gradient_norm) else self.gradient_norm
        if self._pending_step is None:
            self.applied = step
        self._may_repeat = True

    def relink(self, upstream: LinkEnd | None, downstream: LinkEnd | None) -> None:
        """Replace the links to the same stages, between two inner loops or after `drop`."""
        self._upstream, self._downstream = upstream, downstream

    def inner_step(
        self, round_: int, step: int, global_step: int, tokens: Tensor | None, is_last: bool = False
    ) -> float | None:
        """Train one inner step, and return the loss on the last stage, otherwise None.

        `tokens` [batch, L + 1] is given on the first stage. With `is_last`, the first stage tells all others that the
        inner loop ends with this step.
        """
        if step == 0:
            self.transcript.begin()
            self.applied, self._may_repeat = 0, False
        count = self.settings.micro_batches
        under_way = _Step(round_, step, global_step, ACTIVATION, is_last, backwards_left=count, gradients_left=count)
        if tokens is not None:
            under_way.tokens = dict(enumerate(tokens.chunk(self.settings.micro_batches)))
        self._run(self._train_events, under_way)
        self._pending_step, self._may_repeat = global_step, False
        self.was_last = under_way.is_last
        if self.stage.spec.is_first:
            own_norm = self.stage.optimizer.gradient_norm().item()
            self._apply(math.sqrt(self._squared_norm(under_way, own_norm, self._downstream)))
        # After a step, both neighbours have received all earlier messages, so they have acknowledged nearly all of
        # them. Unacknowledged messages would fill the memory of this stage.
        most = ACKNOWLEDGED_EVERY + self.settings.micro_batches
        for link in (self._upstream, self._downstream):
            if link is not None and (found := link.unacknowledged) > most:
                raise link.accuse(f"found {found} unacknowledged messages, expected at most {most}")
        return under_way.loss if self.stage.spec.is_last else None

    def flush(self, round_: int) -> None:
        """End the inner loop: forward the last gradient norm, so that every stage has applied its step.

        After `resume` at the end of the loop, a first stage that has trained no step knows no norm.
        """
        steps = self.applied + (self._pending_step is not None)
        if self._upstream is not None:
            if self.transcript.ends_both_ways:
                self._send_flush(self._upstream, Way.SENT_GRADIENT, LinkHeader(purpose=FLUSH, round=round_))
            with self._blaming(self._upstream):
                message = self._receive(self._upstream, FLUSH, round_, 0, 0)
                has_norm = message.header.HasField("gradient_norm")
                if not has_norm and not (self._may_repeat and self._pending_step is None):
                    raise MalformedMessage("found no gradient norm at the end of an inner loop")
                self.transcript.received(Way.RECEIVED_ACTIVATION, message)
                if has_norm:
                    self._apply_told(message.header.gradient_norm)
        self.faults.computes(round_, steps, 0, is_forward=True)
        if self._downstream is not None:
            header = self._header(FLUSH, round_, 0, 0, announces_norm=True)
            self._send_flush(self._downstream, Way.SENT_ACTIVATION, header)
            if self.transcript.ends_both_ways:
                with self._blaming(self._downstream):
                    message = self._receive(self._downstream, FLUSH, round_, 0, 0)
                    self.transcript.received(Way.RECEIVED_GRADIENT, message)
        self._norm_to_announce, self._may_repeat = None, False

    def _send_flush(self, link: LinkEnd, way: Way, header: LinkHeader) -> None:
        link.send(self.transcript.expect(way, header).note(Message(header)))

    def evaluate(self, round_: int, batches: Sequence[Tensor], count: int) -> tuple[float, int] | None:
        """Return (mean loss, number of rows) over `count` batches on the last stage, otherwise None.

        `batches` [B, L + 1] are given on the first stage; B is at most the size of a micro-batch.
        """
        under_way = _Step(round_, 0, 0, EVALUATION, tokens=dict(enumerate(batches)))
        spec = self.stage.spec
        self._run(forward_only(spec.index, spec.count, count), under_way)
        rows = sum(weight for _, weight in under_way.losses)
        return (under_way.loss / rows, rows) if spec.is_last else None

    def _run(self, events: Sequence[ScheduleEvent], under_way: _Step) -> None:
        self._sender.begin()
        try:
            for event in events:
                self.activity.action = event.action
                self._actions[event.action](under_way, event.micro_batch)
                self.activity.done += 1
        except LinkError:
            self._sender.finish()  # raises the error that ended the link, if it was one of sending
            raise
        self._sender.finish()

    # ---- compute ----

    def _forward(self, under_way: _Step, index: int) -> None:
        if under_way.purpose == ACTIVATION:
            self.faults.computes(under_way.round, under_way.step, index, is_forward=True)
        started = time.perf_counter()
        message = under_way.received.pop(index, None)
        came = under_way.came.pop(index, None)
        host, tokens = under_way.tokens[index], under_way.inputs.pop(index, None)
        if tokens is None:
            (tokens,) = self._copies.to_device((host,))
        is_evaluation = under_way.purpose == EVALUATION
        with computing("evaluation" if is_evaluation else "forward", self.stage.device):
            if is_evaluation:
                output = self.stage.evaluate(tokens, came)
            else:
                output = self.stage.forward(index, tokens, came, self.settings.micro_batches)
        if message is not None and self._upstream is not None:
            under_way.noted.pop(index).wait()
            self._upstream.recycle(message)
        if self.stage.spec.is_last:
            under_way.losses.append((output, len(host) if is_evaluation else 1))
        else:
            under_way.outputs[index] = output
        self.timing.compute += time.perf_counter() - started

    def _backward(self, under_way: _Step, index: int) -> None:
        self.faults.computes(under_way.round, under_way.step, index, is_forward=False)
        started = time.perf_counter()
        message = under_way.received.pop(index, None)
        hop = self.stage.spec.index - 1
        own_key = noise_key(self.settings.seed, self.settings.replica, hop, under_way.global_step, index)
        (key,) = self._copies.to_device((own_key,))
        with computing("backward", self.stage.device):
            under_way.gradients[index] = self.stage.backward(index, under_way.came.pop(index, None), key)
        if message is not None and self._downstream is not None:
            under_way.noted.pop(index).wait()
            self._downstream.recycle(message)
        under_way.backwards_left -= 1
        self.timing.compute += time.perf_counter() - started

    def _squared_norm(self, under_way: _Step, own_norm: float, source: LinkEnd | None) -> float:
        """Return the squared gradient norm of this stage and all later stages; values came to it from `source`.

        Every gradient was finite on arrival. So if the norm is not finite here, values from a neighbour caused it. This
        stage must not forward it, or the next neighbour would blame this stage.
        """
        self._own_squared = own = own_norm**2
        total = own + (under_way.squared_norm_after or 0.0)
        if not (math.isfinite(own) and total <= LARGEST_NORM**2):
            self._fail(source, f"the squared gradient norm became {total}")
        return total

    def _fail(self, link: LinkEnd | None, reason: str) -> NoReturn:
        """End the step because its values are not finite.

        `link`: link on which the input values arrived. Raises PeerAtFault. On the first stage, which computes from text
        alone, raises HeteroPPError.
        """
        if link is None:
            stage = f"stage {self.stage.spec.index} of {self.settings.replica}"
            raise HeteroPPError(f"{stage} diverged: {reason}; {REMEDIES}")
        raise link.accuse(f"{reason}, computed from received values: training diverged, or these values are wrong")

    def _require_finite(self, symbols: Symbols, link: LinkEnd | None, what: str) -> None:
        """Fail as `_fail` does unless `symbols` are finite, so that no neighbour refuses them."""
        if not all(is_finite(one) for one in symbols if one.is_floating_point()):
            self._fail(link, f"{what} became infinite or not a number")

    def _apply(self, norm: float) -> None:
        """Apply the optimizer step that was waiting for the gradient norm of the whole replica."""
        if self._pending_step is None:
            raise AssertionError("no step waits for a gradient norm")
        started = time.perf_counter()
        with computing("optimizer step", self.stage.device):
            norm_here = torch.full((), norm, device=self.stage.device)  # a copy from the host would wait for the device
            self.learning_rate = self.stage.step(self._pending_step, norm_here)
        self.gradient_norm = self._norm_to_announce = norm
        self._pending_step = None
        self.applied += 1
        self.timing.compute += time.perf_counter() - started

    def _apply_told(self, norm: float) -> None:
        """Apply the waiting step with a norm from the previous stage, which must be at least this stage's own norm."""
        if self._pending_step is None and self._may_repeat and 0 <= norm <= LARGEST_NORM:
            self.gradient_norm = self._norm_to_announce = norm  # for later stages, which may lack it
            self._may_repeat = False
            return
        if self._pending_step is None:
            raise MalformedMessage("found a gradient norm, but no step is waiting for one")
        least = math.sqrt(self._own_squared) * (1 - _ROUNDING)
        if not least <= norm <= LARGEST_NORM:
            raise MalformedMessage(f"found a gradient norm of {norm}, expected {least:.6g} to {LARGEST_NORM:.3g}")
        self._apply(norm)

    # ---- messages ----

    @contextmanager
    def _blaming(self, link: LinkEnd) -> Iterator[None]:
        """Abort the link and raise PeerAtFault for a malformed message on it."""
        try:
            yield
        except MalformedMessage as error:
            raise link.accuse(str(error)) from error

    def _receive_activation(self, under_way: _Step, index: int) -> None:
        assert self._upstream is not None
        with self._blaming(self._upstream):
            message = self._receive(self._upstream, under_way.purpose, under_way.round, under_way.step, index)
            header, length = message.header, self.settings.sequence_length
            least = 1 if under_way.purpose == EVALUATION else self.settings.micro_batch_size
            most = self.settings.micro_batch_size
            if not least <= header.rows <= most:
                found = f"found {header.rows} sequences in a micro-batch"
                raise MalformedMessage(f"{found}, expected {least} to {most}")
            if not message.tensors:
                raise MalformedMessage("found no token ids with an activation")
            packed, *wire = message.tensors
            tokens = unpack_tokens(packed, self.stage.module.shape.vocabulary, header.rows, length)
            shape = (header.rows, length, self.stage.boundary.dimensions)
            symbols = self.stage.boundary.format.from_wire(tuple(wire), shape)
            under_way.noted[index] = self.transcript.received(Way.RECEIVED_ACTIVATION, message, symbols)
            under_way.tokens[index] = tokens
            under_way.inputs[index], *came = self._copies.to_device((tokens, *symbols))
            under_way.came[index] = tuple(came)
            under_way.received[index] = message
            if header.is_last and (index > 0 or under_way.purpose == EVALUATION):
                raise MalformedMessage(
                    "found the mark of a round's last step, expected it only on the first micro-batch"
                )
            under_way.is_last |= header.is_last
            if header.HasField("gradient_norm"):
                self._apply_told(header.gradient_norm)
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
        entry = self.transcript.expect(Way.SENT_ACTIVATION, header)
        self._post(self._downstream, symbols, partial(self._activation, header, packed, self._upstream, entry))

    def _activation(
        self, header: LinkHeader, packed: Tensor, source: LinkEnd | None, entry: Entry, symbols: Tensors
    ) -> Message:
        self._require_finite(symbols, source, "an activation")
        return entry.note(Message(header, (packed, *self.stage.boundary.format.to_wire(symbols))), symbols)

    def _receive_gradient(self, under_way: _Step, index: int) -> None:
        assert self._downstream is not None
        batch, length = self.settings.micro_batch_size, self.settings.sequence_length
        shape = (batch, length, self.stage.boundary.dimensions)
        with self._blaming(self._downstream):
            message = self._receive(self._downstream, GRADIENT, under_way.round, under_way.step, index)
            symbols = self.stage.boundary.format.from_wire(message.tensors, shape)
            under_way.noted[index] = self.transcript.received(Way.RECEIVED_GRADIENT, message, symbols)
            under_way.came[index] = self._copies.to_device(symbols)
            under_way.received[index] = message
            under_way.gradients_left -= 1
            # The last gradient of a step has the squared norm; a NaN would reach every weight.
            is_due, squared = under_way.gradients_left == 0, message.header.squared_norm
            if message.header.HasField("squared_norm") != is_due:
                found, expected = ("no", "one") if is_due else ("a", "none before the last")
                raise MalformedMessage(f"found {found} squared norm on a gradient of a step, expected {expected}")
            if is_due:
                if not 0 <= squared <= LARGEST_NORM**2:
                    raise MalformedMessage(f"found a squared gradient norm of {squared}, expected a finite one")
                under_way.squared_norm_after = squared

    def _send_gradient(self, under_way: _Step, index: int) -> None:
        assert self._upstream is not None
        symbols = under_way.gradients.pop(index)
        assert symbols is not None
        header = self._header(GRADIENT, under_way.round, under_way.step, index)
        ends, tensors = None, symbols
        if under_way.backwards_left == 0:
            ends, tensors = under_way, (*symbols, self.stage.optimizer.gradient_norm())
        source = self._downstream or self._upstream
        entry = self.transcript.expect(Way.SENT_GRADIENT, header)
        self._post(self._upstream, tensors, partial(self._gradient, header, source, ends, entry))

    def _gradient(
        self, header: LinkHeader, source: LinkEnd, ends: _Step | None, entry: Entry, tensors: Tensors
    ) -> Message:
        """Return the message of a gradient. With the last one of a step, `ends`, comes the norm of this stage."""
        symbols = tensors if ends is None else tensors[:-1]
        self._require_finite(symbols, source, "a gradient")
        if ends is not None:
            header.squared_norm = self._squared_norm(ends, tensors[-1].item(), source)
        return entry.note(Message(header, self.stage.boundary.format.to_wire(symbols)), symbols)

    def _post(self, link: LinkEnd, tensors: Tensors, message_of: MakeMessage) -> None:
        """Send a message of these tensors: now, or beside the computation if copies take place there."""
        started = time.perf_counter()
        arriving = self._copies.to_host(tensors)
        if self._copies.overlaps:
            self._sender.post(link, arriving, message_of)
            return
        tensors = arriving()
        self.timing.compute += time.perf_counter() - started
        link.send(message_of(tensors))

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
        ended = time.perf_counter()
        computed = min(max(self._sender.copied_at, started), ended) - started  # what was queued on the device
        self.timing.compute += computed
        waited = ended - started - computed
        if link is self._upstream:
            self.timing.waited_previous += waited
        else:
            self.timing.waited_next += waited
        header = message.header
        found = (header.purpose, header.round, header.step, header.micro_batch)
        if self.settings.overlap and header.round != round_:
            raise LinkClosed(f"the neighbouring stage is at round {header.round}, but this stage is at round {round_}")
        expected = (purpose, round_, step, micro_batch)
        if found != expected:
            of = "(purpose, round, step, micro-batch)"
            raise MalformedMessage(f"found a message for {of} {found}, expected {expected}")
        return message
