"""Messages that no honest neighbour of a stage sends are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stage_groups import (
    BATCH,
    INNER,
    LENGTH,
    SEED,
    SHAPE,
    TIMEOUT,
    TOTAL,
    UNLIMITED,
    Setup,
    batch_of,
    build_stage,
    worker_settings,
)
from torch import Tensor

from hetero_pp.config.lines import LinkSpec
from hetero_pp.core.errors import PeerAtFault
from hetero_pp.link.in_process import InProcessLinkEnd, in_process_pair
from hetero_pp.link.protocol import Message, pack_tokens
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, FLUSH, GRADIENT, LinkHeader
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import EMBEDDING, Transformer, build_part, initialise, parameters_of
from hetero_pp.pipeline.coefficients import Floats
from stages.boundary import Boundary
from stages.stage import Stage
from stages.worker import StageWorker


class Alone:
    """One of two stages and the far end of its link, from which a test sends."""

    def __init__(self, index: int, setup: Setup | None = None) -> None:
        self.setup = Setup(cuts=(0, 2, 4), micro_batches=1) if setup is None else setup
        spec = LinkSpec("g.0-1", "g.0", "g.1", UNLIMITED, UNLIMITED)
        first, second = in_process_pair(spec, seed=1)
        own, self.far = (first, second) if index == 0 else (second, first)
        stage = build_stage(self.setup, index)
        whole = Transformer(SHAPE)
        initialise(whole, SEED)
        stage.split_embedding(parameters_of(whole)[EMBEDDING].detach())
        ends = {"upstream": own if index == 1 else None, "downstream": own if index == 0 else None}
        self.worker = StageWorker(stage, worker_settings(self.setup), **ends)

    def step(self, step: int = 0) -> float | None:
        tokens = batch_of(0) if self.worker.stage.spec.is_first else None
        return self.worker.inner_step(1, step, step, tokens)


def _activation(
    wire: Tensor | None = None, packed: Tensor | None = None, purpose: int = ACTIVATION, **header: float
) -> Message:
    wire = torch.zeros(BATCH, LENGTH, SHAPE.width) if wire is None else wire
    packed = pack_tokens(batch_of(0), SHAPE.vocabulary) if packed is None else packed
    fields: dict[str, Any] = {"purpose": purpose, "round": 1, "step": 0, "micro_batch": 0, "rows": BATCH} | header
    return Message(LinkHeader(**fields), (packed, wire))


def _gradient(wire: Tensor | None = None, **header: float) -> Message:
    wire = torch.zeros(BATCH, LENGTH, SHAPE.width) if wire is None else wire
    honest = {"purpose": GRADIENT, "round": 1, "step": 0, "micro_batch": 0, "squared_norm": 1.0}
    fields: dict[str, Any] = honest | header
    return Message(LinkHeader(**fields), (wire,))


def test_what_an_honest_neighbour_sends_is_taken() -> None:
    last, first = Alone(1), Alone(0)
    last.far.send(_activation())
    assert last.step() == pytest.approx(math.log(SHAPE.vocabulary), rel=0.2)
    assert last.far.receive(TIMEOUT).header.purpose == GRADIENT
    first.far.send(_gradient())
    first.step()
    assert first.worker.gradient_norm == pytest.approx(1.0)


PACKED = pack_tokens(batch_of(0), SHAPE.vocabulary)
WITHOUT_NORM = _gradient()
WITHOUT_NORM.header.ClearField("squared_norm")
ACTIVATIONS = {
    "width": _activation(torch.zeros(BATCH, LENGTH, SHAPE.width - 1)),
    "rows": _activation(torch.zeros(BATCH - 1, LENGTH, SHAPE.width)),
    "length": _activation(torch.zeros(BATCH, LENGTH + 1, SHAPE.width)),
    "two dimensions": _activation(torch.zeros(BATCH * LENGTH, SHAPE.width)),
    "dtype": _activation(torch.zeros(BATCH, LENGTH, SHAPE.width, dtype=torch.bfloat16)),
    "not finite": _activation(torch.full((BATCH, LENGTH, SHAPE.width), math.nan)),
    "micro-batch": _activation(micro_batch=1),
    "step": _activation(step=1),
    "round": _activation(round=2),
    "evaluation": _activation(purpose=EVALUATION),
    "flush": _activation(purpose=FLUSH),
    "norm without a step": _activation(gradient_norm=1.0),
    "no tensors": Message(_activation().header, ()),
    "no token ids": Message(_activation().header, _activation().tensors[1:]),
    "three tensors": Message(_activation().header, (*_activation().tensors, torch.zeros(1))),
    "no rows": _activation(rows=0),
    "few rows": _activation(rows=BATCH - 1),
    "many rows": _activation(rows=2**32 - 1),
    "token ids, short": _activation(packed=PACKED[:-1]),
    "token ids, long": _activation(packed=torch.cat([PACKED, PACKED[:1]])),
    "token ids, fp32": _activation(packed=PACKED.float()),
    "token ids, empty": _activation(packed=torch.zeros(0, dtype=torch.uint8)),
    "token ids, of two dimensions": _activation(packed=PACKED.view(1, -1)),
}
GRADIENTS = {
    "width": _gradient(torch.zeros(BATCH, LENGTH, SHAPE.width + 1)),
    "rows": _gradient(torch.zeros(1, LENGTH, SHAPE.width)),
    "dtype": _gradient(torch.zeros(BATCH, LENGTH, SHAPE.width, dtype=torch.uint8)),
    "micro-batch": _gradient(micro_batch=1),
    "step": _gradient(step=3),
    "activation": _gradient(purpose=ACTIVATION),
    "no tensors": Message(_gradient().header, ()),
    "two tensors": Message(_gradient().header, _gradient().tensors * 2),
    "no norm": WITHOUT_NORM,
    **{f"a norm of {norm}": _gradient(squared_norm=norm) for norm in (math.nan, math.inf, -1.0)},
}
SECOND = {
    **{f"a norm of {norm}": _activation(step=1, gradient_norm=norm) for norm in (math.nan, math.inf, -1.0)},
    "no norm for the step before": _activation(step=1),
    # Otherwise a neighbour could make this stage take an unclipped step.
    "a norm of all stages below its own": _activation(step=1, gradient_norm=0.0),
}
"""Activations of the second step. Its first one has to bring the norm that the first step waits for."""


@pytest.mark.parametrize("message", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_that_do_not_belong_here(message: Message) -> None:
    last = Alone(1)
    last.far.send(message)
    with pytest.raises(PeerAtFault) as refused:
        last.step()
    assert refused.value.peer == "g.0"


@pytest.mark.parametrize("message", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_belong_here(message: Message) -> None:
    first = Alone(0)
    first.far.send(message)
    with pytest.raises(PeerAtFault):
        first.step()


@pytest.mark.parametrize("message", SECOND.values(), ids=SECOND)
def test_activations_that_do_not_belong_to_the_second_step(message: Message) -> None:
    last = Alone(1)
    last.far.send(_activation(torch.randn(BATCH, LENGTH, SHAPE.width, generator=torch.Generator().manual_seed(1))))
    last.step()
    last.far.send(message)
    with pytest.raises(PeerAtFault):
        last.step(1)


def test_compressed_stages_expect_coefficients() -> None:
    setup = Setup(cuts=(0, 2, 4), micro_batches=1, rank=8)
    last = Alone(1, setup)
    last.far.send(_activation(torch.zeros(BATCH, LENGTH, SHAPE.width)))
    with pytest.raises(PeerAtFault, match="8"):
        last.step()


def test_a_token_id_beyond_the_vocabulary() -> None:
    shape = SHAPE.model_copy(update={"vocabulary": 50})
    spec = StageSpec(1, 2, range(2, 4))
    module = build_part(shape, spec)
    initialise(module, SEED)
    stage = Stage(spec, module, Boundary(SHAPE.width, Floats(torch.float32)), INNER, TOTAL)
    first, second = in_process_pair(LinkSpec("g.0-1", "g.0", "g.1", UNLIMITED, UNLIMITED), seed=1)
    worker = StageWorker(stage, worker_settings(Setup(micro_batches=1)), second, None)
    ids = torch.full((BATCH, LENGTH + 1), 49)
    first.send(_activation(packed=pack_tokens(ids, 50)))
    worker.inner_step(1, 0, 0, None)
    ids[3, 5] = 50
    first.send(_activation(packed=pack_tokens(ids, 50), step=1, gradient_norm=1.0))
    with pytest.raises(PeerAtFault, match="50"):
        worker.inner_step(1, 1, 1, None)


def test_a_flush_where_an_activation_was_due_and_the_other_way_round() -> None:
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(_activation(step=1, gradient_norm=1.0))
    with pytest.raises(PeerAtFault):
        last.worker.flush(1)


def test_a_flush_must_bring_the_norm_that_a_step_waits_for() -> None:
    """A missing norm that counts as 0 would leave the step unclipped."""
    last = Alone(1)
    last.far.send(_activation())
    last.step()
    last.far.send(Message(LinkHeader(purpose=FLUSH, round=1)))
    with pytest.raises(PeerAtFault):
        last.worker.flush(1)


def test_a_squared_norm_comes_with_the_last_gradient_alone() -> None:
    first = Alone(0, Setup(cuts=(0, 2, 4), micro_batches=2))
    rows = BATCH // 2
    first.far.send(_gradient(torch.zeros(rows, LENGTH, SHAPE.width)))
    with pytest.raises(PeerAtFault, match="expected none before the last"):
        first.step()


def test_the_last_step_is_marked_on_its_first_micro_batch_alone() -> None:
    last = Alone(1, Setup(cuts=(0, 2, 4), micro_batches=2))
    rows, packed = BATCH // 2, pack_tokens(batch_of(0)[: BATCH // 2], SHAPE.vocabulary)
    for index in range(2):
        wire = torch.zeros(rows, LENGTH, SHAPE.width)
        last.far.send(_activation(wire, packed, rows=rows, micro_batch=index, is_last=bool(index)))
    with pytest.raises(PeerAtFault, match="mark of a round's last step"):
        last.step()


def test_a_stage_blames_who_made_it_overflow_and_sends_nothing_on() -> None:
    """Finite values of one neighbour become infinite here.

    If they were sent on, the other neighbour would blame this stage.
    """
    first = Alone(0)
    largest = torch.finfo(torch.float32).max
    first.far.send(_gradient(torch.full((BATCH, LENGTH, SHAPE.width), largest)))
    with pytest.raises(PeerAtFault, match="norm became") as refused:
        first.step()
    assert refused.value.peer == "g.1"


def test_a_neighbour_that_acknowledges_nothing_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessLinkEnd, "unacknowledged", 1000)
    last = Alone(1)
    last.far.send(_activation())
    with pytest.raises(PeerAtFault, match="found 1000 unacknowledged messages, expected at most 33"):
        last.step()
