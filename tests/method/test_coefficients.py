"""Coefficients on the wire: decoding follows the definition, and malformed ones are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hetero_pp.core.errors import MalformedMessage
from hetero_pp.core.seeds import seed_of
from hetero_pp.pipeline.coefficients import STEP_OF_BITS, Bits, CoefficientFormat, Floats, noise, noise_key

SHAPE = (3, 5, 12)
KEY = torch.tensor(1234567)
FORMATS: list[CoefficientFormat] = [Floats(torch.float32), Floats(torch.bfloat16), *map(Bits, STEP_OF_BITS)]


def _coefficients(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(*shape[:2], 1, generator=generator).mul(6).exp()


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_the_wire_keeps_every_symbol(format_: CoefficientFormat) -> None:
    for symbols in (format_.activation(_coefficients()), format_.gradient(_coefficients(1), KEY)):
        wire = format_.to_wire(symbols)
        assert sum(tensor.numel() * tensor.element_size() for tensor in wire) == format_.wire_bytes(SHAPE)
        back = format_.from_wire(wire, SHAPE)
        assert all(one.equal(other) for one, other in zip(symbols, back, strict=True))
        assert format_.coefficients(back).equal(format_.coefficients(symbols))


@pytest.mark.parametrize("width", STEP_OF_BITS)
def test_activations_follow_the_definition(width: int) -> None:
    """q = (clamp(floor(c / step), -L/2, L/2 - 1) + 1/2) step; step = a s; s is the rms to 1/8 octave."""
    coefficients, levels = _coefficients(), 1 << width
    decoded = Bits(width).coefficients(Bits(width).activation(coefficients))
    wanted = [
        [STEP_OF_BITS[width] * math.sqrt(float(token.double().square().mean())) for token in row]
        for row in coefficients
    ]
    largest = max(map(max, wanted))
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            octaves = round(8 * math.log2(largest / wanted[row][column])) / 8
            step = largest * 2.0**-octaves
            for found, value in zip(decoded[row, column].tolist(), coefficients[row, column].tolist(), strict=True):
                expected = (min(max(math.floor(value / step), -levels // 2), levels // 2 - 1) + 0.5) * step
                assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("width", STEP_OF_BITS)
def test_gradients_are_right_in_the_mean(width: int) -> None:
    coefficients, format_, keys = _coefficients(), Bits(width), 1000
    decoded = torch.stack(
        [format_.coefficients(format_.gradient(coefficients, torch.tensor(key))) for key in range(keys)]
    )
    step = 2 * coefficients.abs().amax(-1, keepdim=True) / ((1 << width) - 1) * 2 ** (1 / 8)
    error = (decoded.mean(0) - coefficients).abs() / step
    assert float(error.max()) < 4.5 * 0.5 / math.sqrt(keys)  # noise of a mean of so many, each within half a step
    assert float(((decoded - coefficients).abs() / step).max()) <= 1.0001  # no value is clipped


def test_noise_is_uniform_and_depends_on_the_key_alone() -> None:
    like = torch.zeros(200_000)
    values = noise(KEY, like)
    assert values.equal(noise(KEY.clone(), like.view(1000, 200)).view(-1))
    assert float(values.min()) > -0.5 and float(values.max()) < 0.5
    counts = torch.histc(values, bins=20, min=-0.5, max=0.5)
    assert float((counts - 10_000).abs().max()) < 5 * math.sqrt(10_000)
    for other in (noise(KEY + 1, like), values.roll(1)):
        assert abs(float((values * other).mean())) < 5 / 12 / math.sqrt(len(like))


@given(st.integers(2, 8), st.lists(st.binary(max_size=300), max_size=4))
def test_strange_bytes_are_refused_or_decode(width: int, parts: list[bytes]) -> None:
    wire = tuple(torch.tensor(list(part), dtype=torch.uint8) for part in parts)
    with pytest.raises(MalformedMessage):
        Bits(width).from_wire(wire, SHAPE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_coefficient_that_is_not_finite_is_refused(dtype: torch.dtype, value: float) -> None:
    format_ = Floats(dtype)
    (wire,) = format_.to_wire(format_.activation(_coefficients()))
    format_.from_wire((wire,), SHAPE)
    for index in (0, 77, wire.numel() - 1):
        damaged = wire.clone()
        damaged.view(-1)[index] = value
        with pytest.raises(MalformedMessage, match="not finite"):
            format_.from_wire((damaged,), SHAPE)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    packed, exponents, _ = Bits(4).to_wire(Bits(4).activation(_coefficients()))
    with pytest.raises(MalformedMessage):
        Bits(4).from_wire((packed, exponents, torch.tensor([scale])), SHAPE)


KEYED = (5, "home", 1, 23, 4)
"""Seed, replica, hop, step and micro-batch, which determine the noise of one gradient."""
OTHERS = [(6, *KEYED[1:]), (5, "away", *KEYED[2:]), (5, "home", 2, 23, 4), (5, "home", 1, 24, 4), (5, "home", 1, 23, 5)]
OTHERS += [(5, "home", 12, 3, 4), (5, "home", 1, 4, 23)]  # written alike, and swapped


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_noise_is_another_if_one_thing_is(other: tuple[int, str, int, int, int]) -> None:
    """The two are uncorrelated, also if one is shifted against the other."""
    like = torch.zeros(40_000)
    values, others = noise(noise_key(*KEYED), like), noise(noise_key(*other), like)
    assert (values == others).double().mean() < 1e-3
    for shift in (0, 1, -1, 7):
        assert abs(float((values * others.roll(shift)).double().mean())) < 5 / 12 / len(like) ** 0.5


def test_noise_by_hand() -> None:
    """SplitMix64 in numpy's unsigned numbers.

    The key is the start, and an element's index is the number of increments.
    """
    key = noise_key(*KEYED)
    with np.errstate(over="ignore"):
        state = np.uint64(int(key)) + np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    expected = ((state >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) / np.float32(2**24) - np.float32(0.5)
    assert noise(key, torch.zeros(50, 20)).flatten().tolist() == expected.tolist()
    assert int(key) == seed_of(5, "rounding", "home", 1, 23, 4)
