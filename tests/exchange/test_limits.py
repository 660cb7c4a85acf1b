"""Limits derived from a configuration: no optimizer step and no honest contribution exceeds them, for any gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.model.inner import AdamW, InnerOptimizer, InnerSettings
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.exchange.host import rules_of
from replica_groups.exchange.magnitudes import ContributionLimits, adamw_step, contribution_limits

ROUNDS, STEPS = 12, 3
SHAPES = {
    "layers.0.attention.wq.weight": (24, 16),
    "layers.0.attention.wk.weight": (24, 16),
    "layers.0.norm.weight": (16,),
    "output.weight": (40, 16),
}

Gradients = Callable[[int, Tensor], Tensor]
"""A function of the step and a parameter that returns the parameter's gradient."""


def _steady(step: int, parameter: Tensor) -> Tensor:
    return torch.ones_like(parameter)


def _growing(step: int, parameter: Tensor) -> Tensor:
    """Return gradients that grow by b2 / b1 per step.

    For these, the bound on AdamW's steps is an equality.
    """
    return torch.full_like(parameter, (0.95 / 0.9) ** step)


def _noise(step: int, parameter: Tensor) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9)])
def test_the_bound_on_a_step_is_reached_and_never_exceeded(betas: tuple[float, float]) -> None:
    bound, (first, second) = adamw_step(betas), betas
    assert bound is not None
    largest = 0.0
    for growth in (1.0, second / first, 1.01, 2.0):
        value = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        adamw = AdamW([value], lr=1.0, betas=betas, eps=1e-300, weight_decay=0.0)
        for step in range(100):
            before, value.grad = value.item(), torch.full_like(value, growth**step)
            adamw.step()
            largest = max(largest, abs(value.item() - before))
    assert bound * (1 - 1e-9) > largest * (1 - 1e-7)
    assert largest > 0.95 * bound or betas == (0.9, 0.999)  # these betas need more steps
    assert adamw_step((0.9, 0.5)) is None


@pytest.mark.parametrize("gradients", [_steady, _growing, _noise])
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({}, {}),
        ({"betas": (0.9, 0.999), "warmup_steps": 20}, {}),
        ({"weight_decay": 3.0}, {"compression": {"density": 1.0}}),
        ({"optimizer": "muon"}, {}),
        ({"optimizer": "sgd", "momentum": 0.9}, {}),
        ({}, {"method": "diloco"}),
        ({}, {"method": "diloco_lom"}),
        ({}, {"method": "sparseloco"}),
        ({}, {"compression": {"transform": "dct", "value_bits": 32}}),
    ],
    ids=str,
)
def test_no_honest_contribution_exceeds_the_limits(
    inner: dict[str, Any], outer: dict[str, Any], gradients: Gradients
) -> None:
    """One replica alone, whose gradients always have one direction, so that its parameters move as far as possible."""
    settings = InnerSettings.model_validate({"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01, **inner})
    rows = OuterSettings.model_validate({"rounds": ROUNDS, **outer})
    total = ROUNDS * STEPS
    rates = settings.rates(total)
    limits = ContributionLimits(
        settings, rows, lambda round_: sum(rates.at(step) for step in range((round_ - 1) * STEPS, round_ * STEPS))
    )
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    optimizer = InnerOptimizer(parameters, settings, total)
    limits.begin({name: tensor.detach() for name, tensor in parameters.items()}, 0)
    errors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    closest = 0.0
    for round_ in range(1, ROUNDS + 1):
        start = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        for step in range((round_ - 1) * STEPS, round_ * STEPS):
            for parameter in parameters.values():
                parameter.grad = gradients(step, parameter)
            optimizer.step(step, optimizer.gradient_norm())
        allowed, squares = limits.of(round_), dict[str, float]()
        for name, parameter in parameters.items():
            sent = select(errors[name], start[name] - parameter.detach(), rows.compression).values
            block = "layers.0" if name.startswith("layers") else "output"
            squares[block] = squares.get(block, 0.0) + float(sent.double().square().sum())
            closest = max(closest, float(sent.abs().max()) / allowed[block, "peak"])
        closest = max(closest, *(math.sqrt(total) / allowed[block, "norm"] for block, total in squares.items()))
        assert closest <= 1, round_
    assert closest > 0.01


@pytest.mark.parametrize("aggregation", ["trimmed_mean", "centred_clipping", "geometric_median"])
def test_robust_means_move_parameters_no_further_than_the_mean(aggregation: str) -> None:
    """Weight decay is bounded by how far parameters can have moved, which signs do not bound."""
    found = []
    for name in (aggregation, "mean", "sign"):
        outer = OuterSettings.model_validate({"rounds": ROUNDS, "aggregation": name})
        limits = ContributionLimits(InnerSettings(steps=STEPS, weight_decay=3.0), outer, lambda _: 0.01)
        limits.begin({name: torch.full(shape, 0.1) for name, shape in SHAPES.items()}, 0)
        found.append(limits.of(2)["output", "peak"])
    assert found[0] == found[1] < found[2]


def _spec(inner: dict[str, Any], outer: dict[str, Any] | None = None, **replica: Any) -> RunSpec:
    sizes = {"width": 16, "heads": 2, "feed_forward": 24, "layers": 2}
    replicas = [{"name": "a", "kind": "datacenter"}, {"name": "b", "kind": "participants", "stages": 2, **replica}]
    values = {
        "name": "t",
        "model": sizes,
        "inner": inner,
        "outer": {"rounds": 4, **(outer or {})},
        "replicas": replicas,
    }
    return RunSpec(RunConfig.model_validate(values), 256)


@pytest.mark.parametrize(
    ("inner", "allowed", "refused", "expected"),
    [
        ({"steps": 4}, [4], [0, 3, 5, 2**32], "found 5 inner steps, expected 4"),
        ({"seconds": 0.5}, [1, 2, 500], [0, 5000, 2**32], "found 5000 inner steps, expected 1 to 502"),
    ],
)
def test_steps_are_those_of_the_configuration(
    inner: dict[str, Any], allowed: list[int], refused: list[int], expected: str
) -> None:
    rules = rules_of(_spec(inner))
    assert [rules.complaint_of_steps("a", steps) for steps in allowed] == [None] * len(allowed)
    complaints = [rules.complaint_of_steps("a", steps) for steps in refused]
    assert None not in complaints
    assert expected in complaints


def test_a_configuration_that_bounds_nothing_has_no_limits() -> None:
    assert contribution_limits(_spec({"steps": 4})) is not None
    assert contribution_limits(_spec({"seconds": 1})) is None
    assert contribution_limits(_spec({"steps": 4, "betas": (0.9, 0.5)})) is None
    assert contribution_limits(_spec({"steps": 4, "optimizer": "sgd", "clip_norm": None})) is None
    assert contribution_limits(_spec({"steps": 4}, {"keep_local": True})) is None
    assert contribution_limits(_spec({"steps": 1}, {"method": "adamw_ddp"})) is None


def test_learning_rates_are_those_of_the_round() -> None:
    limits = contribution_limits(_spec({"steps": 2, "learning_rate": 0.1, "warmup_steps": 4}))
    assert limits is not None
    assert limits.accumulated(1) == pytest.approx(0.025 + 0.05)
    assert limits.accumulated(2) == pytest.approx(0.95 * 0.075 + 0.075 + 0.1)
