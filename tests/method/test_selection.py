"""Fast selection keeps exactly the values of the plain one, with the same ties and bits."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.pseudo_gradient import error_feedback, selection
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.pseudo_gradient.quantise import Quantised
from hetero_pp.pseudo_gradient.selection import (
    as_matrix,
    find_in_groups,
    find_largest,
    group_height,
    groups_of,
    top_k_positions,
)

unhurried = settings(deadline=None, max_examples=100)
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.tuples(st.integers(1, 300))
TILES = st.sampled_from([(8, 8), (16, 4), (4, 16), (12, 5), (7, 3), (1, 32)])
DENSITIES = st.sampled_from([0.001, 1 / 128, 1 / 32, 1 / 16, 1 / 8, 0.3, 0.9, 1.0])
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


def _few(tensor: Tensor) -> Tensor:
    return (tensor * 2).round() / 2


def _mostly_zero(tensor: Tensor) -> Tensor:
    return tensor * (tensor > 1.5)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda tensor: tensor,
    "few values": _few,
    "mostly zero": _mostly_zero,
    "zero": torch.zeros_like,
    "minus zero": lambda tensor: -torch.zeros_like(tensor),
    "one magnitude": torch.sign,
    "huge": lambda tensor: tensor * 1e38,
    "denormal": lambda tensor: tensor * 1e-40,
}


def _inputs(shape: tuple[int, ...], kind: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (KINDS[kind](torch.randn(shape, generator=generator)) for _ in range(2))
    return first, second


@unhurried
@given(SHAPES, TILES, DENSITIES, st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_two_levels_keep_what_top_k_keeps(
    shape: tuple[int, ...], tile: tuple[int, int], density: float, kind: str, seed: int
) -> None:
    matrix = as_matrix(_inputs(shape, kind, seed)[0])
    for group in groups_of(shape, tile):
        kept = group.kept(density)
        height, expected = group_height(group, kept), top_k_positions(group.gather(matrix), kept)
        assert torch.equal(find_largest(matrix, group, kept), expected)
        if height > 1:
            assert torch.equal(find_in_groups(matrix, group, height, kept), expected)


@needs_numba
@unhurried
@given(SHAPES, TILES, DENSITIES, st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_numba_keeps_what_top_k_keeps(
    shape: tuple[int, ...], tile: tuple[int, int], density: float, kind: str, seed: int
) -> None:
    from hetero_pp.pseudo_gradient import compiled_pass

    error, delta = _inputs(shape, kind, seed)
    expected = error.clone().mul_(0.95).add_(delta)
    for group in groups_of(shape, tile):
        kept = group.kept(density)
        chosen = compiled_pass.advance(error, delta, group, kept, 0.95)
        positions, indices, values = chosen.positions, chosen.indices, chosen.values
        assert torch.equal(positions, top_k_positions(group.gather(as_matrix(expected)), kept))
        assert torch.equal(indices, group.flat_indices(positions))
        assert torch.equal(values.view(torch.int32), expected.view(-1).take(indices).view(torch.int32))
    assert torch.equal(error.view(torch.int32), expected.view(torch.int32))


def test_a_tie_at_the_edge_keeps_the_lower_index() -> None:
    """Two equal values are in different groups and one of them is kept, whichever group is searched first."""
    matrix = torch.zeros(64, 64)
    matrix[0, 0], matrix[40, 3], matrix[9, 50] = 2.0, -1.0, 1.0
    (group,) = groups_of((64, 64), (64, 64))
    height = group_height(group, 2)
    assert height > 1
    assert find_in_groups(matrix, group, height, 2).tolist() == [[0, 9 * 64 + 50]]


def _assert_equal(ours: Quantised, theirs: Quantised) -> None:
    assert torch.equal(ours.values.view(torch.int32), theirs.values.view(torch.int32))
    assert ours.base == theirs.base
    for name in ("codes", "levels", "magnitudes"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))


@needs_numba
@pytest.mark.parametrize("value_bits", [1, 2, 32])
@pytest.mark.parametrize("shape", [(130, 200), (64, 64), (300,), (200, 64), (5, 7)], ids=str)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"huge"}))
def test_numba_selects_what_torch_selects(
    kind: str, shape: tuple[int, ...], value_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions, values and kept errors are equal to the bit over rounds, in bands of one row of tiles."""
    monkeypatch.setattr(selection, "BAND_ELEMENTS", 1)
    plain = CompressionSettings.model_validate({"value_bits": value_bits})
    fast = plain.model_copy(update={"accelerator": "numba"})
    first, second = torch.zeros(shape), torch.zeros(shape)
    for round_ in range(3):
        delta, _ = _inputs(shape, kind, round_)
        ours, theirs = select(first, delta, plain), select(second, delta, fast)
        for one, other in zip(ours.positions, theirs.positions, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(ours.indices, theirs.indices)
        _assert_equal(ours.quantised, theirs.quantised)
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@needs_numba
@pytest.mark.parametrize("spread", [0, 1, 12], ids=["estimates hold", "estimates fail", "magnitudes are bounded"])
@pytest.mark.parametrize("columns", [256, 200])
def test_numba_estimates_thresholds_from_the_tiles_above(spread: int, columns: int) -> None:
    """The choice is exact wherever the estimate comes from, and for chunks far from the mean of all magnitudes."""
    plain = CompressionSettings.model_validate({"density": 1 / 128})
    fast = plain.model_copy(update={"accelerator": "numba"})
    first, second = torch.zeros(512, columns), torch.zeros(512, columns)
    generator = torch.Generator().manual_seed(0)
    scales = 2.0 ** (spread * torch.randn(8, columns // 8, generator=generator))
    scales = scales.repeat_interleave(64, 0).repeat_interleave(8, 1)
    for _ in range(3):
        delta = torch.randn(512, columns, generator=generator) * scales
        ours, theirs = select(first, delta, plain), select(second, delta, fast)
        assert torch.equal(ours.indices, theirs.indices)
        _assert_equal(ours.quantised, theirs.quantised)
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@needs_numba
@pytest.mark.parametrize("others", [(0.0, 0.0), (1000.0, 7.0)], ids=["none", "large"])
@pytest.mark.parametrize("shape", [(130, 200), (300,), (0, 64)], ids=str)
def test_numba_sums_over_parts_as_torch_does(shape: tuple[int, ...], others: tuple[float, float]) -> None:
    """A part is quantised relative to the mean of all parts. A part without rows also takes part in the sum."""

    def sum_over(total: Tensor) -> None:
        total += torch.tensor(others, dtype=torch.float64)

    plain = CompressionSettings.model_validate({})
    first, delta = _inputs(shape, "random", 0)
    second = first.clone()
    ours = select(first, delta, plain, sum_over)
    theirs = select(second, delta, plain.model_copy(update={"accelerator": "numba"}), sum_over)
    _assert_equal(ours.quantised, theirs.quantised)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_a_missing_numba_is_missed_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_feedback.importlib.util, "find_spec", lambda name: None)
    compression = CompressionSettings.model_validate({"accelerator": "numba"})
    told = "outer.compression.accelerator: found `numba`, which is not installed; install it with: "
    with pytest.raises(ConfigError, match=rf"^{re.escape(told)}pip install 'hetero-pp\[numba\]'$"):
        select(torch.zeros(8, 8), torch.zeros(8, 8), compression)


@pytest.mark.starts_processes
def test_the_compiled_pass_keeps_what_torch_keeps() -> None:
    """Only the last place of the error may differ, where a compiler may round once instead of twice.

    The matrix has whole tiles, and narrower ones at both edges.
    """
    generator = torch.Generator().manual_seed(3)
    error, delta = (torch.randn(130, 70, generator=generator) for _ in range(2))
    found = {}
    for accelerator in ("torch", "compile"):
        own = error.clone()
        settings = CompressionSettings.model_validate({"accelerator": accelerator, "value_bits": 32})
        found[accelerator] = (own, select(own, delta, settings))
    (ours, sent), (theirs, expected) = found["compile"], found["torch"]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(sent.indices, expected.indices)
    torch.testing.assert_close(sent.values, expected.values, rtol=1e-6, atol=1e-7)
