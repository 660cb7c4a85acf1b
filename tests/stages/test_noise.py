"""Rounding noise differs by seed, replica, hop, step and micro-batch. The forward pass has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.seeds import seed_of
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import Message, pack_tokens
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, LinkHeader
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import (
    EMBEDDING,
    AfterLayer,
    ModelShape,
    Transformer,
    build_part,
    initialise,
    parameters_of,
)
from hetero_pp.pipeline.coefficients import Bits, noise, noise_key
from hetero_pp.pipeline.subspace import random_basis
from hetero_pp.research.trainer.replica import TableReplica, whole_loss
from stages.boundary import Boundary
from stages.stage import Stage
from stages.worker import StageWorker, WorkerSettings

SHAPE = ModelShape(width=16, layers=4, heads=2, feed_forward=24, vocabulary=32)
RANK, BITS, ROWS, LENGTH = 8, 3, 2, 12
TIMEOUT = 20.0


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one thread, because such small tensors are faster with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tokens(rows: int = ROWS) -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def _boundary(embedding: Tensor) -> Boundary:
    boundary = Boundary(SHAPE.width, Bits(BITS), random_basis(SHAPE.width, RANK, 1))
    boundary.split(embedding)
    return boundary


def _model() -> Transformer:
    model = Transformer(SHAPE)
    initialise(model, 3)
    return model


# ---- keys ----


@dataclass(frozen=True)
class Key:
    """Values that determine the noise of one gradient."""

    seed: int = 5
    replica: str = "home"
    hop: int = 1
    step: int = 23
    micro_batch: int = 4

    @property
    def tensor(self) -> Tensor:
        return noise_key(self.seed, self.replica, self.hop, self.step, self.micro_batch)


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 6},
    "replica": {"replica": "away"},
    "hop": {"hop": 2},
    "step": {"step": 24},
    "micro-batch": {"micro_batch": 5},
    "hop and step that are written alike": {"hop": 12, "step": 3},
    "step and micro-batch that are swapped": {"step": 4, "micro_batch": 23},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_noise_is_another_if_one_thing_is(change: dict[str, Any]) -> None:
    """The two are uncorrelated, also if one is shifted against the other."""
    like = torch.zeros(40_000)
    one, other = noise(Key().tensor, like), noise(replace(Key(), **change).tensor, like)
    assert one.equal(noise(Key().tensor, like))
    assert (one == other).double().mean() < 1e-3
    for shift in (0, 1, -1, 7):
        assert abs(float((one * other.roll(shift)).double().mean())) < 5 / 12 / len(like) ** 0.5


def test_noise_by_hand() -> None:
    """SplitMix64 in numpy's unsigned numbers.

    The key is the start, and an element's index is the number of increments.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(int(Key().tensor)) + np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    expected = ((state >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) / np.float32(2**24) - np.float32(0.5)
    assert noise(Key().tensor, torch.zeros(50, 20)).flatten().tolist() == expected.tolist()
    assert int(Key().tensor) == seed_of(5, "rounding", "home", 1, 23, 4)


# ---- in stages ----


def _last_stage(stages: int, settings: WorkerSettings) -> tuple[StageWorker, Any]:
    """Return the last of so many stages, with the last two layers, and the far end of its link."""
    spec = LinkSpec("a link", "a", "b", LinkShape(), LinkShape())
    far, near = in_process_pair(spec, seed=1)
    stage_spec = StageSpec(stages - 1, stages, range(2, 4))
    module = build_part(SHAPE, stage_spec)
    initialise(module, 3)
    embedding = parameters_of(_model())[EMBEDDING].detach()
    stage = Stage(stage_spec, module, _boundary(embedding), InnerSettings(), 100)
    return StageWorker(stage, settings, near, None), far


@dataclass(frozen=True)
class Step:
    """An inner step of the last stage. Weights and input do not depend on these fields."""

    seed: int = 5
    replica: str = "home"
    stages: int = 2
    round: int = 1
    step: int = 0
    global_step: int = 0

    def run(self) -> tuple[float, list[tuple[Tensor, ...]]]:
        """Return the loss, and what was sent back for each of two equal micro-batches."""
        settings = WorkerSettings(2, ROWS, LENGTH, 0, TIMEOUT, self.replica, self.seed)
        worker, far = _last_stage(self.stages, settings)
        coefficients = torch.randn(ROWS, LENGTH, RANK, generator=torch.Generator().manual_seed(2))
        wire = Bits(BITS).to_wire(Bits(BITS).activation(coefficients))
        packed = pack_tokens(_tokens(), SHAPE.vocabulary)
        for index in range(2):
            header = LinkHeader(purpose=ACTIVATION, round=self.round, step=self.step, micro_batch=index, rows=ROWS)
            far.send(Message(header, (packed, *wire)))
        loss = worker.inner_step(self.round, self.step, self.global_step, None)
        assert loss is not None
        return loss, [tuple(tensor.clone() for tensor in far.receive(TIMEOUT).tensors) for _ in range(2)]


def _equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


STEPS: dict[str, Step] = {
    "seed": Step(seed=6),
    "replica": Step(replica="away"),
    "hop": Step(stages=3),
    "step": Step(step=1, global_step=1),
    "round": Step(round=2, global_step=10),
}


