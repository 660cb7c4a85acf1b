"""TAH-Quant: activations of all dimensions in 3 or 4 bits, tile by tile, rotated if one number stands out.

A tile is G neighbouring dimensions of a token. A share of a sequence's tiles, those with the highest entropy of |a|,
gets 4 bits, the rest 3. A tile is rotated if its largest magnitude is at least twice the next. That number is moved to
the front, and the tile is multiplied by a Hadamard matrix, which spreads it. The tile is then rounded to the nearest of
evenly spaced levels between its least and its largest value, and the rotation undone. Gradients use fixed point in
tiles of 32, without rotation.

Source: TAH-Quant (arXiv 2506.01352) and its authors' code. It has nothing to learn, and fine-tunes models that were
trained without it; here it is used from the start of training. Difference: scales of gradients are bf16 (theirs are
fp16, with a scaled loss), so that small gradients are not lost. Shapes: B, L, D width, T tiles, G dimensions of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

TILE = 64
GRADIENT_TILE = 32
_STANDS_OUT = 2.0
_TINY = 1e-30


@dataclass(frozen=True)
class TahQuant:
    """Quantiser that gives 4 bits to `share` of the tiles, 3 to the others, and `gradient_bits` to gradients."""

    share: float = 0.8
    gradient_bits: int = 6

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the receiver's input. The backward pass treats rounding as identity, and quantises the gradient."""
        crossed: Tensor = _Crossing.apply(x_BLD, self)
        return crossed

    def activation(self, x_BLD: Tensor) -> Tensor:
        """Return activations after quantisation."""
        tiles = x_BLD.unflatten(-1, (-1, min(TILE, x_BLD.shape[-1])))  # [B, L, T, G]
        front = _front(tiles)
        stands_out = _stand_out(tiles)[..., None]
        rotated = torch.where(stands_out, tiles.gather(-1, front) @ _hadamard(tiles.shape[-1]).to(tiles), tiles)
        rounded = _rounded(rotated, self._levels(tiles)[..., None])
        back = (rounded @ _hadamard(tiles.shape[-1]).to(tiles)).gather(-1, front)
        return torch.where(stands_out, back, rounded).flatten(-2)

    def _levels(self, tiles: Tensor) -> Tensor:
        """Return the number of steps between the lowest and the highest level of each tile [B, L, T]: 15 or 7."""
        shares = tiles.abs() / (tiles.abs().sum(-1, keepdim=True) + _TINY)
        entropy = -(shares * (shares + _TINY).log()).sum(-1).flatten(1)
        low = int(entropy.shape[1] * (1 - self.share))
        ranks = entropy.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
        return torch.where(ranks < low, 7.0, 15.0).unflatten(-1, tiles.shape[1:3])

    def gradient(self, gradient_BLD: Tensor) -> Tensor:
        """Return gradients after quantisation."""
        tiles = gradient_BLD.unflatten(-1, (-1, min(GRADIENT_TILE, gradient_BLD.shape[-1])))
        scale = tiles.abs().amax(-1, keepdim=True).bfloat16().float()
        half = 2.0 ** (self.gradient_bits - 1)
        codes = (tiles / (scale + _TINY) * half).round().clamp(-half, half - 1)
        return (codes / half * scale).flatten(-2)

    def bytes_per_token(self, width: int) -> tuple[float, float]:
        """Return the bytes per token, forward and backward.

        Beside its values a tile has two fp16 numbers, its bit width, whether it is rotated, and the position that stood
        out.
        """
        tile = min(TILE, width)
        beside = 16 + 16 + 1 + 1 + (tile - 1).bit_length()
        forward = width * (3 + self.share) + width / tile * beside
        back = width * self.gradient_bits + width / min(GRADIENT_TILE, width) * 16
        return forward / 8, back / 8


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, quantiser: TahQuant) -> Tensor:
        ctx.quantiser = quantiser
        return quantiser.activation(x_BLD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        quantiser: TahQuant = ctx.quantiser
        return quantiser.gradient(gradients[0]), None


def _front(tiles: Tensor) -> Tensor:
    """Return indices that swap the largest magnitude of each tile with its first number; they also undo the swap."""
    places = torch.arange(tiles.shape[-1], device=tiles.device).expand(tiles.shape).clone()
    largest = tiles.abs().argmax(-1, keepdim=True)
    places.scatter_(-1, largest, 0)
    places[..., :1] = largest
    return places


def _stand_out(tiles: Tensor) -> Tensor:
    """Return whether the largest magnitude of a tile is at least twice the next."""
    first, second = tiles.abs().topk(2, -1).values.unbind(-1)
    return first >= _STANDS_OUT * second


def _rounded(tiles: Tensor, steps: Tensor) -> Tensor:
    """Round to the nearest of evenly spaced levels.

    Scale and least value cross as fp16, but the codes are computed with the exact ones.
    """
    least, most = tiles.amin(-1, keepdim=True), tiles.amax(-1, keepdim=True)
    scale = (most - least) / steps
    codes = ((tiles - least) / (scale + _TINY)).round().clamp(torch.zeros_like(steps), steps)
    return codes * scale.half().float() + least.half().float()


@cache
def _hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix, scaled to be orthogonal; it is symmetric. `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5
