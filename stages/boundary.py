"""Boundary between two neighbouring stages: what crosses the link, and its reconstruction on the other side.

Shapes: B sequences, L positions, D width, K rank, V vocabulary. With compression, the coefficients X U cross, and the
coefficients G U of the gradient come back. Without it, X and G themselves cross. Source: Het-PP section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.pipeline.coefficients import CoefficientFormat, Symbols, format_of
from hetero_pp.pipeline.subspace import columns_of, expand_gradient, perpendicular, project, reconstruct


def boundary_of(settings: BoundarySettings, width: int, basis: Tensor | None) -> Boundary:
    """Return the boundary of a model of this width; `basis` [D, K'] has at least the columns that it needs."""
    return Boundary(width, format_of(settings), columns_of(basis, settings.dimensions(width)))


@dataclass
class Boundary:
    """Both sides of a boundary. `basis` [D, K] is None if it is not compressed."""

    width: int
    format: CoefficientFormat
    basis: Tensor | None = None
    perpendicular: Tensor | None = None  # t_perp [V, D], at a receiver of compressed activations

    @property
    def dimensions(self) -> int:
        """Numbers per token on the wire."""
        return self.width if self.basis is None else self.basis.shape[1]

    def split(self, embedding: Tensor) -> None:
        """Derive T_perp from the synchronized token embedding [V, D], which may lie on another device."""
        if self.basis is not None:
            table = embedding.detach().to(self.basis.device)
            self.perpendicular = perpendicular(table, self.basis, self.perpendicular)

    def move(self, basis_DK: Tensor) -> None:
        """Change to another basis, at an outer round; the embedding has to be split again."""
        self.basis, self.perpendicular = basis_DK, None

    def encode_activation(self, x_BLD: Tensor) -> Symbols:
        """Encode the sender's output [B, L, D], of any dtype, for the receiver."""
        x_BLD = x_BLD.detach().float()
        return self.format.activation(x_BLD if self.basis is None else project(x_BLD, self.basis))

    def decode_activation(self, symbols: Symbols, tokens_BL: Tensor) -> Tensor:
        """Return the receiver's input [B, L, D], in newly allocated memory."""
        coefficients = self.format.coefficients(symbols)
        if self.basis is None or self.perpendicular is None:
            return coefficients
        return reconstruct(coefficients, self.basis, self.perpendicular, tokens_BL)

    def encode_gradient(self, gradient_BLD: Tensor, key: Tensor) -> Symbols:
        """Encode the gradient at the receiver's input; `key` selects the noise of rounding."""
        coefficients = gradient_BLD if self.basis is None else project(gradient_BLD, self.basis)
        return self.format.gradient(coefficients, key)

    def decode_gradient(self, symbols: Symbols) -> Tensor:
        """Return the gradient [B, L, D] at the sender's output."""
        coefficients = self.format.coefficients(symbols)
        return coefficients if self.basis is None else expand_gradient(coefficients, self.basis)

    def cross(self, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Apply both sides at once, for a replica that is not split: the same arithmetic without a link."""
        return _Crossing.apply(x_BLD, self, tokens_BL, key)


class _Crossing(torch.autograd.Function):
    """Forward and backward of a boundary as one operation."""

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, boundary: Boundary, tokens_BL: Tensor, key: Tensor) -> Tensor:
        ctx.boundary = boundary
        ctx.save_for_backward(key)
        return boundary.decode_activation(boundary.encode_activation(x_BLD), tokens_BL)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (key,) = ctx.saved_tensors
        boundary: Boundary = ctx.boundary
        return boundary.decode_gradient(boundary.encode_gradient(gradients[0], key)), None, None, None
