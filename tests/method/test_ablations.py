"""Parts of a compressed replica that are off by default, compared with their closed formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings, SubspaceOptimizer
from hetero_pp.model.part_settings import BoundarySettings, EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING, ModelSettings, Transformer, initialise
from hetero_pp.pipeline.subspace import perpendicular, random_basis
from hetero_pp.research.settings import AblationSettings
from hetero_pp.research.trainer.replica import (
    OUTPUT_PROJECTIONS,
    AblatedOptimizer,
    SharedSecondMomentAdamW,
    grassmann_step,
    with_ablations,
)
from stages.boundary import boundary_of

WIDTH, RANK = 16, 4
INNER = InnerSettings(learning_rate=0.1, warmup_steps=0, clip_norm=None, final_learning_rate_share=1.0)


@pytest.fixture
def basis() -> Tensor:
    return random_basis(WIDTH, RANK, seed=2)


def _embedding(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(seed)))


def _train(embedding: nn.Parameter, basis: Tensor, kind: EmbeddingTraining, steps: int = 3) -> None:
    optimizer = SubspaceOptimizer({EMBEDDING: embedding}, INNER, 100, basis, kind)
    optimizer.perpendicular = perpendicular(embedding.detach(), basis)
    for step in range(steps):
        embedding.grad = _embedding(seed=step + 1).detach().clone()
        optimizer.step(step, torch.tensor(1.0))


@pytest.mark.parametrize("kind", ["free", "coefficients", "projected"])
def test_only_free_training_leaves_the_subspace(kind: EmbeddingTraining, basis: Tensor) -> None:
    embedding = _embedding()
    table = perpendicular(embedding.detach(), basis)
    start = embedding.detach().clone()
    _train(embedding, basis, kind)
    moved = embedding.detach() - start
    assert moved.norm() > 0.1
    outside = (perpendicular(embedding.detach(), basis) - table).norm()
    assert (outside < 1e-5) == (kind != "free")


def test_coefficients_are_adamw_on_c(basis: Tensor) -> None:
    embedding = _embedding()
    table = perpendicular(embedding.detach(), basis)
    expected = nn.Parameter(embedding.detach() @ basis)
    adamw = torch.optim.AdamW([expected], lr=0.1, betas=INNER.betas, weight_decay=INNER.weight_decay)
    for step in range(3):
        expected.grad = _embedding(seed=step + 1).detach() @ basis
        adamw.step()
    _train(embedding, basis, "coefficients")
    torch.testing.assert_close(embedding.detach(), table + expected.detach() @ basis.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("choice", "projected"), [("w_p1", OUTPUT_PROJECTIONS[:1]), ("both", OUTPUT_PROJECTIONS)])
def test_weights_are_projected_after_a_step(basis: Tensor, choice: str, projected: tuple[str, ...]) -> None:
    ablations = AblationSettings.model_validate({"weight_projection": choice})
    settings = InnerSettings(learning_rate=1e-9, warmup_steps=0)
    module = Transformer(ModelSettings(width=WIDTH, heads=2, feed_forward=8, layers=1).resolve(10))
    initialise(module, 1)
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    optimizer = AblatedOptimizer(dict(module.named_parameters()), settings, 4, basis, "free", ablations)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0, optimizer.gradient_norm())
    for name, parameter in module.named_parameters():
        expected = basis.double() @ basis.double().T @ before[name] if name.endswith(projected) else before[name]
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_modified_adamw_keeps_an_update_in_the_subspace(basis: Tensor) -> None:
    weight = nn.Parameter(torch.zeros(WIDTH, 6))
    optimizer = SharedSecondMomentAdamW([{"params": [weight], "shared_dim": 0}], 0.1, (0.9, 0.95), 1e-8)
    plain = nn.Parameter(torch.zeros(WIDTH, 6))
    adamw = torch.optim.AdamW([plain], lr=0.1, betas=(0.9, 0.95))
    for step in range(3):
        inside = basis @ torch.randn(RANK, 6, generator=torch.Generator().manual_seed(step))
        weight.grad, plain.grad = inside.clone(), inside.clone()
        optimizer.step()
        adamw.step()

    def outside(matrix: Tensor) -> float:
        return float((matrix - basis @ (basis.T @ matrix)).norm() / matrix.norm())

    assert outside(weight.detach()) < 1e-5
    assert outside(plain.detach()) > 0.05


def test_modified_adamw_is_adamw_where_nothing_is_shared() -> None:
    ours, theirs = nn.Parameter(torch.ones(1, 7)), nn.Parameter(torch.ones(1, 7))
    groups = [{"params": [ours], "shared_dim": 0, "weight_decay": 0.1}]
    optimizer = SharedSecondMomentAdamW(groups, 0.1, (0.9, 0.95), 1e-8)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        ours.grad = torch.randn(1, 7, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_grassmann_step_keeps_columns_orthonormal_and_catches_more(basis: Tensor) -> None:
    direction = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(4))
    gradients = torch.randn(50, 2, generator=torch.Generator().manual_seed(5)) @ direction
    moved = grassmann_step(basis, gradients)
    torch.testing.assert_close(moved.T @ moved, torch.eye(RANK), rtol=1e-5, atol=1e-5)
    assert (gradients @ moved).norm() > 1.01 * (gradients @ basis).norm()
    assert (moved - basis).norm() < 0.3


def test_a_stale_split_stays(basis: Tensor) -> None:
    fresh = boundary_of(BoundarySettings(rank=RANK), WIDTH, basis)
    stale = with_ablations(fresh, AblationSettings(adaptation="stale"))
    first, later = _embedding(1), _embedding(2)
    for boundary in (stale, fresh):
        boundary.split(first)
        boundary.split(later)
    assert stale.perpendicular is not None and fresh.perpendicular is not None
    torch.testing.assert_close(stale.perpendicular, perpendicular(first.detach(), basis))
    torch.testing.assert_close(fresh.perpendicular, perpendicular(later.detach(), basis))
