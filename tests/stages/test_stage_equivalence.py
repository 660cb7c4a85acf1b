"""A group of stages against the whole model: gradients, norms, several steps, and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from stage_groups import INNER, LENGTH, SEED, SHAPE, TOTAL, Group, Setup, Whole, batch_of, ends_of
from torch import Tensor

from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.inner import InnerOptimizer
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.pipeline.coefficients import noise_key
from stages.boundary import Boundary
from stages.worker import StageWorker


def _assert_gradients_are_the_whole_models(group: Group, whole: Whole, tolerance: float) -> None:
    """Compare the gradients of the first step."""
    assert group.gradients[0].keys() == whole.gradients[0].keys() == whole.named.keys()
    largest = max(gradient.abs().max().item() for gradient in whole.gradients[0].values())
    assert largest > 1000 * tolerance  # otherwise the comparison would show nothing
    for name, gradient in whole.gradients[0].items():
        torch.testing.assert_close(group.gradients[0][name], gradient, atol=tolerance, rtol=0, msg=name)


SPLITS = [
    Setup(),
    Setup(micro_batches=1),
    Setup(cuts=(0, 1, 3, 4), micro_batches=2),
    Setup(extra_in_flight=0),
    Setup(extra_in_flight=3, micro_batches=8),
    Setup(cuts=(0, 4)),
]


@pytest.mark.parametrize("setup", SPLITS, ids=str)
def test_steps_have_the_whole_models_gradients_clip_by_its_norm_and_train_alike(setup: Setup) -> None:
    """The gradients of the first step are those of a whole batch without micro-batches."""
    group, whole, undivided = Group(setup), Whole(replace(setup, cuts=(0, 4))), Whole(Setup(micro_batches=1))
    batches = [batch_of(step) for step in range(4)]
    seen: list[list[float]] = [[] for _ in group.workers]
    for index, worker in enumerate(group.workers):
        _note_norms(worker.stage.optimizer, seen[index])
    losses, expected = group.train(batches), whole.train(batches)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert undivided.train(batches[:1]) == pytest.approx(losses[:1], abs=1e-5)
    _assert_gradients_are_the_whole_models(group, undivided, 1e-6)
    assert INNER.clip_norm is not None
    assert min(whole.norms) > 2 * INNER.clip_norm
    for index, norms in enumerate(seen):
        assert norms == pytest.approx(whole.norms, rel=1e-5), f"stage {index}"
        assert group.workers[index].gradient_norm == pytest.approx(norms[-1], rel=1e-6)
        assert group.workers[index].learning_rate == INNER.rates(TOTAL).at(3)
    start = dict(Whole(setup).named)
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)
        assert (parameter - start[name]).abs().max() > 1e-3, name


def _note_norms(optimizer: InnerOptimizer, norms: list[float]) -> None:
    original = optimizer.step

    def noted(step: int, replica_norm: Tensor) -> float:
        norms.append(replica_norm.item())
        return original(step, replica_norm)

    optimizer.step = noted  # type: ignore[method-assign]


def test_a_second_round_goes_on_where_the_first_ended() -> None:
    """A flush applies every step, and no step is applied twice."""
    group, whole = Group(Setup()), Whole(Setup(cuts=(0, 4)))
    first, second = [batch_of(0), batch_of(1)], [batch_of(2), batch_of(3)]
    group.train(first)

    def work(worker: StageWorker) -> None:
        for step, tokens in enumerate(second):
            worker.inner_step(2, step, 2 + step, tokens if worker.stage.spec.is_first else None)
        worker.flush(2)

    group.evaluate([batch_of(9, rows=2)])
    group.together(work)
    whole.train(first + second)
    assert len(group.gradients) == 4
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)


def test_all_stages_hear_from_the_first_which_step_is_the_last() -> None:
    """No other stage knows the number of steps, and all stop after the same one."""
    group, steps = Group(Setup()), 3

    def work(worker: StageWorker) -> list[bool]:
        heard: list[bool] = []
        while not (heard and heard[-1]):
            is_first, step = worker.stage.spec.is_first, len(heard)
            worker.inner_step(1, step, step, batch_of(step) if is_first else None, is_first and step + 1 == steps)
            heard.append(worker.was_last)
        worker.flush(1)
        return heard

    assert group.together(work) == [[False, False, True]] * len(group.workers)


COMPRESSED = [
    Setup(rank=8),
    Setup(rank=1),
    Setup(rank=8, cuts=(0, 2, 4), micro_batches=2),
    Setup(rank=8, cuts=(0, 1, 3, 4), extra_in_flight=0),
]


@pytest.mark.parametrize("setup", COMPRESSED, ids=str)
def test_compressed_it_is_one_graph_with_the_closed_formula(setup: Setup) -> None:
    group, whole, plain = Group(setup), Whole(setup), Whole(Setup(cuts=(0, 4)))
    batches = [batch_of(step) for step in range(3)]
    assert group.train(batches) == pytest.approx(whole.train(batches), abs=1e-5)
    _assert_gradients_are_the_whole_models(group, whole, 1e-5)
    plain.train(batches[:1])
    name = "layers.0.attention.wv.weight"
    assert (group.gradients[0][name] - plain.gradients[0][name]).abs().max() > 1e-3  # compression changes the gradient
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-4, rtol=0, msg=name)


class WholeInFewBits(Whole):
    """One graph with the rounding of the wire at the cuts: codes, scales, and the keyed noise of gradients."""

    def backward(self, tokens: Tensor) -> float:
        total = 0.0
        for index, part in enumerate(tokens.chunk(self.setup.micro_batches)):
            inputs = part[:, :-1]
            embed, predict = ends_of(self.model)
            x = embed(inputs)
            rope = self.model.rope(LENGTH, x.device)
            for layer, block in enumerate(self.model.layers.values()):
                if layer in self.setup.cuts[1:-1]:
                    hop = self.setup.cuts.index(layer) - 1
                    boundary = Boundary(SHAPE.width, self.setup.format, self.setup.basis, self.rest)
                    x = boundary.cross(x, inputs, noise_key(SEED, "g", hop, len(self.norms), index))
                x = block(x, rope)
            loss = next_token_loss(predict(x), part[:, 1:]) / self.setup.micro_batches
            loss.backward()
            total += loss.item()
        return total


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_bits_are_rounded_by_the_link_and_by_nothing_else(bits: int) -> None:
    """There are two steps, so that each has its own noise."""
    setup = Setup(rank=12, cuts=(0, 1, 3, 4), micro_batches=2, bits=bits)
    group, whole, exact = Group(setup), WholeInFewBits(setup), Whole(replace(setup, bits=None))
    batches = [batch_of(0), batch_of(1)]
    assert group.train(batches) == pytest.approx(whole.train(batches), abs=1e-5)
    exact.train(batches)
    for name, parameter in group.parameters().items():
        torch.testing.assert_close(parameter, whole.named[name].detach(), atol=1e-5, rtol=0, msg=name)
    name = "layers.0.attention.wv.weight"
    assert (group.parameters()[name] - exact.named[name]).abs().max() > 1e-4


def test_decay_of_the_embedding_in_a_compressed_group_stays_in_the_subspace() -> None:
    """Gradients are small beside this weight decay, so TE - T_perp shrinks and T_perp stays."""
    setup, inner = Setup(rank=4), INNER.model_copy(update={"weight_decay": 50.0, "warmup_steps": 0, "epsilon": 1e3})
    group = Group(setup, inner)
    before = group.parameters()[EMBEDDING].clone()
    group.train([batch_of(0)])
    u = setup.basis
    assert u is not None
    expected = before - 3e-3 * 50.0 * (before @ u @ u.T)
    torch.testing.assert_close(group.parameters()[EMBEDDING], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("setup", [Setup(), Setup(cuts=(0, 3, 4)), Setup(rank=8), Setup(cuts=(0, 4))], ids=str)
def test_evaluation_is_the_mean_over_rows(setup: Setup) -> None:
    """The last batch is shorter. Each row has the same weight."""
    group, whole = Group(setup), Whole(setup)
    batches = [batch_of(seed, rows) for seed, rows in ((0, 2), (1, 2), (2, 1))]
    *others, last = group.evaluate(batches)
    assert others == [None] * (setup.stages - 1)
    with torch.no_grad():
        expected = whole.loss(torch.cat(batches)).item()
    assert last == (pytest.approx(expected, abs=1e-5), 5)


def _loss(group: Group, batches: Sequence[Tensor]) -> float:
    outcome = group.evaluate(batches)[-1]
    assert outcome is not None
    return outcome[0]


def test_an_evaluation_leaves_nothing_behind() -> None:
    group, untouched = Group(Setup(rank=8)), Group(Setup(rank=8))
    group.evaluate([batch_of(7, rows=2)])
    group.train([batch_of(0)])
    untouched.train([batch_of(0)])
    for name, gradient in untouched.gradients[0].items():
        assert torch.equal(group.gradients[0][name], gradient), name


def test_a_bf16_wire_rounds_what_crosses_and_nothing_else() -> None:
    """With one hop at full rank, the loss is that of the hidden states rounded to bf16."""
    setup = Setup(cuts=(0, 2, 4), dtype=torch.bfloat16)
    group, model = Group(setup), Whole(setup).model
    tokens = batch_of(0, rows=2)
    with torch.no_grad():
        embed, predict = ends_of(model)
        x, rope = embed(tokens[:, :-1]), model.rope(LENGTH, torch.device("cpu"))
        for block in (model.layers["0"], model.layers["1"]):
            x = block(x, rope)
        rounded = x.bfloat16().float()
        assert not torch.equal(rounded, x)
        for block in (model.layers["2"], model.layers["3"]):
            rounded = block(rounded, rope)
        expected = next_token_loss(predict(rounded), tokens[:, 1:]).item()
    assert _loss(group, [tokens]) == pytest.approx(expected, abs=1e-6)
