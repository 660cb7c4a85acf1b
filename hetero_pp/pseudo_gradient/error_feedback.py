"""From a parameter difference to what is sent, keeping what was not: SparseLoCo equation 2.

    e <- beta e + Delta;  D = Q(TopK(e));  e <- e - D

The value that is subtracted is the quantised one, so the receiver's loss of precision is made good later too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import as_matrix, groups_of
from hetero_pp.pseudo_gradient.quantise import SumOver, dequantise, quantise
from hetero_pp.pseudo_gradient.top_k import top_k_positions
from hetero_pp.settings import Ratio, Settings


class CompressionSettings(Settings):
    """How a pseudo-gradient is compressed."""

    density: Ratio = Field(1 / 32, gt=0, le=1, description="share of each chunk that is kept, k / chunk")
    tile: tuple[int, int] = Field((64, 64), description="rows and columns of a chunk of a matrix")
    value_bits: Literal[1, 2, 3, 4, 32] = Field(2, description="bits of a kept value; 32 sends it as it is")
    error_feedback_decay: float = Field(0.95, ge=0, le=1, description="beta in the paper")


@dataclass(frozen=True)
class Selection:
    """What is sent of one tensor: positions [n, k] per group, codes [all kept] and levels, or the values."""

    positions: tuple[Tensor, ...]
    indices: Tensor
    """Of all kept values, into the flattened tensor."""
    codes: Tensor | None
    levels: Tensor | None
    values: Tensor
    """As the receiver will see them, fp32, in the order of the positions."""

    @property
    def kept_values(self) -> int:
        return self.values.numel()


def select(error: Tensor, delta: Tensor, settings: CompressionSettings, sum_over: SumOver | None = None) -> Selection:
    """Take from `error`, in place, what is sent this round. Both have the parameter's shape, fp32.

    Or the shape of a part of it, whole rows of chunks, or none (pseudo_gradient.rows); then `sum_over` sums over parts.
    """
    error.mul_(settings.error_feedback_decay).add_(delta)
    matrix, flat = as_matrix(error), error.view(-1)
    positions, indices = [], []
    for group in groups_of(tuple(error.shape), settings.tile) if error.numel() else ():
        kept = group.kept(settings.density)
        chosen = [(band, top_k_positions(band.gather(matrix), kept)) for band in group.bands()]
        positions.append(torch.cat([found for _, found in chosen]))
        indices += [band.flat_indices(found).reshape(-1) for band, found in chosen]
    where = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64, device=error.device)
    values = flat[where]
    codes = levels = None
    if settings.value_bits < 32:
        codes, levels = quantise(values, settings.value_bits, sum_over)
        values = dequantise(codes, levels)
    flat[where] -= values
    return Selection(tuple(positions), where, codes, levels, values)
