"""Chunks of a tensor within which values are selected, and the positions that are kept in each of them.

Chunks are 64 x 64 tiles of a matrix, or a whole vector. Tiles at the right and bottom edges may be partial. Chunks of
equal size form a *group* [chunks, size], and a tensor has at most four groups. Source: SparseLoCo section 2.3; partial
tiles keep the density, not the count.

Kept are the k largest values of a chunk, or k at random as a baseline. Top-k takes two small searches: choose a few
groups by their largest value, then search those. Such a group is one column of a few consecutive rows of a tile. The
largest values of all of them are therefore elementwise maxima of rows, without a copy of the tiles. The k largest
values of a chunk lie in the k groups with the largest maxima. One value more than is kept is searched. If it equals the
smallest kept value, there is a tie, and the first of the equal values are kept, so that equal inputs keep equal values.
Ties are common: a row of the embedding that a round does not use only decays, by a few different amounts. Otherwise the
k largest are known, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from hetero_pp.core.device import CPU
from hetero_pp.core.seeds import seed_of

BAND_ELEMENTS = 1 << 19  # approximate number of elements processed at once on a CPU, few enough to stay in a cache
GPU_BAND_ELEMENTS = 1 << 26  # the same on a GPU, enough that its kernels take longer than their start
GROUPS_PER_KEPT = 8  # fewest groups of a chunk per kept value; more groups have fewer rows, and so fewer candidates
FEW_VALUES = 1 << 14  # values up to which one search of all takes less time than the many operations of two searches

MAGNITUDE = 0x7FFFFFFF
"""Mask of a float's bits without its sign; the bits have the order of magnitudes and cannot be NaN."""


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


def find_largest(matrix: Tensor, band: Group, kept: int) -> Tensor:
    """Return positions [count, k] of the k largest magnitudes of each chunk of a band of a [R, C] matrix, ascending.

    The matrix is fp32. The result equals that of `top_k_positions`, including ties.
    """
    height = group_height(band, kept)
    if height == 1 or band.count * band.size <= FEW_VALUES:
        return top_k_positions(band.gather(matrix), kept)
    return find_in_groups(matrix, band, height, kept)


def find_in_groups(matrix: Tensor, band: Group, height: int, kept: int) -> Tensor:
    """Return what `find_largest` returns, by two searches; a group has `height` rows, at least 2."""
    magnitudes = band.part(matrix).view(torch.int32).bitwise_and(MAGNITUDE)
    largest = magnitudes.view(magnitudes.shape[0] // height, height, -1).amax(dim=1)
    chosen = choose(largest, band, height, kept)
    return find_among(_candidates(magnitudes, band, height, chosen), chosen, matrix, band, kept)


def choose(largest: Tensor, band: Group, height: int, kept: int) -> Tensor:
    """Return the k + 1 groups [count, k + 1] of each chunk with the largest maxima; `largest`: [R / height, C]."""
    tiles = largest.view(-1, band.rows // height, largest.shape[1] // band.columns, band.columns)
    return tiles.transpose(1, 2).reshape(band.count, -1).topk(kept + 1, dim=1, sorted=False).indices


def find_among(candidates: Tensor, chosen: Tensor, matrix: Tensor, band: Group, kept: int) -> Tensor:
    """Return positions [count, k] of the largest of the chosen groups' values [count, height (k + 1)], row by row."""
    groups = chosen.shape[1]
    height = candidates.shape[1] // groups
    values, where = candidates.topk(kept + 1, dim=1, sorted=False)
    least, last = values.min(dim=1, keepdim=True)
    first = chosen.gather(1, where % groups)
    rows = first // band.columns * height + where // groups
    positions = rows * band.columns + first % band.columns
    positions = _ascending(positions.scatter_(1, last, band.size))[:, :kept]
    is_tied = (values == least).sum(dim=1) > 1
    if bool(is_tied.any()):
        tied = band.gather(matrix)[is_tied].view(torch.int32).bitwise_and_(MAGNITUDE)
        positions[is_tied] = by_order(tied, least[is_tied], kept)
    return positions


def _ascending(positions: Tensor) -> Tensor:
    """Return each row in order; may change the tensor. On a CPU numpy sorts short rows several times faster."""
    if positions.device.type != "cpu":
        return positions.sort(dim=1).values
    positions.numpy().sort(axis=1)
    return positions


def group_height(band: Group, kept: int) -> int:
    """Return a group's rows: the largest divisor of a tile's rows that leaves enough groups; 1 if none helps."""
    most = band.size // (GROUPS_PER_KEPT * kept)
    return max((height for height in range(1, min(most, band.rows) + 1) if band.rows % height == 0), default=1)


def _candidates(magnitudes: Tensor, band: Group, height: int, chosen: Tensor) -> Tensor:
    """Return the values [count, height * groups] of the chosen groups [count, groups] of each chunk of a band."""
    width = magnitudes.shape[1]
    tops = torch.arange(0, magnitudes.shape[0], band.rows, device=chosen.device) * width
    origins = (tops[:, None] + torch.arange(0, width, band.columns, device=chosen.device)).view(-1, 1)
    first = origins + chosen // band.columns * (height * width) + chosen % band.columns
    rows = torch.arange(height, device=chosen.device) * width
    where = first[:, None] + rows[:, None]  # with the longer dimension last, these two steps take half the time
    return magnitudes.view(-1).index_select(0, where.view(-1)).view(len(chosen), -1)


def top_k_positions(chunks: Tensor, kept: int) -> Tensor:
    """Return positions [n, k] of the k largest magnitudes of each row of [n, size], ascending.

    For equal magnitudes, the lower index is kept. torch.topk leaves that open, so rows with a tie at the edge are
    selected again.
    """
    if kept == chunks.shape[1]:
        return torch.arange(kept, device=chunks.device).expand(len(chunks), kept)
    magnitudes = chunks.abs()
    values, positions = magnitudes.topk(kept, dim=1, sorted=False)
    least = values.amin(dim=1, keepdim=True)
    is_tied = (magnitudes == least).sum(dim=1) > (values == least).sum(dim=1)
    positions = positions.sort(dim=1).values
    if bool(is_tied.any()):
        positions[is_tied] = by_order(magnitudes[is_tied], least[is_tied], kept)
    return positions


def by_order(magnitudes: Tensor, least: Tensor, kept: int) -> Tensor:
    """Return positions for rows [n, size] with ties: the k-th largest magnitude `least` [n, 1] occurs too often."""
    above, equal = magnitudes > least, magnitudes == least
    room = kept - above.sum(dim=1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=1) <= room))
    return torch.nonzero(keep)[:, 1].view(len(magnitudes), kept)


