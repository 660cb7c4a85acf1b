"""Ablations of Het-PP's Table 5 against closed forms: weight projection, Grassmann updates, modified AdamW."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings, SubspaceOptimizer
from hetero_pp.pipeline.subspace import random_basis
from hetero_pp.research.settings import AblationSettings
from hetero_pp.research.trainer.replica import AblatedOptimizer, SharedSecondMomentAdamW, grassmann_step

D, K = 12, 3
INNER = InnerSettings.model_validate({"steps": 5, "learning_rate": 0.1, "warmup_steps": 0})


def _randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("projects", "projected"), [("w_p1", ["wo"]), ("both", ["wo", "w2"])])
def test_projected_weights_write_into_the_subspace(projects: Literal["w_p1", "both"], projected: list[str]) -> None:
    """After a step W is U U^T W' where W' is that of the optimizer without projection; other weights are W'."""
    names = ("layers.0.attention.wo.weight", "layers.0.feed_forward.w2.weight", "layers.0.feed_forward.w1.weight")
    weights = {name: nn.Parameter(_randn(D, D, seed=seed)) for seed, name in enumerate(names)}
    plain, basis = copy.deepcopy(weights), random_basis(D, K, seed=2)
    ablations = AblationSettings.model_validate({"weight_projection": projects})
    for parameters, optimizer in (
        (plain, SubspaceOptimizer(plain, INNER, 5, basis, "free")),
        (weights, AblatedOptimizer(weights, INNER, 5, basis, "free", ablations)),
    ):
        for seed, parameter in enumerate(parameters.values()):
            parameter.grad = _randn(D, D, seed=10 + seed)
        optimizer.step(0, torch.tensor(1.0))
    for name, weight in weights.items():
        expected = plain[name].detach().double()
        if name.split(".")[-2] in projected:
            expected = basis.double() @ basis.double().T @ expected
        torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_shared_second_moment_is_the_mean_over_the_width(shared: int) -> None:
    """Two steps of AdamW by hand, in float64, where v is the mean of the squared gradients along one dimension."""
    weight, gradients = nn.Parameter(_randn(4, 6)), [_randn(4, 6, seed=seed) for seed in (2, 3)]
    expected = weight.detach().double()
    group = {"params": [weight], "weight_decay": 0.1, "shared_dim": shared}
    optimizer = SharedSecondMomentAdamW([group], lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    first, second = torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for step, gradient in enumerate(gradients, 1):
        weight.grad = gradient
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double().square().mean(shared, keepdim=True)
        update = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected * (1 - 0.05 * 0.1) - 0.05 * update
    torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=0)


def test_a_grassmann_step_turns_a_line_by_its_angle_towards_the_gradients() -> None:
    """With K = 1 the step is (u + size v) / sqrt(1 + size^2), where v is the part of G^T G u outside u, of norm 1."""
    basis, gradients = random_basis(D, 1, seed=4), _randn(20, D, seed=5)
    toward = (gradients.T @ gradients @ basis).double()
    toward -= basis.double() @ (basis.double().T @ toward)
    expected = (basis.double() + 0.3 * toward / toward.norm()) / (1 + 0.3**2) ** 0.5
    torch.testing.assert_close(grassmann_step(basis, gradients, 0.3).double(), expected, atol=1e-6, rtol=0)


def test_a_grassmann_step_keeps_columns_orthonormal_and_catches_more_of_the_gradients() -> None:
    basis, gradients = random_basis(D, K, seed=4), _randn(20, D, seed=5)
    moved = grassmann_step(basis, gradients, 0.2)
    torch.testing.assert_close(moved.T @ moved, torch.eye(K), atol=1e-6, rtol=0)
    assert (gradients @ moved).norm() > (gradients @ basis).norm()
    cosines = torch.linalg.svdvals(basis.double().T @ moved.double())
    assert cosines.min() == pytest.approx(1 / (1 + 0.2**2) ** 0.5, abs=1e-6)  # the largest angle has the tangent 0.2
