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


SECONDS = InnerSettings.model_validate(
    {"seconds": 10, "learning_rate": 0.4, "warmup_rounds": 1, "final_learning_rate_share": 0}
)
ROUNDS = 5


def test_as_many_steps_in_every_round_have_the_rates_of_counted_ones() -> None:
    steps = 6
    counted = InnerSettings(steps=steps, learning_rate=0.4, warmup_steps=9, final_learning_rate_share=0.25)
    timed = InnerSettings.model_validate(
        {"seconds": 1, "learning_rate": 0.4, "warmup_rounds": 1.5, "final_learning_rate_share": 0.25}
    )
    expected = counted.rates(steps * ROUNDS)
    for round_ in range(1, ROUNDS + 1):
        first = (round_ - 1) * steps
        found = timed.rates_in(round_, ROUNDS, first, steps)
        for step in range(first, first + steps):
            assert found.at(step) == pytest.approx(expected.at(step), rel=1e-12), f"round {round_}, step {step}"


def test_unequal_replicas_end_a_round_at_the_same_rate() -> None:
    """After the warm-up, a round of 4 steps and one of 400 have the same rate at their start and in their middle."""
    slow, fast = SECONDS.rates_in(3, ROUNDS, 8, 4), SECONDS.rates_in(3, ROUNDS, 900, 400)
    assert slow.at(8) == fast.at(900) == pytest.approx(0.4 * (0.5 + 0.5 * 2**-0.5))  # a quarter of the cosine
    assert slow.at(10) == pytest.approx(fast.at(1100))
    assert slow.at(10) < slow.at(9) < slow.at(8)


def test_more_steps_than_expected_do_not_begin_the_next_round() -> None:
    rates, following = SECONDS.rates_in(2, ROUNDS, 0, 4), SECONDS.rates_in(3, ROUNDS, 0, 4)
    assert rates.at(4) == rates.at(40) == pytest.approx(following.at(0), rel=1e-12)
    assert rates.at(40) >= following.at(0)
    last = SECONDS.rates_in(ROUNDS, ROUNDS, 0, 4)
    assert last.at(40) == pytest.approx(0, abs=1e-12)


def test_a_first_round_rises_though_nobody_knows_how_long_it_is() -> None:
    """The warm-up is half done after ten steps, three quarters after thirty, and never complete."""
    rates = SECONDS.rates_in(1, ROUNDS, 0, None)
    assert [rates.at(step) for step in (0, 9, 29)] == pytest.approx([0.4 / 11, 0.2, 0.3])
    assert 0.39 < rates.at(10_000) < 0.4
    joined = SECONDS.rates_in(4, ROUNDS, 0, None)
    assert joined.at(0) == SECONDS.rates_in(4, ROUNDS, 50, 7).at(50)


def test_a_warm_up_may_be_longer_than_the_run_or_not_be() -> None:
    long = SECONDS.model_copy(update={"warmup_rounds": 10.0}).rates_in(ROUNDS, ROUNDS, 0, 2)
    assert [long.at(step) for step in (0, 1)] == pytest.approx([0.18, 0.2])
    none = SECONDS.model_copy(update={"warmup_rounds": 0.0}).rates_in(1, ROUNDS, 0, 2)
    assert none.at(0) == 0.4
    whole = SECONDS.model_copy(update={"warmup_rounds": float(ROUNDS)}).rates_in(ROUNDS, ROUNDS, 0, 2)
    assert whole.at(5) == pytest.approx(0.4)