def random_positions(chunks: int, size: int, kept: int, generator: torch.Generator | None) -> Tensor:
    """Draw positions [chunks, k] without replacement from each chunk of `size` values, ascending."""
    if kept == size:
        return torch.arange(kept).expand(chunks, kept)
    drawn = torch.rand(chunks, size, generator=generator).topk(kept, dim=1, sorted=False).indices
    return drawn.sort(dim=1).values


def generator_of(run: str, round_: int, replica: str, name: str, part: int = 0) -> torch.Generator:
    """Return the generator of a replica's positions in one round, for one tensor or a rank's part of it."""
    return torch.Generator().manual_seed(seed_of("random_k", run, round_, replica, name, part))


# ---- on a GPU ----


def advance_compiled(error: Tensor, delta: Tensor, band: Group, kept: int, decay: float) -> Tensor:
    """Update error <- decay error + delta in a band; return positions [count, k] of each chunk's k largest, ascending.

    This is one pass over memory, compiled by torch for GPUs; `find_among` then reads few values. A compiler may round a
    multiplication and an addition once, so the error can differ from the CPU's in the last place.
    """
    own, added = (band.part(as_matrix(tensor)) for tensor in (error, delta))
    height = group_height(band, kept)
    matrix, largest = as_matrix(error), _compiled()(own, added, decay, height)
    if height == 1:
        return top_k_positions(band.gather(matrix), kept)
    chosen = choose(largest, band, height, kept)
    first = chosen // band.columns * (height * band.columns) + chosen % band.columns
    below = torch.arange(height, device=error.device) * band.columns
    where = band.flat_indices((first[:, None] + below[:, None]).view(band.count, -1))
    candidates = error.view(-1).take(where).view(torch.int32).bitwise_and(MAGNITUDE)
    return find_among(candidates, chosen, matrix, band, kept)


def update_and_largest(error: Tensor, delta: Tensor, decay: float, height: int) -> Tensor:
    """Update error <- decay error + delta [R, C] in place; return the groups' largest magnitudes [R / height, C]."""
    updated = error * decay + delta
    error.copy_(updated)
    return updated.view(torch.int32).bitwise_and(MAGNITUDE).view(-1, height, updated.shape[1]).amax(dim=1)


@lru_cache(maxsize=1)
def _compiled() -> Callable[[Tensor, Tensor, float, int], Tensor]:
    return torch.compile(update_and_largest, dynamic=True)
