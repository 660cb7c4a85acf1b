"""Kept values as small codes into a table of levels.

Source: SparseLoCo section 2.3 (2 bits), in the form its authors deploy: per tensor, centre the values, cut six
standard deviations into 2^bits buckets (rounded to the nearest, so they are not symmetric about the centre), and let
each bucket's level be the mean of what fell into it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RANGE_IN_DEVIATIONS = 6.0

SumOver = Callable[[Tensor], None]
"""Adds up, in place, what several holders of parts of one tensor have."""


def quantise(values: Tensor, bits: int, sum_over: SumOver | None = None) -> tuple[Tensor, Tensor]:
    """Codes [n] (uint8) and levels [2^bits] (fp32) of values [n]; an empty bucket's level is 0.

    If `values` are only a part of the tensor's, `sum_over` sums over all parts: levels are then equal for all, and
    those of the whole but for the order of sums.
    """
    count = 1 << bits
    centre, deviation = _moments(values, sum_over)
    scale = RANGE_IN_DEVIATIONS * deviation / count
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((values - centre) / scale + count / 2).round_().clamp_(0, count - 1).to(torch.int64)
    sums = torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, codes, values.double())
    members = torch.zeros_like(sums).index_add_(0, codes, torch.ones_like(values, dtype=torch.float64))
    if sum_over is not None:
        sum_over(sums)
        sum_over(members)
    levels = torch.where(members > 0, sums / members.clamp(min=1), torch.zeros_like(sums))
    return codes.to(torch.uint8), levels.float()


def _moments(values: Tensor, sum_over: SumOver | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, [] each."""
    if sum_over is None:
        centre = values.mean()
        return centre, (values - centre).square().mean().sqrt()
    total = torch.stack([values.sum(dtype=torch.float64), values.new_tensor(len(values), dtype=torch.float64)])
    sum_over(total)
    centre = (total[0] / total[1]).float()
    squares = (values - centre).square().sum(dtype=torch.float64)
    sum_over(squares)
    return centre, (squares / total[1]).sqrt().float()


def dequantise(codes: Tensor, levels: Tensor) -> Tensor:
    """The level of each code [n], fp32."""
    return levels[codes.long()]
