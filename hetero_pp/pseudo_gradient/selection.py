"""Positions of the values that are kept in each chunk: the k largest, or k at random as a baseline.

Top-k takes two small searches: choose a few groups by their largest value, then search those. A group is one column of
a few consecutive rows of a tile. The largest values of all groups are therefore elementwise maxima of rows, without a
copy of the tiles. The k largest values of a chunk lie in the k groups with the largest maxima. One value more than is
kept is searched. If it equals the smallest kept value, there is a tie, and the first of the equal values are kept, so
that equal inputs keep equal values. Ties are common: a row of the embedding that a round does not use only decays, by a
few different amounts. Otherwise the k largest are known, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.core.seeds import seed_of
from hetero_pp.pseudo_gradient.chunks import Group

GROUPS_PER_KEPT = 8
"""Fewest groups of a chunk per kept value; more groups have fewer rows, and so fewer candidates."""

FEW_VALUES = 1 << 14
"""Values up to which one search of all takes less time than the many operations of two searches."""

MAGNITUDE = 0x7FFFFFFF
"""Mask of a float's bits without its sign; the bits have the order of magnitudes and cannot be NaN."""


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
