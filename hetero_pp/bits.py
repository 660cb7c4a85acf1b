"""Small unsigned numbers packed to a fixed number of bits each, for token ids, positions and codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def width_of(count: int) -> int:
    """Bits that tell `count` values apart: ceil(log2 count), at least 1."""
    return max(1, (count - 1).bit_length())


def packed_size(count: int, width: int) -> int:
    """Bytes that `count` numbers of `width` bits take."""
    return -(-count * width // 8)


def pack(values: NDArray[np.integer], width: int) -> NDArray[np.uint8]:
    """Values below 2^width, flattened, most significant bit first; the last byte is filled with zero bits."""
    flat = values.reshape(-1).astype(np.uint32)
    if width in (8, 16):
        return flat.astype(f">u{width // 8}").view(np.uint8)
    as_bytes = flat.astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(as_bytes, axis=1)[:, 32 - width :].reshape(-1))


def unpack(packed: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint32]:
    """The `count` numbers packed above. ValueError if `packed` is not exactly as long as they need."""
    if packed.size != packed_size(count, width):
        raise ValueError(f"found {packed.size} bytes for {count} numbers of {width} bits")
    if width in (8, 16):
        return packed.view(f">u{width // 8}").astype(np.uint32)
    bits = np.zeros((count, 32), dtype=np.uint8)
    bits[:, 32 - width :] = np.unpackbits(packed, count=count * width).reshape(count, width)
    return np.packbits(bits, axis=1).view(">u4").reshape(-1).astype(np.uint32)
