"""Chunks of a tensor within which values are selected: 64 x 64 tiles of a matrix, or a whole vector.

Tiles at the right and bottom edges may be partial. Chunks of equal size form a *group* [chunks, size], and a tensor has
at most four groups. Source: SparseLoCo section 2.3; partial tiles keep the density, not the count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from hetero_pp.core.device import CPU

BAND_ELEMENTS = 1 << 19
"""Approximate number of elements processed at once on a CPU, few enough to stay in a cache."""

GPU_BAND_ELEMENTS = 1 << 26
"""The same on a GPU, enough that its kernels take longer than their start."""


@dataclass(frozen=True)
class Group:
    """Equal tiles of one tensor: rows [top, bottom), columns [left, right) in tiles of `rows` x `columns`."""

    top: int
    bottom: int
    left: int
    right: int
    rows: int
    columns: int
    stride: int

    @property
    def size(self) -> int:
        """Number of elements of one chunk."""
        return self.rows * self.columns

    @property
    def count(self) -> int:
        """Number of chunks in the group."""
        return (self.bottom - self.top) // self.rows * ((self.right - self.left) // self.columns)

    def kept(self, density: float) -> int:
        """Return the number of values kept in each chunk."""
        return max(1, math.floor(density * self.size + 0.5))

    def bands(self, device: torch.device = CPU) -> Iterator[Group]:
        """Yield the chunks in order, some rows of tiles at a time, so that little of a large tensor is copied."""
        elements = BAND_ELEMENTS if device.type == "cpu" else GPU_BAND_ELEMENTS
        rows = max(1, elements // (self.rows * (self.right - self.left))) * self.rows
        for top in range(self.top, self.bottom, rows):
            yield replace(self, top=top, bottom=min(top + rows, self.bottom))

    def part(self, matrix: Tensor) -> Tensor:
        """Return the part of a [R, C] matrix that the chunks cover, as a view."""
        return matrix[self.top : self.bottom, self.left : self.right]

    def gather(self, matrix: Tensor) -> Tensor:
        """Return the chunks [count, size] of a [R, C] matrix by rows of tiles, each flattened row by row."""
        tiles = self.part(matrix).unflatten(0, (-1, self.rows)).unflatten(2, (-1, self.columns))
        return tiles.transpose(1, 2).reshape(-1, self.size)

    def flat_indices(self, positions: Tensor) -> Tensor:
        """Return indices into the flattened tensor for positions [count, k] within the chunks."""
        origins = _origins(self, positions.device)
        offsets = _offsets(self.rows, self.columns, self.stride, positions.device)
        return origins + offsets.index_select(0, positions.reshape(-1)).view(positions.shape)


@lru_cache(maxsize=256)
def _origins(group: Group, device: torch.device) -> Tensor:
    """Return the flat index of each chunk's first element [count, 1]."""
    rows = torch.arange(group.top, group.bottom, group.rows, device=device)
    columns = torch.arange(group.left, group.right, group.columns, device=device)
    return (rows[:, None] * group.stride + columns).reshape(-1, 1)


@lru_cache(maxsize=64)
def _offsets(rows: int, columns: int, stride: int, device: torch.device) -> Tensor:
    """Return the flat indices of a chunk's elements [size], relative to its first element."""
    within = torch.arange(rows * columns, device=device)
    return within // columns * stride + within % columns


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a matrix unchanged, and any other tensor as one row."""
    return tensor if tensor.ndim == 2 else tensor.reshape(1, -1)


def groups_of(shape: tuple[int, ...], tile: tuple[int, int]) -> Iterator[Group]:
    """Yield the groups of a tensor of this shape: whole tiles, right edge, bottom edge, corner."""
    if len(shape) != 2:
        length = math.prod(shape)
        yield Group(0, 1, 0, length, 1, length, length)
        return
    rows, columns = shape
    row_cut, column_cut = rows - rows % tile[0], columns - columns % tile[1]
    for top, bottom, height in ((0, row_cut, tile[0]), (row_cut, rows, rows - row_cut)):
        for left, right, width in ((0, column_cut, tile[1]), (column_cut, columns, columns - column_cut)):
            if bottom > top and right > left:
                yield Group(top, bottom, left, right, height, width, columns)
