"""Random-k within each chunk: the baseline for top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.core.seeds import seed_of


def random_positions(chunks: int, size: int, kept: int, generator: torch.Generator | None) -> Tensor:
    """Draw positions [chunks, k] without replacement from each chunk of `size` values, ascending."""
    if kept == size:
        return torch.arange(kept).expand(chunks, kept)
    drawn = torch.rand(chunks, size, generator=generator).topk(kept, dim=1, sorted=False).indices
    return drawn.sort(dim=1).values


def generator_of(run: str, round_: int, replica: str, name: str, part: int = 0) -> torch.Generator:
    """Return the generator of a replica's positions in one round, for one tensor or a rank's part of it."""
    return torch.Generator().manual_seed(seed_of("random_k", run, round_, replica, name, part))
