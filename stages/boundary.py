"""What crosses the link between two neighbouring stages, and what it becomes on the other side.

Shapes: B sequences, L positions, D width, K rank, V vocabulary. Compressed, the coefficients X U cross, and back
come the coefficients G U of the gradient; uncompressed, X and G themselves. Source: Het-PP section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp import bits
from hetero_pp.errors import MalformedMessage
from hetero_pp.subspace import expand_gradient, perpendicular, project, reconstruct

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Boundary:
    """Both sides of a boundary. `basis` is None if it is not compressed."""

    width: int
    dtype: torch.dtype
    basis: Tensor | None = None
    perpendicular: Tensor | None = None
    """T_perp [V, D], at a receiver of compressed activations."""

    @property
    def dimensions(self) -> int:
        """Numbers per token on the wire."""
        return self.width if self.basis is None else self.basis.shape[1]

    def split(self, embedding: Tensor) -> None:
        """Derive T_perp from the synced token embedding [V, D]."""
        if self.basis is not None:
            self.perpendicular = perpendicular(embedding.detach(), self.basis)

    def encode_activation(self, x_BLD: Tensor) -> Tensor:
        """What the sender puts on the wire."""
        x_BLD = x_BLD.detach()
        return (x_BLD if self.basis is None else project(x_BLD, self.basis)).to(self.dtype)

    def decode_activation(self, wire: Tensor, tokens_BL: Tensor) -> Tensor:
        """The receiver's input [B, L, D], in memory of its own."""
        if self.basis is None or self.perpendicular is None:
            return wire.to(torch.float32, copy=True)
        return reconstruct(wire.to(torch.float32, copy=True), self.basis, self.perpendicular, tokens_BL)

    def encode_gradient(self, gradient_BLD: Tensor) -> Tensor:
        """What the receiver of activations sends back."""
        return (gradient_BLD if self.basis is None else project(gradient_BLD, self.basis)).to(self.dtype)

    def decode_gradient(self, wire: Tensor) -> Tensor:
        """The gradient [B, L, D] at the sender's output."""
        wire = wire.to(torch.float32, copy=True)
        return wire if self.basis is None else expand_gradient(wire, self.basis)

    def check(self, wire: Tensor, batch: int, length: int) -> None:
        """Raise MalformedMessage unless `wire` has the shape and dtype that a peer must send."""
        expected = (batch, length, self.dimensions)
        if tuple(wire.shape) != expected or wire.dtype != self.dtype:
            raise MalformedMessage(
                f"found a tensor {tuple(wire.shape)} of {wire.dtype}, expected {expected} of {self.dtype}"
            )


def pack_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """Token ids [B, L + 1] as uint8, packed to ceil(log2 V) bits each."""
    return torch.from_numpy(bits.pack(tokens.numpy(), bits.width_of(vocabulary)))


def unpack_tokens(packed: Tensor, vocabulary: int, batch: int, length: int) -> Tensor:
    """The ids [B, L + 1] packed above; MalformedMessage if they cannot be that."""
    count = batch * (length + 1)
    try:
        ids = bits.unpack(packed.numpy(), bits.width_of(vocabulary), count)
    except ValueError as error:
        raise MalformedMessage(f"token ids: {error}") from None
    if packed.dtype != torch.uint8 or int(ids.max()) >= vocabulary:
        raise MalformedMessage(f"token ids: found {ids.max()}, expected less than {vocabulary}")
    return torch.from_numpy(ids.astype("int64")).view(batch, length + 1)


def packed_tokens_bytes(batch: int, length: int, vocabulary: int) -> int:
    """Bytes of the ids of one micro-batch on the wire."""
    return bits.packed_size(batch * (length + 1), bits.width_of(vocabulary))
