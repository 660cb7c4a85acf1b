"""Kept values as small codes: into a table of levels a tensor, or their signs beside a magnitude a chunk.

Source: SparseLoCo section 2.3 (2 bits), in the form its authors deploy: per tensor, centre the values, cut six
standard deviations into 2^bits buckets (rounded to the nearest, so they are not symmetric about the centre), and let
each bucket's level be the mean of what fell into it.

Signs are ours: error feedback makes the kept magnitudes of a chunk nearly equal, so one of them, to 1/16 of an octave,
stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.compression import CompressionSettings

RANGE_IN_DEVIATIONS = 6.0

STEPS_PER_OCTAVE = 16
OCTAVES_BELOW_BASE = 8
BASES = range(-118, 120)
"""Of which all magnitudes are normal fp32 numbers."""

Kept = Sequence[tuple[int, int]]
"""How values [n] belong to chunks: of each group its chunks, and how many values are kept of each."""

SumOver = Callable[[Tensor], None]
"""Adds up, in place, what several holders of parts of one tensor have."""


@dataclass(frozen=True)
class Quantised:
    """What is sent of the kept values of a tensor, and what a receiver makes of it."""

    values: Tensor
    """As the receiver will see them [n], fp32."""
    codes: Tensor | None = None
    """[n], uint8: which level, or the sign (1: negative); None if the values are sent as they are."""
    levels: Tensor | None = None
    """[2^bits], fp32."""
    magnitudes: Tensor | None = None
    """[chunks], uint8: log magnitudes of a chunk's values, with signs."""
    base: int = 0
    """Binary exponent that the magnitudes are relative to."""


def quantise_as(
    settings: CompressionSettings, values: Tensor, kept: Kept, sum_over: SumOver | None = None
) -> Quantised:
    """Values [n] of chunks as the settings say.

    If `values` are only a part of the tensor's, `sum_over` sums over all parts.
    """
    if settings.value_bits == 32:
        return Quantised(values)
    if settings.quantiser == "signs":
        return quantise_signs(values, kept, sum_over)
    codes, levels = quantise(values, settings.value_bits, sum_over)
    return Quantised(dequantise(codes, levels), codes, levels)


def quantise(values: Tensor, bits: int, sum_over: SumOver | None = None) -> tuple[Tensor, Tensor]:
    """Codes [n] (uint8) and levels [2^bits] (fp32) of values [n]; an empty bucket's level is 0.

    If `values` are only a part of the tensor's, `sum_over` sums over all parts: levels are then equal for all, and
    those of the whole but for the order of sums.
    """
    count = 1 << bits
    centre, deviation = _moments(values, sum_over)
    scale = RANGE_IN_DEVIATIONS * deviation / count
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((values - centre) / scale + count / 2).round_().clamp_(0, count - 1).to(torch.int32)
    sums, members = _totals(codes, values, count)
    if sum_over is not None:
        sum_over(sums)
        sum_over(members)
    levels = torch.where(members > 0, sums / members.clamp(min=1), torch.zeros_like(sums))
    return codes.to(torch.uint8), levels.float()


def _totals(codes: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sum and number of the values of each code [count], fp64."""
    if values.device.type == "cpu":  # several times faster there, and not deterministic on a GPU
        return torch.bincount(codes, values.double(), count), torch.bincount(codes, minlength=count).double()
    none = torch.zeros(count, dtype=torch.float64, device=values.device)
    return none.index_add(0, codes, values.double()), none.index_add(0, codes, torch.ones_like(values).double())


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
    return levels.index_select(0, codes.int())


def quantise_signs(values: Tensor, kept: Kept, sum_over: SumOver | None = None) -> Quantised:
    """Signs [n] of values [n], and the mean magnitude of each chunk [chunks] as a byte; 0 for a chunk of zeros.

    A byte c > 0 stands for 2^(base - 8 + c / 16); the base is the exponent of the mean magnitude of all values.
    """
    parts = values.abs().split([chunks * each for chunks, each in kept])
    sums = [part.view(shape).sum(dim=1, dtype=torch.float64) for part, shape in zip(parts, kept, strict=True)]
    base, magnitudes = magnitudes_of(sums, kept, values.device, sum_over)
    codes = values.signbit().view(torch.uint8)
    return Quantised(dequantise_signs(codes, magnitudes, base, kept), codes, None, magnitudes, base)


def magnitudes_of(
    sums: Sequence[Tensor], kept: Kept, device: torch.device, sum_over: SumOver | None = None
) -> tuple[int, Tensor]:
    """The base and the byte of each chunk [chunks], from the sums of each group's magnitudes [chunks], fp64."""
    none = torch.empty(0, dtype=torch.float64, device=device)
    count = sum(chunks * each for chunks, each in kept)
    total = torch.stack([torch.cat([none, *sums]).sum(), none.new_tensor(count)])
    if sum_over is not None:
        sum_over(total)
    mean = (total[0] / total[1].clamp(min=1)).item()
    base = min(max(math.frexp(mean)[1] - 1, BASES.start), BASES.stop - 1) if mean > 0 else 0
    means = torch.cat([none, *(one / each for one, (_, each) in zip(sums, kept, strict=True))])
    steps = (means.log2() - (base - OCTAVES_BELOW_BASE)) * STEPS_PER_OCTAVE
    bytes_ = steps.round_().clamp_(1, 255).to(torch.uint8)
    return base, torch.where(means > 0, bytes_, torch.zeros_like(bytes_))


def dequantise_signs(codes: Tensor, magnitudes: Tensor, base: int, kept: Kept) -> Tensor:
    """The magnitude of its chunk with each sign [n], fp32, the same bits on every device."""
    table = _table(base, codes.device)
    of_chunks = table.index_select(0, magnitudes.int()).split([chunks for chunks, _ in kept])
    parts = [part[:, None].expand(shape).reshape(-1) for part, shape in zip(of_chunks, kept, strict=True)]
    each = parts[0] if len(parts) == 1 else torch.cat([table[:0], *parts])
    return torch.where(codes.view(torch.bool), -each, each)


@lru_cache(maxsize=256)  # tensors of a run have few bases, and a table takes longer than a small tensor's values
def _table(base: int, device: torch.device) -> Tensor:
    """What each byte of a chunk's magnitude stands for [256], fp32."""
    octaves = ((step / STEPS_PER_OCTAVE) + base - OCTAVES_BELOW_BASE for step in range(1, 256))
    return torch.tensor([0.0, *(2.0**octave for octave in octaves)], device=device)
