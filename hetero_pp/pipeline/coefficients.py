"""Formats of a boundary's coefficients on the wire: floats, or a few bits with a scale per token.

Shapes: B sequences, L positions, K rank. A *format* converts coefficients [B, L, K] in fp32 into *symbols*, the values
that a receiver can distinguish, and back. A replica needs these conversions with and without links. A link also needs
the conversion of symbols into tensors that it can carry, and back.

More rank in fewer bits is this project's own idea: at equal bytes a boundary should spend them on rank, not on
precision. Activations are rounded to the nearest level of the uniform quantiser that is best for a Gaussian (Max 1960,
table II). Gradients are rounded up or down at random, so that they are right in the mean. The noise is a pure function
of (seed, replica, boundary, step, micro-batch, element), so every run gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hetero_pp.core import bits
from hetero_pp.core.errors import MalformedMessage
from hetero_pp.core.seeds import seed_of
from hetero_pp.model.part_settings import BoundarySettings

STEP_OF_BITS = {2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0568, 8: 0.0308}
"""Width of a level in standard deviations."""

SCALES_PER_OCTAVE = 8

Symbols = tuple[Tensor, ...]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite. NaN is both the least and the largest number of its tensor.

    `torch.isfinite` takes 20 times as long on a CPU, because it writes other tensors of the same size.
    """
    return tensor.numel() == 0 or all(math.isfinite(one) for one in torch.aminmax(tensor))


class CoefficientFormat(Protocol):
    """One way to write coefficients."""

    is_elementwise: ClassVar[bool]
    """Whether each symbol depends on one coefficient alone, so that the coefficients of replicas may be joined."""

    def activation(self, coefficients: Tensor) -> Symbols:
        """Return the symbols of activations."""

    def gradient(self, coefficients: Tensor, key: Tensor) -> Symbols:
        """Return the symbols of gradients; `key` (int64, no dimensions) selects the noise."""

    def coefficients(self, symbols: Symbols) -> Tensor:
        """Return the coefficients [B, L, K] in fp32, in newly allocated memory."""

    def to_wire(self, symbols: Symbols) -> Symbols:
        """Return tensors that a link can carry."""

    def from_wire(self, wire: Symbols, shape: tuple[int, int, int]) -> Symbols:
        """Return the symbols of coefficients of this shape. Raises MalformedMessage if `wire` is not valid."""

    def wire_bytes(self, shape: tuple[int, int, int]) -> int:
        """Return the bytes that coefficients of this shape take on a link."""


@dataclass(frozen=True)
class Floats:
    """fp32 or bf16; the symbols are the rounded numbers."""

    is_elementwise: ClassVar[bool] = True
    dtype: torch.dtype

    def activation(self, coefficients: Tensor) -> Symbols:
        return (coefficients.to(self.dtype),)

    def gradient(self, coefficients: Tensor, key: Tensor) -> Symbols:
        """Round gradients to the nearest number, without noise."""
        return (coefficients.to(self.dtype),)

    def coefficients(self, symbols: Symbols) -> Tensor:
        return symbols[0].to(torch.float32, copy=True)

    def to_wire(self, symbols: Symbols) -> Symbols:
        return symbols

    def from_wire(self, wire: Symbols, shape: tuple[int, int, int]) -> Symbols:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in wire]
        if found != [(shape, self.dtype)]:
            raise MalformedMessage(f"found {found}, expected one tensor {shape} of {self.dtype}")
        if not is_finite(wire[0]):
            raise MalformedMessage("a coefficient is not finite: training diverged, or the message is damaged")
        return wire

    def wire_bytes(self, shape: tuple[int, int, int]) -> int:
        return shape[0] * shape[1] * shape[2] * self.dtype.itemsize


