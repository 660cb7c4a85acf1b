"""Packing of small unsigned numbers to a fixed number of bits each, for token ids, positions and codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def width_of(count: int) -> int:
    """Return the bits that distinguish `count` values: ceil(log2 count), at least 1."""
    return max(1, (count - 1).bit_length())


def packed_size(count: int, width: int) -> int:
    """Return the bytes that `count` numbers of `width` bits take."""
    return -(-count * width // 8)


def pack(values: NDArray[np.integer], width: int) -> NDArray[np.uint8]:
    """Pack values below 2^width, flattened, most significant bit first; zero bits fill the last byte."""
    flat = values.reshape(-1)
    if width == 1:
        return np.packbits(flat.astype(np.uint8))
    if width in (2, 4):  # a byte holds a whole number of them
        each = 8 // width
        padded = np.zeros(-(-len(flat) // each) * each, dtype=np.uint8)
        padded[: len(flat)] = flat
        packed = np.zeros(len(padded) // each, dtype=np.uint8)
        for place in range(each):
            packed |= padded[place::each] << (8 - width * (place + 1))
        return packed
    if width in (8, 16):
        return flat.astype(f">u{width // 8}").view(np.uint8)
    as_bytes = flat.astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(as_bytes, axis=1)[:, 32 - width :].reshape(-1))


def unpack(packed: NDArray[np.uint8], width: int, count: int) -> NDArray[np.integer]:
    """Return the `count` numbers that `pack` packed. Raises ValueError if `packed` does not have exactly their size."""
    if packed.size != packed_size(count, width):
        raise ValueError(f"found {packed.size} bytes for {count} numbers of {width} bits")
    if width == 1:
        return np.unpackbits(packed, count=count)
    if width in (2, 4):
        each = 8 // width
        values = np.empty(packed.size * each, dtype=np.uint8)
        for place in range(each):
            values[place::each] = packed >> (8 - width * (place + 1)) & ((1 << width) - 1)
        return values[:count]
    if width in (8, 16):
        return packed.view(f">u{width // 8}").astype(f"u{width // 8}")
    bits = np.zeros((count, 32), dtype=np.uint8)
    bits[:, 32 - width :] = np.unpackbits(packed, count=count * width).reshape(count, width)
    return np.packbits(bits, axis=1).view(">u4").reshape(-1).astype(np.uint32)
