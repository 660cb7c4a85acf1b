"""The inner optimizer, compared with torch's AdamW set up by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.transformer import EMBEDDING, ModelShape, Transformer, initialise, parameters_of
from hetero_pp.pipeline.subspace import perpendicular, random_basis
from hetero_pp.research.settings import ResearchConfig

SHAPE = ModelShape(width=16, layers=2, heads=2, feed_forward=24, vocabulary=64)
TOTAL = 20


def _parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    model = Transformer(SHAPE)
    initialise(model, seed)
    return parameters_of(model)


def _set_gradients(parameters: Mapping[str, nn.Parameter], step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


@pytest.mark.parametrize("clip_norm", [1.0, 1e6, None])
def test_steps_are_torchs_adamw_to_the_bit(clip_norm: float | None) -> None:
    ours, plain = _parameters(), _parameters()
    settings = InnerSettings(learning_rate=3e-2, warmup_steps=2, weight_decay=0.2, clip_norm=clip_norm)
    optimizer = InnerOptimizer(ours, settings, TOTAL)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for name, p in plain.items() if "norm" not in name], "weight_decay": 0.2},
            {"params": [p for name, p in plain.items() if "norm" in name], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step in range(5):
        for parameters in (ours, plain):
            _set_gradients(parameters, step, scale=0.1)
        norm = optimizer.gradient_norm()
        rate = optimizer.step(step, norm)
        whole = nn.utils.clip_grad_norm_(plain.values(), clip_norm or math.inf)
        for group in adamw.param_groups:
            group["lr"] = settings.rates(TOTAL).at(step)
        adamw.step()
        assert norm.item() == whole.item() > 1.0
        assert rate == settings.rates(TOTAL).at(step)
        for name, parameter in ours.items():
            assert torch.equal(parameter, plain[name]), f"{name} after step {step}"
            assert parameter.grad is None


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_muon_trains_the_matrices_of_layers_and_adamw_all_else(momentum: float | None) -> None:
    """Both have the bits of torch's two optimizers, also for a stage with some of the layers."""
    ours, plain = _parameters(), _parameters()
    stage = {name: parameter for name, parameter in _parameters().items() if name.startswith("layers.1.")}
    settings = InnerSettings(
        learning_rate=3e-2, warmup_steps=2, weight_decay=0.2, clip_norm=None, optimizer="muon", momentum=momentum
    )
    optimizers = [InnerOptimizer(one, settings, TOTAL) for one in (ours, stage)]
    hidden = {name: p for name, p in plain.items() if name.startswith("layers.") and p.ndim == 2}
    others = {name: p for name, p in plain.items() if name not in hidden}
    assert {"lm_head.weight", EMBEDDING} < set(others)
    muon = torch.optim.Muon(
        hidden.values(), weight_decay=0.2, momentum=0.95 if momentum is None else 0.5, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others.values() if p.ndim == 2], "weight_decay": 0.2},
            {"params": [p for p in others.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(3):
        for parameters in (ours, plain):
            _set_gradients(parameters, step, scale=0.1)
        for name, parameter in stage.items():
            parameter.grad = ours[name].grad.clone()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step(step, torch.tensor(1.0))
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = settings.rates(TOTAL).at(step)
        muon.step()
        adamw.step()
        for name, parameter in ours.items():
            assert torch.equal(parameter, plain[name]), f"{name} after step {step}"
            assert name not in stage or torch.equal(parameter, stage[name]), name


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_sgd_is_torchs(momentum: float | None) -> None:
    ours, plain = _parameters(), _parameters()
    settings = InnerSettings(
        learning_rate=0.3, warmup_steps=0, weight_decay=0.0, clip_norm=None, optimizer="sgd", momentum=momentum
    )
    optimizer = InnerOptimizer(ours, settings, TOTAL)
    sgd = torch.optim.SGD(plain.values(), momentum=momentum or 0.0)
    for step in range(3):
        for parameters in (ours, plain):
            _set_gradients(parameters, step, scale=0.1)
        optimizer.step(step, torch.tensor(1.0))
        for group in sgd.param_groups:
            group["lr"] = settings.rates(TOTAL).at(step)
        sgd.step()
        for name, parameter in ours.items():
            assert torch.equal(parameter, plain[name]), f"{name} after step {step}"


HOME = {"name": "home", "kind": "participants", "stages": 2, "boundary": {"rank": 8}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"inner": {"momentum": 0.9}}, "found 0.9 with `optimizer: adamw`, .*expected none, or"),
        ({"outer": {"rounds": 1, "method": "adamw_ddp"}}, "found `muon`, expected `adamw` with method adamw_ddp"),
        (
            {"replicas": [{"name": "dc", "kind": "datacenter", "engine": "deepspeed"}]},
            "found `muon`, expected `adamw` with the engine `deepspeed` of dc",
        ),
        (
            {"research": {"ablations": {"modified_adamw": True}}, "replicas": [HOME]},
            "found this key with an `inner.optimizer` but `adamw`, expected only one of them",
        ),
    ],
)
def test_parts_that_do_not_fit(changes: dict[str, Any], told: str) -> None:
    values = {"name": "a", "outer": {"rounds": 1}, "replicas": [{"name": "dc", "kind": "datacenter"}], **changes}
    values["inner"] = changes.get("inner", {"optimizer": "muon"})
    with pytest.raises(ConfigError, match=told):
        ResearchConfig.model_validate(values).check()