@dataclass(frozen=True)
class Bits:
    """2 to 8 bits per coefficient, one byte per token for its scale, and one fp32 per message for the largest scale.

    The symbols are:

    - codes [B, L, K] (uint8, level code + 1/2 steps above the lowest edge);
    - scale exponents [B, L] (uint8: eighths of an octave below the largest scale);
    - the largest scale [1] (fp32).
    """

    is_elementwise: ClassVar[bool] = False
    width: int

    def activation(self, coefficients: Tensor) -> Symbols:
        """Quantise activations; the scale of a token is proportional to its root mean square."""
        step_share = STEP_OF_BITS[self.width]
        exponents, largest, steps = _scales(coefficients.square().mean(-1).sqrt() * step_share)
        return self._codes(coefficients / steps[..., None]), exponents, largest

    def gradient(self, coefficients: Tensor, key: Tensor) -> Symbols:
        """Quantise gradients; the scale of a token covers its largest magnitude, so that nothing is clipped."""
        reach = coefficients.abs().amax(-1) * (2.0 / ((1 << self.width) - 1))
        exponents, largest, steps = _scales(reach, cover=True)
        return self._codes(coefficients / steps[..., None] + noise(key, coefficients)), exponents, largest

    def coefficients(self, symbols: Symbols) -> Tensor:
        codes, exponents, largest = symbols
        steps = _scale_table(largest.device)[exponents.long()] * largest
        return (codes.float() + (0.5 - (1 << self.width) / 2)) * steps[..., None]

    def to_wire(self, symbols: Symbols) -> Symbols:
        """Pack the codes of all tokens to their width."""
        codes, exponents, largest = symbols
        return torch.from_numpy(bits.pack(codes.cpu().numpy(), self.width)), exponents.cpu(), largest.cpu()

    def from_wire(self, wire: Symbols, shape: tuple[int, int, int]) -> Symbols:
        count = shape[0] * shape[1] * shape[2]
        expected = [
            ((bits.packed_size(count, self.width),), torch.uint8),
            (shape[:2], torch.uint8),
            ((1,), torch.float32),
        ]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in wire]
        if found != expected:
            raise MalformedMessage(f"found {found}, expected {expected}")
        packed, exponents, largest = wire
        if not is_finite(largest) or bool((largest < 0).any()):
            raise MalformedMessage(f"found a scale of {largest.item()}, expected a finite one")
        codes = bits.unpack(packed.numpy(), self.width, count).astype("uint8")
        return torch.from_numpy(codes).view(shape), exponents.clone(), largest.clone()

    def wire_bytes(self, shape: tuple[int, int, int]) -> int:
        return bits.packed_size(shape[0] * shape[1] * shape[2], self.width) + shape[0] * shape[1] + 4

    def _codes(self, levels: Tensor) -> Tensor:
        half = (1 << self.width) / 2
        return (levels.floor() + half).clamp(0, 2 * half - 1).to(torch.uint8)


def _scales(wanted_BL: Tensor, cover: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Round scales to eighths of an octave below the largest; with `cover`, up.

    Returns (exponents, largest, rounded).
    """
    largest = wanted_BL.amax().reshape(1)
    octaves = torch.log2(largest / wanted_BL.clamp(min=torch.finfo(torch.float32).tiny)) * SCALES_PER_OCTAVE
    octaves = octaves.floor() if cover else octaves.round()
    exponents = octaves.nan_to_num(255.0).clamp(0, 255).to(torch.uint8)
    rounded = _scale_table(wanted_BL.device)[exponents.long()] * largest
    return exponents, largest, rounded.clamp(min=torch.finfo(torch.float32).tiny)


@cache
def _scale_table(device: torch.device) -> Tensor:
    """Return 2^(-n / 8) for every byte n, from float64, so that every device decodes to the same bits."""
    octaves = torch.arange(256, dtype=torch.float64) / SCALES_PER_OCTAVE
    return torch.pow(2.0, -octaves).float().to(device)


def noise(key: Tensor, like: Tensor) -> Tensor:
    """Return uniform noise in (-1/2, 1/2) in the shape of `like`: a hash of the key and each element's index.

    Uses only integer arithmetic, so every device and every path gets the same values (SplitMix64's finalizer).
    """
    state = torch.arange(like.numel(), dtype=torch.int64, device=like.device) * -7046029254386353131 + key
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * -4658895280553007687
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * -7723592293110705685
    state = state ^ (state >> 31 & (1 << 33) - 1)
    return (((state >> 40) & ((1 << 24) - 1)).float().add_(0.5) / (1 << 24) - 0.5).view(like.shape)


WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def format_of(settings: BoundarySettings) -> CoefficientFormat:
    """Return the format that the settings select."""
    return Floats(WIRE_DTYPES[settings.dtype]) if settings.bits is None else Bits(settings.bits)


def noise_key(seed: int, replica: str, hop: int, step: int, micro_batch: int) -> Tensor:
    """Return the key that selects the rounding noise of one gradient (int64, no dimensions).

    `step` counts over the whole run.
    """
    return torch.tensor(seed_of(seed, "rounding", replica, hop, step, micro_batch))
