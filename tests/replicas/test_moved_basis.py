"""Moves of the basis U (Het-PP Table 5c): the moments of the coefficients follow, in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.research.settings import AblationSettings
from hetero_pp.research.trainer.replica import AblatedOptimizer

VOCABULARY, WIDTH, RANK = 7, 12, 3


def _basis(seed: int) -> Tensor:
    random = torch.randn(WIDTH, RANK, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(random).Q.float().contiguous()


def _optimizer(ablations: AblationSettings) -> AblatedOptimizer:
    """Return an optimizer of an embedding, split by the basis of seed 0."""
    embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2)))
    optimizer = AblatedOptimizer({EMBEDDING: embedding}, InnerSettings(), 20, _basis(0), "coefficients", ablations)
    _split(optimizer)
    return optimizer


def _split(optimizer: AblatedOptimizer) -> None:
    embedding, basis = optimizer.embedding.detach(), optimizer.basis
    optimizer.perpendicular = embedding - embedding @ basis @ basis.T


def _steps(optimizer: AblatedOptimizer, first: int, gradients: Tensor) -> None:
    for step, gradient in enumerate(gradients, first):
        optimizer.embedding.grad = gradient.clone()
        optimizer.step(step, optimizer.gradient_norm())


@pytest.mark.parametrize("ablations", [{}, {"modified_adamw": True}], ids=["adamw", "modified"])
def test_other_axes_of_the_same_subspace_change_no_step(ablations: dict[str, bool]) -> None:
    """AdamW takes equal steps if coefficients change places and signs, and their moments with them."""
    gradients = torch.randn(6, VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3))
    stayed, moved = (_optimizer(AblationSettings.model_validate({"grassmann_every": 1} | ablations)) for _ in range(2))
    for one in (stayed, moved):
        _steps(one, 0, gradients[:3])
    moved.turn(stayed.basis[:, [2, 0, 1]] * torch.tensor([1.0, -1.0, 1.0]))
    for one in (stayed, moved):
        _split(one)
        _steps(one, 3, gradients[3:])
    torch.testing.assert_close(moved.embedding, stayed.embedding)


def test_moments_turn_as_the_coefficients_do() -> None:
    gradient = torch.randn(1, VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(4))
    optimizer, basis = _optimizer(AblationSettings(grassmann_every=1)), _basis(1)
    _steps(optimizer, 0, gradient)
    before = {name: one.clone() for name, one in optimizer.moments().items()}
    turn = optimizer.basis.T @ basis
    optimizer.turn(basis)
    after = optimizer.moments()
    [first], [second] = ([name for name in before if name.endswith(f".{kind}")] for kind in ("exp_avg", "exp_avg_sq"))
    torch.testing.assert_close(after[first], before[first] @ turn)
    torch.testing.assert_close(after[second], before[second] @ turn.square())
    assert all(after[name].equal(before[name]) for name in before.keys() - {first, second})