@pytest.mark.parametrize("other", STEPS.values(), ids=STEPS)
def test_what_a_stage_sends_back_is_rounded_with_noise_of_its_own(other: Step) -> None:
    """Only the codes differ. Gradients and scales are equal, and the forward pass is deterministic."""
    (loss, (first, second)), (other_loss, others) = Step().run(), other.run()
    assert loss == other_loss
    assert not first[0].equal(second[0])
    assert first[1].equal(second[1]) and first[2].equal(second[2])
    for one, another in product((first, second), others):
        assert not one[0].equal(another[0])
        assert one[1].equal(another[1]) and one[2].equal(another[2])


def test_what_a_stage_sends_back_is_the_same_if_nothing_is_another() -> None:
    """Steps count over the whole run, so the round of a step does not matter."""
    (_, sent), (_, again) = Step().run(), Step().run()
    assert all(map(_equal, sent, again))
    (_, sent), (_, again) = Step(round=2, step=0, global_step=4).run(), Step(round=1, step=4, global_step=4).run()
    assert all(map(_equal, sent, again))


def test_the_noise_is_that_of_the_stages_key() -> None:
    """Codes of the gradient at the stage's input are floor(c / step + noise) + L / 2."""
    _, sent = Step(stages=4, global_step=9).run()
    embedding = parameters_of(_model())[EMBEDDING].detach()
    boundary, module = _boundary(embedding), build_part(SHAPE, StageSpec(1, 2, range(2, 4)))
    initialise(module, 3)
    coefficients = torch.randn(ROWS, LENGTH, RANK, generator=torch.Generator().manual_seed(2))
    came = boundary.decode_activation(boundary.format.activation(coefficients), _tokens()[:, :-1]).requires_grad_()
    logits = module(came)
    (torch.nn.functional.cross_entropy(logits.flatten(0, 1), _tokens()[:, 1:].flatten()) / 2).backward()
    assert came.grad is not None
    for index, wire in enumerate(sent):
        key = noise_key(5, "home", 2, 9, index)
        assert _equal(wire, boundary.format.to_wire(boundary.encode_gradient(came.grad, key)))


def test_an_evaluation_has_no_noise() -> None:
    losses = []
    for seed in (5, 6):
        worker, far = _last_stage(2, WorkerSettings(1, ROWS, LENGTH, 0, TIMEOUT, "home", seed))
        wire = Bits(BITS).to_wire(Bits(BITS).activation(torch.ones(ROWS, LENGTH, RANK)))
        packed = pack_tokens(_tokens(), SHAPE.vocabulary)
        far.send(Message(LinkHeader(purpose=EVALUATION, round=1, rows=ROWS), (packed, *wire)))
        losses.append(worker.evaluate(1, [], 1))
    assert losses[0] is not None and losses[0] == losses[1]


# ---- in a whole replica ----


def _whole(seed: int = 5, name: str = "home", micro_batches: int = 1) -> TableReplica:
    model = _model()
    boundary = _boundary(parameters_of(model)[EMBEDDING].detach())
    return TableReplica(name, model, InnerSettings(), 100, micro_batches, boundary, [0, 2], seed)


def _gradient(replica: TableReplica, tokens: Tensor, step: int = 0) -> tuple[float, Tensor]:
    """Return the loss, and the gradient of a layer before every boundary."""
    loss = replica.backward(tokens, step)
    gradient = replica.parameters["layers.0.attention.wv.weight"].grad
    assert gradient is not None
    return loss, gradient


def test_a_whole_replicas_noise_is_another_if_one_thing_is() -> None:
    """These are seed, replica and step. The loss is the same, because the forward pass has no noise."""
    loss, gradient = _gradient(_whole(), _tokens())
    again, same = _gradient(_whole(), _tokens())
    assert loss == again and gradient.equal(same)
    for other in (_gradient(_whole(seed=6), _tokens()), _gradient(_whole(name="away"), _tokens())):
        assert other[0] == loss and not other[1].equal(gradient)
    other = _gradient(_whole(), _tokens(), step=1)
    assert other[0] == loss and not other[1].equal(gradient)


def _crossing(replica: TableReplica, tokens: Tensor, keys: Sequence[Tensor]) -> AfterLayer:
    """Apply boundaries after the first and the third layer, each with its own key."""

    def after_layer(layer: int, x_BLD: Tensor) -> Tensor:
        assert replica.boundary is not None
        return replica.boundary.cross(x_BLD, tokens[:, :-1], keys[layer // 2]) if layer in (0, 2) else x_BLD

    return after_layer


def test_every_micro_batch_and_hop_of_a_whole_replica_has_noise_of_its_own() -> None:
    """Two equal micro-batches are compared with two in which each hop has its own key, as in stages."""
    tokens, replica = _tokens(), _whole(micro_batches=2)
    _, found = _gradient(replica, torch.cat([tokens, tokens]), step=7)
    other = _whole()
    for index in range(2):
        keys = [noise_key(5, "home", hop, 7, index) for hop in range(2)]
        (whole_loss(other.module, tokens, _crossing(other, tokens, keys)) / 2).backward()
    expected = other.parameters["layers.0.attention.wv.weight"].grad
    assert expected is not None and found.equal(expected)
    for one, another in (([0, 0], [0, 1]), ([0, 1], [1, 1])):
        gradients = []
        for numbers in (one, another):
            changed = _whole()
            keys = [torch.tensor(number) for number in numbers]
            whole_loss(changed.module, tokens, _crossing(changed, tokens, keys)).backward()
            gradients.append(changed.parameters["layers.0.attention.wv.weight"].grad)
        assert gradients[0] is not None and gradients[1] is not None
        assert not gradients[0].equal(gradients[1])
