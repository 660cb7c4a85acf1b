"""Kept values as small codes into a table of levels.

Source: SparseLoCo section 2.3 (2 bits), in the form its authors deploy: per tensor, centre the values, cut six
standard deviations into 2^bits buckets (rounded to the nearest, so they are not symmetric about the centre), and let
each bucket's level be the mean of what fell into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANGE_IN_DEVIATIONS = 6.0


def quantise(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [n] (uint8) and levels [2^bits] (fp32) of values [n]; an empty bucket's level is 0."""
    count = 1 << bits
    centre = values.mean()
    deviation = (values - centre).square().mean().sqrt()
    scale = RANGE_IN_DEVIATIONS * deviation / count
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((values - centre) / scale + count / 2).round_().clamp_(0, count - 1).to(torch.int64)
    sums = torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, codes, values.double())
    members = torch.zeros_like(sums).index_add_(0, codes, torch.ones_like(values, dtype=torch.float64))
    levels = torch.where(members > 0, sums / members.clamp(min=1), torch.zeros_like(sums))
    return codes.to(torch.uint8), levels.float()


def dequantise(codes: Tensor, levels: Tensor) -> Tensor:
    """The level of each code [n], fp32."""
    return levels[codes.long()]
