"""Top-k within each chunk, with a fixed order of ties, so that the same input always keeps the same values."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_positions(chunks: Tensor, kept: int) -> Tensor:
    """Positions [n, k] of the k largest magnitudes of each row of [n, size], ascending.

    Among equal magnitudes the lower index is kept.
    """
    if kept == chunks.shape[1]:
        return torch.arange(kept, device=chunks.device).expand(len(chunks), kept)
    magnitudes = chunks.abs()
    least = magnitudes.topk(kept, dim=1).values[:, -1:]
    above, equal = magnitudes > least, magnitudes == least
    room = kept - above.sum(dim=1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=1) <= room))
    return torch.nonzero(keep)[:, 1].view(len(chunks), kept)
