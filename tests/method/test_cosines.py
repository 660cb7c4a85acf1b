"""The cosine transform of chunks, compared with the closed formula and with DeMo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, mean_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.cosines import restored, transformed
from hetero_pp.pseudo_gradient.error_feedback import select

TILE = (8, 16)
SHAPES = [(24, 48), (20, 37), (5, 9), (30,), (1, 16), (40, 1)]


def _cosines(size: int) -> np.ndarray:
    """Return the orthonormal DCT-II matrix."""
    k, n = np.arange(size)[:, None], np.arange(size)[None, :]
    scales = np.where(k == 0, math.sqrt(1 / size), math.sqrt(2 / size))
    return np.asarray(scales * np.cos(np.pi * (2 * n + 1) * k / (2 * size)))


def _written_out(tensor: Tensor, tile: tuple[int, int], backwards: bool = False) -> Tensor:
    """Transform each chunk on its own, in fp64."""
    matrix = (
        tensor.double().numpy().reshape(-1, tensor.shape[-1]) if tensor.ndim == 2 else tensor.double().numpy()[None]
    )
    rows, columns = tile if tensor.ndim == 2 else matrix.shape
    found = np.zeros_like(matrix)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            own = matrix[top : top + rows, left : left + columns]
            by_row, by_column = _cosines(own.shape[0]), _cosines(own.shape[1])
            if backwards:
                by_row, by_column = by_row.T, by_column.T
            found[top : top + rows, left : left + columns] = by_row @ own @ by_column.T
    return torch.from_numpy(found).view(tensor.shape)


def _random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_chunk_is_transformed_as_the_formula_says(shape: tuple[int, ...]) -> None:
    tensor = _random(shape)
    found = transformed(tensor, TILE)
    torch.testing.assert_close(found.double(), _written_out(tensor, TILE), rtol=0, atol=3e-6)
    torch.testing.assert_close(restored(found, TILE), tensor, rtol=0, atol=3e-6)
    assert found.norm().item() == pytest.approx(tensor.norm().item(), rel=1e-5)


def test_a_part_of_whole_rows_of_chunks_has_the_bits_of_the_whole() -> None:
    """A rank of several transforms only its part."""
    tensor = _random((40, 37))
    for way in (transformed, restored):
        whole = way(tensor, TILE)
        assert torch.cat([way(tensor[:16], TILE), way(tensor[16:], TILE)]).equal(whole)
    assert transformed(tensor[:0], TILE).shape == (0, 37)


def test_of_all_coefficients_nothing_is_lost() -> None:
    """At density 1, a transform changes nothing but rounding."""
    ends = []
    for transform in ("none", "dct"):
        compression = {
            "density": 1.0,
            "value_bits": 32,
            "error_feedback_decay": 0.9,
            "transform": transform,
            "tile": TILE,
        }
        settings = OuterSettings.model_validate({"rounds": 2, "momentum": 0.9, "compression": compression})
        optimizer, theta, error = OuterOptimizer(settings), _random((20, 37)), torch.zeros(20, 37)
        for round_ in (1, 2):
            sent = select(error, _random((20, 37), round_), settings.compression)
            mean = mean_of((20, 37), [(1.0, DecodedTensor(sent.indices, sent.values))])
            optimizer.begin(round_, {})
            optimizer.take({"w": theta}, "w", mean)
        ends.append(theta)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)
    assert not ends[0].equal(ends[1])


def test_rounds_are_demos() -> None:
    """m <- beta m + g; q = TopK(DCT(m)); m <- m - IDCT(q); theta <- theta - eta sign(IDCT(sum q)), in fp64."""
    settings = OuterSettings.model_validate(
        {"rounds": 5, "method": "demo", "compression": {"tile": TILE, "density": 1 / 8, "value_bits": 32}}
    )
    shape, kept = (16, 32), 16
    optimizer, theta = OuterOptimizer(settings), _random(shape, 1)
    errors = [torch.zeros(shape) for _ in range(3)]
    momenta = [torch.zeros(shape, dtype=torch.float64) for _ in range(3)]
    expected = theta.double()
    for round_ in range(1, 6):
        gradients = [_random(shape, 10 * round_ + replica) for replica in range(3)]
        sent = [select(own, gradient, settings.compression) for own, gradient in zip(errors, gradients, strict=True)]
        total = torch.zeros(shape, dtype=torch.float64)
        for momentum, gradient in zip(momenta, gradients, strict=True):
            momentum.mul_(0.999).add_(gradient)
            coefficients = _written_out(momentum, TILE)
            largest = torch.zeros_like(coefficients)
            for top in range(0, 16, 8):
                for left in range(0, 32, 16):
                    chunk = coefficients[top : top + 8, left : left + 16]
                    threshold = chunk.abs().flatten().sort().values[-kept]
                    largest[top : top + 8, left : left + 16] = torch.where(chunk.abs() >= threshold, chunk, 0)
            momentum -= _written_out(largest, TILE, backwards=True)
            total += largest
        direction = _written_out(total, TILE, backwards=True)
        assert direction.abs().min() > 1e-6  # so that no sign depends on rounding
        expected -= 1e-3 * direction.sign()
        optimizer.begin(round_, {})
        mean = mean_of(shape, [(1.0, DecodedTensor(one.indices, one.values)) for one in sent])
        optimizer.take({"w": theta}, "w", mean)
        torch.testing.assert_close(theta.double(), expected, rtol=0, atol=1e-5)
        for error, momentum in zip(errors, momenta, strict=True):
            torch.testing.assert_close(error.double(), _written_out(momentum, TILE), rtol=0, atol=2e-5)


def test_the_momentum_of_a_replica_is_transformed_once() -> None:
    """The kept and sent values are the coefficients of those without the transform."""
    cells = {"density": 1.0, "value_bits": 32, "memory": "momentum", "error_feedback_decay": 0.9, "tile": TILE}
    plain, dct = (
        CompressionSettings.model_validate({**cells, "transform": transform}) for transform in ("none", "dct")
    )
    kept, kept_of_dct = torch.zeros(16, 32), torch.zeros(16, 32)
    for seed in (1, 2):
        sent = select(kept, _random((16, 32), seed), plain).values.view(16, 32)
        dense = torch.zeros(16 * 32)
        found = select(kept_of_dct, _random((16, 32), seed), dct)
        dense[found.indices] = found.values
        whole = torch.zeros(16 * 32)
        plain_sent = select(torch.zeros(16, 32), torch.zeros(16, 32), plain)
        whole[plain_sent.indices] = sent.flatten()
        torch.testing.assert_close(dense.view(16, 32), transformed(whole.view(16, 32), TILE), rtol=0, atol=1e-5)
    torch.testing.assert_close(kept_of_dct, transformed(kept, TILE), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"method": "adamw_ddp"}, "adamw_ddp: found `transform: dct` with averaged gradients"),
        (
            {"overlap": 1},
            "sparseloco_signs: found `overlap: 1` with `compression.transform: dct`, expected 0, or `transform: none`",
        ),
        ({"fragments": 2, "mixing": 0.5}, "found `mixing: 0.5` with `compression.transform: dct`"),
    ],
)
def test_what_does_not_fit_is_refused(outer: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        OuterSettings.model_validate({"rounds": 1, "compression": {"transform": "dct"}, **outer})
