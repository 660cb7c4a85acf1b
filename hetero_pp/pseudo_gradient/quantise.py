"""Quantisation of kept values: codes of a table of levels per tensor, or signs with one magnitude per chunk.

Source of levels: SparseLoCo section 2.3 (2 bits), as its authors deploy it. Per tensor, centre the values and cut six
standard deviations into 2^bits buckets. Rounding to the nearest bucket makes them asymmetric about the centre. Each
bucket's level is the mean of its values.

Signs are our own. Error feedback makes the kept magnitudes of a chunk nearly equal, so one magnitude, to 1/16 of an
octave, represents all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hetero_pp.core.device import CPU
from hetero_pp.pseudo_gradient.compression import CompressionSettings

RANGE_IN_DEVIATIONS = 6.0

STEPS_PER_OCTAVE = 16
OCTAVES_BELOW_BASE = 8
BASES = range(-118, 120)  # bases for which all magnitudes are normal fp32 numbers

Kept = Sequence[tuple[int, int]]
"""Layout of values [n] in chunks: for each group, its number of chunks and of kept values per chunk."""

SumOver = Callable[[Tensor], None]  # sums a tensor, in place, over the holders of parts of one tensor


@dataclass(frozen=True)
class Quantised:
    """Quantised values of a tensor: what is sent, and what a receiver decodes."""

    values: Tensor  # values as the receiver decodes them [n], fp32
    codes: Tensor | None = None
    """Codes [n], uint8: index of the level, or the sign (1: negative); None if values are sent unchanged."""
    levels: Tensor | None = None  # levels [2^bits], fp32
    magnitudes: Tensor | None = None  # magnitudes [chunks], uint8: logarithm of each chunk's magnitude, with signs
    base: int = 0  # binary exponent that the magnitudes are relative to


def quantise_as(
    settings: CompressionSettings, values: Tensor, kept: Kept, sum_over: SumOver | None = None
) -> Quantised:
    """Quantise values [n] of chunks as the settings say.

    If `values` are only a part of the tensor's, `sum_over` sums over all parts.
    """
    if settings.value_bits == 32:
        return Quantised(values)
    if settings.quantiser == "signs":
        return quantise_signs(values, kept, sum_over)
    codes, levels = quantise(values, settings.value_bits, sum_over)
    return Quantised(dequantise(codes, levels), codes, levels)


def quantise(values: Tensor, bits: int, sum_over: SumOver | None = None) -> tuple[Tensor, Tensor]:
    """Return codes [n] (uint8) and levels [2^bits] (fp32) of values [n]; an empty bucket's level is 0.

    If `values` are only a part of the tensor's, `sum_over` sums over all parts. Levels are then equal for all parts,
    and equal to the whole's except for the order of sums.
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
    """Return the sum and the number of the values of each code [count], fp64."""
    if values.device.type == "cpu":  # several times faster on a CPU, and not deterministic on a GPU
        return torch.bincount(codes, values.double(), count), torch.bincount(codes, minlength=count).double()
    none = torch.zeros(count, dtype=torch.float64, device=values.device)
    return none.index_add(0, codes, values.double()), none.index_add(0, codes, torch.ones_like(values).double())


def _moments(values: Tensor, sum_over: SumOver | None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, each of shape []."""
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
    """Return the level of each code [n], fp32."""
    return levels.index_select(0, codes.int())


def quantise_signs(values: Tensor, kept: Kept, sum_over: SumOver | None = None) -> Quantised:
    """Quantise values [n] to signs [n] and the mean magnitude of each chunk [chunks] as a byte; 0 for a chunk of zeros.

    A byte c > 0 represents 2^(base - 8 + c / 16); the base is the exponent of the mean magnitude of all values.
    """
    parts = values.abs().split([chunks * each for chunks, each in kept])
    sums = [part.view(shape).sum(dim=1, dtype=torch.float64) for part, shape in zip(parts, kept, strict=True)]
    base, magnitudes = magnitudes_of(sums, kept, values.device, sum_over)
    codes = values.signbit().view(torch.uint8)
    return Quantised(dequantise_signs(codes, magnitudes, base, kept), codes, None, magnitudes, base)


def magnitudes_of(
    sums: Sequence[Tensor], kept: Kept, device: torch.device, sum_over: SumOver | None = None
) -> tuple[int, Tensor]:
    """Return the base and each chunk's byte [chunks], from the sums of each group's magnitudes [chunks], fp64."""
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
    """Return the magnitude of its chunk with each sign [n], fp32, bitwise equal on every device.

    A sign is set by its bit: torch.where takes ten times as long for a mask of random bits.
    """
    decode = signs_by_numpy if codes.device.type == "cpu" else signs_by_torch
    return decode(codes, magnitudes, base, kept)


def signs_by_torch(codes: Tensor, magnitudes: Tensor, base: int, kept: Kept) -> Tensor:
    """Return what `dequantise_signs` does, on any device."""
    of_chunks = _table(base, codes.device).index_select(0, magnitudes.int()).view(torch.int32)
    values = torch.empty(len(codes), dtype=torch.int32, device=codes.device)
    sizes = [chunks * each for chunks, each in kept]
    groups = of_chunks.split_with_sizes([chunks for chunks, _ in kept])
    parts = zip(values.split_with_sizes(sizes), codes.split_with_sizes(sizes), groups, kept, strict=True)
    for out, part, own, shape in parts:
        torch.bitwise_xor(part.view(shape).int() << 31, own[:, None], out=out.view(shape))
    return values.view(torch.float32)


def signs_by_numpy(codes: Tensor, magnitudes: Tensor, base: int, kept: Kept) -> Tensor:
    """Return it for tensors on a CPU, in a tenth of torch's time for a small tensor, and no more for a large one."""
    of_chunks = _table(base, CPU).numpy().view(np.int32)[magnitudes.numpy()]
    values = np.left_shift(codes.numpy(), 31, dtype=np.int32)
    start = chunk = 0
    for chunks, each in kept:
        part = values[start : start + chunks * each].reshape(chunks, each)
        part ^= of_chunks[chunk : chunk + chunks, None]
        start, chunk = start + chunks * each, chunk + chunks
    return torch.from_numpy(values).view(torch.float32)


@lru_cache(maxsize=256)  # tensors of a run have few bases, and a table takes longer than a small tensor's values
def _table(base: int, device: torch.device) -> Tensor:
    """Return the magnitude that each byte represents [256], fp32."""
    octaves = ((step / STEPS_PER_OCTAVE) + base - OCTAVES_BELOW_BASE for step in range(1, 256))
    return torch.tensor([0.0, *(2.0**octave for octave in octaves)], device=device)
