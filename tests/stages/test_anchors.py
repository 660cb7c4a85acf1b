"""Anchors (tables by token at a receiving stage), against their formula, torch's AdamW and an undone round."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import AnchorSettings, BoundarySettings, StageSpec
from hetero_pp.model.transformer import ModelSettings, build_part, initialise
from hetero_pp.pipeline.coefficients import format_of, noise_key
from hetero_pp.pipeline.subspace import random_basis
from stages.anchors import Anchors, anchors_of
from stages.boundary import Boundary
from stages.stage import Stage

SHAPE = ModelSettings(width=32, heads=2, feed_forward=48, layers=4).resolve(64)
INNER = InnerSettings(learning_rate=0.01, warmup_steps=0, weight_decay=0.3)
TOTAL = 50
RANKS = [4, None]


def _anchors(rank: int | None, inner: InnerSettings = INNER, seed: int = 3) -> Anchors:
    return Anchors(SHAPE.vocabulary, SHAPE.width, rank, inner, TOTAL, seed)


def _tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocabulary, (3, 9), generator=torch.Generator().manual_seed(1))


def _trained(anchors: Anchors, steps: int) -> None:
    tokens = _tokens()
    goal = torch.randn(3, 9, SHAPE.width, generator=torch.Generator().manual_seed(2))
    for step in range(steps):
        (anchors.add(torch.zeros_like(goal), tokens) - goal).square().sum().backward()
        anchors.step(step)


@pytest.mark.parametrize("rank", RANKS)
def test_they_are_trained_as_torch_trains_them(rank: int | None) -> None:
    """This is AdamW without decay, clipped by their own norm, with the inner loop's learning rate in each step."""
    anchors, tokens = _anchors(rank), _tokens()
    parameters = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in anchors.parameters.items()}
    reference = torch.optim.AdamW(parameters.values(), lr=1.0, betas=INNER.betas, eps=INNER.epsilon, weight_decay=0.0)
    goal = torch.randn(3, 9, SHAPE.width, generator=torch.Generator().manual_seed(2))
    for step in range(5):
        one_hot = nn.functional.one_hot(tokens, SHAPE.vocabulary).float() @ parameters["table"]
        told = one_hot if rank is None else one_hot @ parameters["expansion"]
        (told - goal).square().sum().backward()
        assert torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0) > 1.0
        for group in reference.param_groups:
            group["lr"] = INNER.rates(TOTAL).at(step)
        reference.step()
        reference.zero_grad()
    _trained(anchors, 5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(anchors.parameters[name], parameter)


def test_their_gradient_is_that_at_the_stages_input() -> None:
    """The sender gets the gradient without anchors, at another input.

    The anchors get the full gradient at the stage's input.
    """
    settings = BoundarySettings(rank=8, dtype="fp32", anchors=AnchorSettings(rank=4))
    spec = StageSpec(1, 2, range(2, 4))
    boundary = Boundary(SHAPE.width, format_of(settings), random_basis(SHAPE.width, 8, 1))
    anchors = _anchors(4)
    _trained(anchors, 2)
    stage = Stage(spec, build_part(SHAPE, spec), boundary, INNER, TOTAL, anchors=anchors)
    initialise(stage.module, 3)
    stage.split_embedding(torch.randn(SHAPE.vocabulary, SHAPE.width, generator=torch.Generator().manual_seed(4)))
    tokens = torch.randint(0, SHAPE.vocabulary, (2, 10), generator=torch.Generator().manual_seed(5))
    came = boundary.encode_activation(torch.randn(2, 9, SHAPE.width, generator=torch.Generator().manual_seed(6)))
    loss = stage.forward(0, tokens, came, 1)
    assert loss == stage.evaluate(tokens, came)
    sent = stage.backward(0, None, noise_key(0, "home", 0, 0, 0))

    assert anchors.expansion is not None
    told = anchors.table[tokens[:, :-1]] @ anchors.expansion
    start = (boundary.decode_activation(came, tokens[:, :-1]) + told).detach().requires_grad_()
    logits = stage.module(start)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), start)
    assert sent is not None and boundary.basis is not None
    torch.testing.assert_close(boundary.format.coefficients(sent), gradient @ boundary.basis)
    expected = torch.zeros(SHAPE.vocabulary, 4).index_add(
        0, tokens[:, :-1].flatten(), (gradient @ anchors.expansion.T).flatten(0, 1).detach()
    )
    torch.testing.assert_close(anchors.table.grad, expected)


@pytest.mark.parametrize("rank", RANKS)
def test_state_is_all_that_the_next_steps_depend_on(rank: int | None) -> None:
    first, second = _anchors(rank), _anchors(rank, seed=9)
    _trained(first, 3)
    second.load_tensors(copy.deepcopy(first.tensors()))  # as loaded from a file, while the original is still in use
    _trained(first, 2)
    _trained(second, 2)
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name])


def test_each_hop_of_each_replica_has_its_own_expansion() -> None:
    settings = AnchorSettings(rank="1/8")
    found = [
        anchors_of(settings, SHAPE, INNER, TOTAL, 10, seed, replica, hop)
        for seed, replica, hop in [(1, "a", 0), (1, "a", 1), (1, "b", 0), (2, "a", 0), (1, "a", 0)]
    ]
    expansions = [one.expansion for one in found if one is not None and one.expansion is not None]
    assert [tuple(one.shape) for one in expansions] == [(4, SHAPE.width)] * 5
    assert len({one.sum().item() for one in expansions}) == 4
    assert torch.equal(expansions[0], expansions[4])
    assert anchors_of(None, SHAPE, INNER, TOTAL, 10) is None


def test_they_fade_from_round_to_round() -> None:
    """They fade from half of ten rounds to nine: full in the fifth, a half in the seventh, and zero from the ninth."""
    settings = AnchorSettings(rank=4, fade=(0.5, 0.9))
    assert [settings.weight(round_, 10) for round_ in (1, 5, 6, 7, 9, 10)] == pytest.approx([1, 1, 0.75, 0.5, 0, 0])
    assert AnchorSettings(rank=4).weight(10, 10) == 1
    anchors = anchors_of(settings, SHAPE, INNER, TOTAL, 10, 1, "a", 0)
    assert anchors is not None
    _trained(anchors, 3)
    received, tokens = torch.randn(3, 9, SHAPE.width), _tokens()
    told = anchors.add(received, tokens) - received
    for round_, weight in ((5, 1.0), (7, 0.5), (9, 0.0), (6, 0.75)):
        anchors.enter_round(round_)
        torch.testing.assert_close(anchors.add(received, tokens), received + weight * told)


def test_what_has_faded_learns_nothing_more() -> None:
    anchors = anchors_of(AnchorSettings(rank=4, fade=(0.5, 0.9)), SHAPE, INNER, TOTAL, 10, 1, "a", 0)
    assert anchors is not None
    _trained(anchors, 3)
    before = anchors.table.detach().clone()
    anchors.enter_round(10)
    received = torch.randn(3, 9, SHAPE.width, requires_grad=True)
    anchors.add(received, _tokens()).sum().backward()
    anchors.step(3)
    assert anchors.table.equal(before)
