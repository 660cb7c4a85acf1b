"""The model: its sizes by hand, its outputs against float64, and stages that share its weights."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.transformer import ModelSettings, ModelShape, RopeScaling, Transformer, block_of, initialise

SHAPE = ModelShape(width=32, layers=4, heads=2, feed_forward=48, vocabulary=64)


def _model(seed: int = 3, shape: ModelShape = SHAPE) -> Transformer:
    model = Transformer(shape)
    initialise(model, seed)
    return model


def _tokens(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(SHAPE.vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("preset", "count"), [("178m", 177_622_016), ("512m", 512_398_848), ("1b", 1_204_881_408)])
def test_presets_have_the_papers_sizes(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = Transformer(ModelSettings(preset=preset).resolve(32000))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_parameter_names_are_torchtitans() -> None:
    names = {name: tuple(parameter.shape) for name, parameter in _model().named_parameters()}
    expected: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (64, 32), "norm.weight": (32,)}
    expected |= {"lm_head.weight": (64, 32)}
    for layer in range(4):
        expected |= {f"layers.{layer}.attention.{name}.weight": (32, 32) for name in ("wq", "wk", "wv", "wo")}
        expected |= {f"layers.{layer}.feed_forward.{name}.weight": (48, 32) for name in ("w1", "w3")}
        expected |= {f"layers.{layer}.feed_forward.w2.weight": (32, 48)}
        expected |= {f"layers.{layer}.{name}_norm.weight": (32,) for name in ("attention", "ffn")}
    assert names == expected
    blocks = {"tok_embeddings", "norm", "lm_head", *(f"layers.{layer}" for layer in range(4))}
    assert {block_of(name) for name in names} == blocks


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _frequency(pair: int, head_width: int, shape: ModelShape) -> float:
    """Return the angle per position, scaled as in Meta's code of Llama 3.1: by wavelengths."""
    frequency = shape.rope_theta ** (-2 * pair / head_width)
    if shape.rope_scaling is None:
        return frequency
    factor, low, high, length = (value for _, value in shape.rope_scaling)
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _rotated(x_LE: Tensor, shape: ModelShape) -> Tensor:
    """Rotate neighbouring pairs by their position's angles, with sine and cosine."""
    length, width = x_LE.shape
    by_position = [[i * _frequency(j, width, shape) for j in range(width // 2)] for i in range(length)]
    angles = torch.tensor(by_position, dtype=torch.float64)
    even, odd = x_LE[:, 0::2], x_LE[:, 1::2]
    turned = torch.empty_like(x_LE)
    turned[:, 0::2] = even * angles.cos() - odd * angles.sin()
    turned[:, 1::2] = even * angles.sin() + odd * angles.cos()
    return turned


def _attention(x_LD: Tensor, weights: dict[str, Tensor], layer: str, shape: ModelShape) -> Tensor:
    head_width = shape.head_width or shape.width // shape.heads
    sharing = shape.heads // (shape.kv_heads or shape.heads)
    heads = []
    for head in range(shape.heads):
        own = slice(head * head_width, (head + 1) * head_width)
        shared = slice(head // sharing * head_width, (head // sharing + 1) * head_width)
        q = _rotated(x_LD @ weights[f"{layer}.attention.wq.weight"][own].T, shape)
        k = _rotated(x_LD @ weights[f"{layer}.attention.wk.weight"][shared].T, shape)
        v = x_LD @ weights[f"{layer}.attention.wv.weight"][shared].T
        rows = []
        for position in range(len(x_LD)):
            scores = (k[: position + 1] @ q[position] / math.sqrt(head_width)).exp()
            rows.append(scores @ v[: position + 1] / scores.sum())
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ weights[f"{layer}.attention.wo.weight"].T


def _plain_logits(model: Transformer, tokens_L: Tensor) -> Tensor:
    """Compute LLaMA on one sequence with loops, in float64."""
    shape, weights = model.shape, {name: p.detach().double() for name, p in model.named_parameters()}
    x = weights["tok_embeddings.weight"][tokens_L]
    for index in range(shape.layers):
        layer = f"layers.{index}"
        normed = _normalised(x, weights[f"{layer}.attention_norm.weight"], shape.norm_epsilon)
        x = x + _attention(normed, weights, layer, shape)
        normed = _normalised(x, weights[f"{layer}.ffn_norm.weight"], shape.norm_epsilon)
        gate = normed @ weights[f"{layer}.feed_forward.w1.weight"].T
        hidden = gate / (1 + (-gate).exp()) * (normed @ weights[f"{layer}.feed_forward.w3.weight"].T)
        x = x + hidden @ weights[f"{layer}.feed_forward.w2.weight"].T
    return _normalised(x, weights["norm.weight"], shape.norm_epsilon) @ weights["lm_head.weight"].T


def _unlike_its_start(model: Transformer) -> Transformer:
    """Give the norms values other than 1 and the matrices large ones, so that every factor affects the logits."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = 0.3 if parameter.ndim == 1 else 1.0 / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + (parameter.ndim == 1))
    return model


SCALING = RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=4, original_length=32)


@pytest.mark.parametrize(
    "values",
    [
        {"heads": 1},
        {"heads": 4},
        {"heads": 4, "kv_heads": 2},
        {"heads": 2, "head_width": 24},
        {"heads": 1, "rope_scaling": SCALING},
        {"heads": 6, "kv_heads": 3, "head_width": 8, "rope_scaling": SCALING},
    ],
    ids=str,
)
def test_forward_is_a_plain_llama(values: dict[str, Any]) -> None:
    shape = SHAPE.model_copy(update={"layers": 2, "rope_theta": 100.0, "norm_epsilon": 1e-2, **values})
    model, tokens = _unlike_its_start(Transformer(shape)), _tokens()
    expected = torch.stack([_plain_logits(model, row) for row in tokens])
    assert expected.abs().max() > 1
    torch.testing.assert_close(model(tokens).double(), expected, atol=1e-5, rtol=1e-4)


def test_equal_shapes_are_reduced_to_the_same() -> None:
    said = ModelSettings(width=64, heads=4, kv_heads=4, head_width=16).resolve(256)
    assert said == ModelSettings(width=64, heads=4).resolve(256)
    shared = ModelSettings(width=64, heads=4, kv_heads=2, head_width=8).resolve(256)
    assert (shared.kv_heads, shared.head_width) == (2, 8)


def test_loss_is_mean_cross_entropy_in_nats() -> None:
    logits, targets = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)), _tokens(2, 5)
    shares = logits.double().softmax(-1)
    expected = -sum(math.log(shares[b, i, targets[b, i]]) for b in range(2) for i in range(5)) / 10
    assert next_token_loss(logits, targets).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4), (0, 3, 4), (0, 4)])
def test_stages_start_with_the_whole_models_bits(cuts: tuple[int, ...]) -> None:
    whole = dict(_model().named_parameters())
    stages = len(cuts) - 1
    seen: list[str] = []
    for stage, (first, end) in enumerate(pairwise(cuts)):
        part = Transformer(SHAPE, range(first, end), embeds=stage == 0, predicts=stage == stages - 1)
        initialise(part, 3)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            seen.append(name)
    assert sorted(seen) == sorted(whole)


def test_seeds_and_names_draw_different_weights() -> None:
    one, other = dict(_model(3).named_parameters()), dict(_model(4).named_parameters())
    matrices = [name for name, parameter in one.items() if parameter.ndim == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert not torch.equal(one["layers.0.attention.wq.weight"], one["layers.1.attention.wq.weight"])
    assert not torch.equal(one["layers.0.attention.wq.weight"], one["layers.0.attention.wk.weight"])


def test_weights_start_with_the_deviations_found_to_train() -> None:
    shape = ModelShape(width=128, layers=2, heads=2, feed_forward=192, vocabulary=512)
    for name, parameter in _model(0, shape).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        expected = 0.8 / math.sqrt(128)
        if name == "tok_embeddings.weight":
            expected = 0.05
        elif "wo" in name or "w2" in name:
            expected = 0.04 / 2
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize(
    ("settings", "tokenizer", "key"),
    [
        ({"width": 64, "heads": 3}, 256, "heads"),
        ({"width": 34, "heads": 2}, 256, "heads"),  # heads of an odd width cannot be rotated in pairs
        ({"heads": 2, "head_width": 5}, 256, "head_width"),
        ({"heads": 6, "width": 60, "kv_heads": 4}, 256, "kv_heads"),
        ({"heads": 2, "kv_heads": 4}, 256, "kv_heads"),
        ({"rope_scaling": SCALING.model_copy(update={"high_frequency_factor": 1})}, 256, "rope_scaling"),
        ({}, None, "vocabulary"),
        ({"vocabulary": 255}, 256, "vocabulary"),
    ],
)
def test_shapes_that_cannot_be_built(settings: dict[str, Any], tokenizer: int | None, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSettings(**settings).resolve(tokenizer)
    assert caught.value.key == ("model", key)


def test_single_values_override_the_preset() -> None:
    shape = ModelSettings(preset="178m", layers=3, vocabulary=300).resolve(256)
    assert shape == ModelShape(width=1024, layers=3, heads=8, feed_forward=2688, vocabulary=300)
