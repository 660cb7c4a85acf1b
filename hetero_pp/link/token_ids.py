"""Token ids on a link: packed to ceil(log2 V) bits each. Shapes: B sequences, L positions, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.core import bits
from hetero_pp.core.errors import MalformedMessage


def pack_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return token ids [B, L + 1] as uint8, packed to ceil(log2 V) bits each."""
    return torch.from_numpy(bits.pack(tokens.numpy(), bits.width_of(vocabulary)))


def unpack_tokens(packed: Tensor, vocabulary: int, batch: int, length: int) -> Tensor:
    """Return the packed ids [B, L + 1]. Raises MalformedMessage if they are invalid."""
    count = batch * (length + 1)
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        found = f"a tensor of {packed.dtype} with {packed.dim()} dimensions"
        raise MalformedMessage(f"token ids: found {found}, expected packed bytes")
    try:
        ids = bits.unpack(packed.numpy(), bits.width_of(vocabulary), count)
    except ValueError as error:
        raise MalformedMessage(f"token ids: {error}") from None
    if int(ids.max()) >= vocabulary:
        raise MalformedMessage(f"token ids: found {ids.max()}, expected less than {vocabulary}")
    return torch.from_numpy(ids.astype("int64")).view(batch, length + 1)


def packed_tokens_bytes(batch: int, length: int, vocabulary: int) -> int:
    """Return the bytes of one micro-batch's ids on the wire."""
    return bits.packed_size(batch * (length + 1), bits.width_of(vocabulary))
