"""Error feedback and the largest magnitude of each group in one pass over memory, compiled by torch for GPUs.

The next steps read few values: the groups' largest, and those in the chosen groups (as in selection). A compiler may
round a multiplication and an addition once, so the error can differ from the CPU's in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group, as_matrix
from hetero_pp.pseudo_gradient.selection import MAGNITUDE, choose, find_among, group_height, top_k_positions


def advance(error: Tensor, delta: Tensor, band: Group, kept: int, decay: float) -> Tensor:
    """Update error <- decay error + delta in a band; return positions [count, k] of each chunk's k largest, ascending.

    For equal magnitudes, the lower position is kept, as in the other implementations.
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