def test_clipping_uses_the_norm_it_is_given() -> None:
    """A stage's own norm may be small. Only the norm of the whole replica counts."""
    ours, plain = _parameters(), _parameters()
    settings = InnerSettings(learning_rate=1e-2, warmup_steps=0, clip_norm=1.0, epsilon=1e-2)
    optimizer = InnerOptimizer(ours, settings, TOTAL)
    _set_gradients(ours, 0, scale=1e-4)
    optimizer.step(0, torch.tensor(50.0))
    other = InnerOptimizer(plain, settings.model_copy(update={"clip_norm": None}), TOTAL)
    _set_gradients(plain, 0, scale=1e-4 / 50)
    other.step(0, torch.tensor(50.0))
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, plain[name], atol=1e-9, rtol=1e-6, msg=name)
    assert not torch.equal(ours["norm.weight"], torch.ones(16))


def test_learning_rates_by_hand() -> None:
    settings = InnerSettings(learning_rate=0.4, warmup_steps=4, final_learning_rate_share=0.25)
    rates = [settings.rates(12).at(step) for step in range(13)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[4] == pytest.approx(0.4)  # the cosine starts at the peak
    assert rates[6] == pytest.approx(0.1 + 0.3 * (0.5 + math.sqrt(0.125)))
    assert rates[8] == pytest.approx(0.1 + 0.3 / 2)  # half way down
    assert rates[12] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert settings.rates(12).at(100) == pytest.approx(0.1)


def test_learning_rates_without_warm_up() -> None:
    settings = InnerSettings(learning_rate=0.4, warmup_steps=0, final_learning_rate_share=0.0)
    assert settings.rates(10).at(0) == pytest.approx(0.4)
    assert settings.rates(10).at(5) == pytest.approx(0.2)
    assert settings.rates(10).at(10) == pytest.approx(0.0)


def _step_with_zero_gradients(parameters: dict[str, nn.Parameter], rest: Tensor | None) -> None:
    settings = InnerSettings(learning_rate=0.05, warmup_steps=0, weight_decay=0.5)
    optimizer = InnerOptimizer(parameters, settings, TOTAL)
    optimizer.perpendicular = rest
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0, torch.tensor(1.0))


def test_weight_decay_spares_norms() -> None:
    parameters = _parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    _step_with_zero_gradients(parameters, None)
    for name, parameter in parameters.items():
        expected = before[name] if "norm" in name else before[name] * (1 - 0.05 * 0.5)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-8, rtol=1e-6, msg=name)


def test_weight_decay_acts_on_the_embedding_within_the_subspace() -> None:
    parameters = _parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    basis = random_basis(16, 4, seed=1)
    rest = perpendicular(before[EMBEDDING], basis)
    _step_with_zero_gradients(parameters, rest)
    within = before[EMBEDDING].double() @ basis.double() @ basis.double().T
    expected = before[EMBEDDING].double() - 0.05 * 0.5 * within
    torch.testing.assert_close(parameters[EMBEDDING].detach().double(), expected, atol=1e-8, rtol=1e-6)
    head = before["lm_head.weight"] * (1 - 0.05 * 0.5)
    torch.testing.assert_close(parameters["lm_head.weight"].detach(), head, atol=1e-8, rtol=1e-6)


def test_with_a_perpendicular_the_gradient_step_is_still_adamws() -> None:
    ours, plain = _parameters(), _parameters()
    settings = InnerSettings(learning_rate=0.05, warmup_steps=0, weight_decay=0.5, clip_norm=None)
    optimizer = InnerOptimizer(ours, settings, TOTAL)
    rest = perpendicular(ours[EMBEDDING].detach(), random_basis(16, 4, seed=1))
    optimizer.perpendicular = rest
    adam = torch.optim.AdamW([plain[EMBEDDING]], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(3):
        for parameters in (ours, plain):
            _set_gradients(parameters, step, scale=0.1)
        optimizer.step(step, optimizer.gradient_norm())
        rate = adam.param_groups[0]["lr"] = settings.rates(TOTAL).at(step)
        with torch.no_grad():
            plain[EMBEDDING].sub_(rate * 0.5 * (plain[EMBEDDING] - rest))
        adam.step()
        torch.testing.assert_close(ours[EMBEDDING], plain[EMBEDDING], atol=1e-7, rtol=1e-6)


def test_a_part_without_an_embedding_or_a_matrix_steps_too() -> None:
    model = Transformer(SHAPE, layers=[], embeds=False, predicts=True)
    initialise(model, 0)
    parameters = {"norm.weight": parameters_of(model)["norm.weight"]}
    optimizer = InnerOptimizer(parameters, InnerSettings(warmup_steps=0), TOTAL)
    parameters["norm.weight"].grad = torch.ones(16)
    assert optimizer.gradient_norm().item() == pytest.approx(4.0)
    optimizer.step(0, torch.tensor(4.0))
    torch.testing.assert_close(parameters["norm.weight"].detach(), torch.full((16,), 0.99), atol=1e-6, rtol=0)
