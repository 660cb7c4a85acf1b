"""Top-k within each chunk with a fixed order of ties, so that equal inputs keep equal values."""

from __future__ import annotations

import torch
from torch import Tensor


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
