"""DeMo's transform: the discrete cosine transform of each chunk, and its inverse, bitwise equal on every machine.

    X^ = C_rows X C_columns^T,  C[k, n] = s_k cos(pi (2 n + 1) k / 2 N),  s_0 = sqrt(1 / N), else sqrt(2 / N)

C is orthonormal: its transpose is the inverse, and norms are kept. Only one replica computes what it sends, so the
transform uses matrix products. All replicas compute the inverse, and matrix products sum in a different order on each
machine. The inverse therefore sums term by term, each term one multiplication and one addition. A vector is a chunk of
one row. Source: DeMo (Peng et al. 2024); SparseLoCo, appendix D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.selection import as_matrix, groups_of


def transformed(tensor: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the coefficients of every chunk of a tensor, in the chunk's place: fp32, of the tensor's shape.

    Also accepts a part of a tensor: whole rows of chunks, or none (pseudo_gradient.rows).
    """
    return _by_chunks(tensor, tile, _matrix_products)


def restored(coefficients: Tensor, tile: tuple[int, int]) -> Tensor:
    """Invert `transformed`, except for rounding."""
    return _by_chunks(coefficients, tile, _term_by_term)


def _by_chunks(tensor: Tensor, tile: tuple[int, int], products: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `products`, which transforms tiles [rows, N, columns, N], to every chunk of a tensor."""
    found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for group in groups_of(tuple(tensor.shape), tile) if tensor.numel() else ():
        for band in group.bands(tensor.device):  # all steps while the band is in the cache
            own, out = (
                band.part(as_matrix(one)).unflatten(0, (-1, band.rows)).unflatten(2, (-1, band.columns))
                for one in (tensor, found)
            )
            out.copy_(products(own))
    return found


def _matrix_products(tiles: Tensor) -> Tensor:
    by_row, by_column = (_cosines(tiles.shape[dimension], tiles.device, False) for dimension in (1, 3))
    return (by_row @ tiles.transpose(1, 2) @ by_column.T).transpose(1, 2)


def _term_by_term(tiles: Tensor) -> Tensor:
    by_row, by_column = (_cosines(tiles.shape[dimension], tiles.device, True) for dimension in (1, 3))
    return _product(by_column, _product(by_row, tiles, 1), 3)


def _product(matrix: Tensor, tiles: Tensor, dimension: int) -> Tensor:
    """Return the matrix [N, N] times one dimension of tiles [rows, N, columns, N], term by term."""
    if len(matrix) == 1:
        return tiles
    shape = [-1 if one == dimension else 1 for one in range(tiles.ndim)]
    total = torch.zeros(tiles.shape, dtype=tiles.dtype, device=tiles.device)
    for term in range(len(matrix)):
        total += tiles.narrow(dimension, term, 1) * matrix[:, term].view(shape)
    return total


@lru_cache(maxsize=64)
def _cosines(size: int, device: torch.device, backwards: bool) -> Tensor:
    """Return C [size, size] or its transpose, rounded to nine decimals, as a cosine's last bits differ by machine."""
    scales = [math.sqrt((1 if k == 0 else 2) / size) for k in range(size)]
    rows = [
        [round(scale * math.cos(math.pi * ((2 * n + 1) * k % (4 * size)) / (2 * size)), 9) for n in range(size)]
        for k, scale in enumerate(scales)
    ]
    matrix = torch.tensor(rows, dtype=torch.float32, device=device)
    return matrix.T.contiguous() if backwards else matrix
