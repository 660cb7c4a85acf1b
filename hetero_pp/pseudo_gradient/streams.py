"""Fields and streams of a contribution, and positions within chunks as gaps.

Streams are compressed if that makes them smaller. Reading is total: it never reads beyond the end and allocates nothing
that the bytes do not justify. A few low bits of a gap are sent unchanged, and the rest as bytes for an entropy coder.

Uniform positions have nearly geometric gaps, which lose nothing by a split into low bits and a high part. A high part
of 255 or more is encoded as bytes of 255 and one smaller byte, so one byte stream suffices. The scan of a tile is by
rows or by columns, whichever is smaller: embeddings use few rows, heads few columns. Described in docs/wire-format.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.core import bits
from hetero_pp.core.errors import MalformedContribution
from hetero_pp.pseudo_gradient.selection import Group

LEVEL = 1  # zstd's fastest level: the data has no repetitions, so only the entropy coder matters

AS_IT_IS, ZSTD = 0, 1

CONTINUES = 255
USUAL_HIGH_BITS = 6
"""High bits of a mean gap: about 64 different bytes are common, which zstd's entropy coder separates well."""

FEW = 4096  # number of gaps up to which an entropy coder's table matters, so that all numbers of low bits are tried
WORTH_TURNING = 0.01  # share of the size that a scan by columns must save, because it takes time

AT_ONCE = 1 << 15
"""Number of gaps that are encoded at once, a multiple of 8: they stay in a cache, and in memory that is reused."""

SAMPLED_CHUNKS = 128  # number of chunks from which the better scan is estimated


class Writer:
    """Writes little-endian fields in sequence. Not thread-safe."""

    def __init__(self, compressor: zstandard.ZstdCompressor | None = None) -> None:
        self._parts: list[bytes] = []
        self._compressor = compressor or zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)

    def part(self) -> Writer:
        """Return an empty writer with the same compressor: a new one takes longer than a short stream."""
        return Writer(self._compressor)

    def put(self, layout: str, *values: float) -> None:
        """Write numbers in a layout of `struct`."""
        self._parts.append(struct.pack(f"<{layout}", *values))

    def put_bytes(self, data: bytes) -> None:
        """Write bytes without their number, which the reader knows."""
        self._parts.append(data)

    def put_text(self, text: str) -> None:
        """Write the text's length in two bytes, and the text as UTF-8."""
        data = text.encode()
        self.put("H", len(data))
        self._parts.append(data)

    def put_stream(self, data: bytes) -> None:
        """Write the coding, the coded length in four bytes, and the coded data."""
        coded = self._compressor.compress(data) if data else b""
        is_smaller = len(coded) < len(data)
        self.put("BI", ZSTD if is_smaller else AS_IT_IS, len(coded) if is_smaller else len(data))
        self._parts.append(coded if is_smaller else data)

    def take(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Takes fields from the front of `data`. Every method raises MalformedContribution if a field is missing."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        """`what` is named in errors."""
        self._rest = memoryview(data)
        self._what = what

    def take(self, layout: str) -> tuple[int, ...]:
        """Read integers in a layout of `struct`."""
        return struct.unpack(f"<{layout}", self.take_bytes(struct.calcsize(f"<{layout}")))

    def take_bytes(self, count: int) -> memoryview:
        """Read `count` bytes, without a copy."""
        if count > len(self._rest):
            raise self.error(f"found {len(self._rest)} bytes, expected the announced {count}")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def take_text(self) -> str:
        """Read a text that `put_text` wrote."""
        (length,) = self.take("H")
        try:
            return str(self.take_bytes(length), "utf-8")
        except UnicodeDecodeError:
            raise self.error("a name is not UTF-8") from None

    def take_stream(self, least: int, most: int) -> memoryview:
        """Read a stream that `put_stream` wrote, of `least` to `most` bytes; never allocates more."""
        coding, length = self.take("BI")
        coded = self.take_bytes(length)
        size = length if coding == AS_IT_IS else self._size_of_frame(coding, coded)
        if not least <= size <= most:
            raise self.error(f"found a stream of {size} bytes, expected {least} to {most}")
        return coded if coding == AS_IT_IS else self._decompressed(coded, size)

    def end(self) -> None:
        """Raise an error if bytes are left."""
        if len(self._rest):
            raise self.error(f"found {len(self._rest)} bytes after the end")

    def error(self, reason: str) -> MalformedContribution:
        return MalformedContribution(f"{self._what}: {reason}")

    def _size_of_frame(self, coding: int, coded: memoryview) -> int:
        """Return the size that a frame declares, which the decompressor trusts despite any bound."""
        if coding != ZSTD:
            raise self.error(f"found a stream with coding {coding}, expected {AS_IT_IS} or {ZSTD}")
        try:
            size = zstandard.frame_content_size(coded)
        except zstandard.ZstdError:
            raise self.error("a stream is no zstd frame") from None
        if size < 0:
            raise self.error("a zstd frame does not give its size")
        return size

    def _decompressed(self, coded: memoryview, size: int) -> memoryview:
        try:
            found = zstandard.ZstdDecompressor().decompress(coded, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError:
            raise self.error("a zstd frame is damaged") from None
        if len(found) != size:
            raise self.error(f"found {len(found)} bytes in a zstd frame of {size}")
        return memoryview(found)


# ---- positions ----


def by_columns(group: Group, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions [count, k] counted along columns, ascending, and the permutation [count, k] that sorts them."""
    turned = positions % group.columns * group.rows + positions // group.columns
    return turned.sort(dim=1)


def by_rows(group: Group, turned: Tensor) -> Tensor:
    """Return the positions of `by_columns` counted along rows again, in the given order."""
    return turned % group.rows * group.columns + turned // group.rows


def scans_columns(groups: Sequence[Group], positions: Sequence[Tensor]) -> bool:
    """Return whether a scan by columns is likely smaller by more than chance, from the gaps in some chunks."""
    by_row = by_column = 0.0
    for group, chosen in zip(groups, positions, strict=True):
        if len(chosen) and 1 < chosen.shape[1] < group.size and min(group.rows, group.columns) > 1:
            some = chosen[:: -(-len(chosen) // SAMPLED_CHUNKS)]
            by_row += _size_of_gaps(some) * len(chosen) / len(some)
            by_column += _size_of_gaps(by_columns(group, some)[0]) * len(chosen) / len(some)
    return by_column < (1 - WORTH_TURNING) * by_row


def write_positions(writer: Writer, group: Group, positions: Tensor) -> None:
    """Write positions [count, k] of a group, ascending; writes nothing for a group that is kept whole."""
    kept = positions.shape[1]
    if kept == group.size:
        return
    if positions.numel() > FEW:
        chunks = max(8, AT_ONCE // kept // 8 * 8)  # in parts of whole bytes
        writer.put_bytes(_encode(writer.part(), map(_gaps, positions.split(chunks)), usual_low_bits(group.size, kept)))
        return
    gaps = [_gaps(positions)]
    widest = math.floor(math.log2(group.size / kept))
    writer.put_bytes(min((_encode(writer.part(), gaps, low) for low in range(widest + 1)), key=len))


def _encode(writer: Writer, parts: Iterable[NDArray[np.int32]], low: int) -> bytes:
    """Encode gaps, given in parts, with a number of low bits."""
    lows, highs = [], []
    for gaps in parts:
        if low:
            lows.append(bits.pack(gaps & ((1 << low) - 1), low).tobytes())
        highs.append(_as_bytes(gaps >> low).tobytes())
    writer.put("B", low)
    writer.put_bytes(b"".join(lows))
    writer.put_stream(b"".join(highs))
    return writer.take()


def read_positions(reader: Reader, group: Group, kept: int) -> Tensor:
    """Read positions. Raises MalformedContribution unless they ascend strictly within the chunk."""
    if kept == group.size:
        return torch.arange(kept).expand(group.count, kept)
    count = group.count * kept
    (low,) = reader.take("B")
    if low >= group.size.bit_length():
        raise reader.error(f"found {low} low bits for positions in a chunk of {group.size}")
    packed = reader.take_bytes(bits.packed_size(count, low))
    most = count + group.count * ((group.size >> low) // CONTINUES)
    stream = np.frombuffer(reader.take_stream(count, most), dtype=np.uint8)
    high = _from_bytes(stream)
    if high is None or len(high) != count:
        raise reader.error("the gaps of positions do not match the kept values")
    gaps = high if low == 0 else (high << low) | bits.unpack(np.frombuffer(packed, dtype=np.uint8), low, count)
    positions = (torch.from_numpy(gaps).view(group.count, kept) + 1).cumsum(dim=1).sub_(1)  # faster than numpy's
    if int(positions[:, -1].amax()) >= group.size:
        raise reader.error("a position lies outside its chunk")
    return positions


def usual_low_bits(size: int, kept: int) -> int:
    """Return how many low bits of a gap are best sent unchanged, if there are many gaps."""
    return max(0, math.floor(math.log2(size / kept)) - USUAL_HIGH_BITS)


def expected_position_bits(group: Group, kept: int) -> float:
    """Estimate the bits of one chunk's positions, if they are uniform: the entropy of geometric gaps."""
    if kept == group.size:
        return 0.0
    share = kept / group.size
    entropy = -math.log2(share) * share - math.log2(1 - share) * (1 - share)
    return kept * entropy / share


def _gaps(positions: Tensor) -> NDArray[np.int32]:
    """Return the number of positions skipped before each position [count * k]."""
    flat = positions.numpy().reshape(-1)
    gaps = np.empty(len(flat), dtype=np.int32)
    np.subtract(flat[1:], flat[:-1], out=gaps[1:])
    gaps -= 1
    gaps.reshape(positions.shape)[:, 0] = positions[:, 0].numpy()
    return gaps


def _size_of_gaps(positions: Tensor) -> float:
    """Return sum log2(1 + gap) over positions [count, k], an estimate of the bits of their gaps.

    It assumes that gaps are geometric, with the mean of gaps of about the same length.
    """
    return float(np.log2(_gaps(positions) + 1.0).sum())


def _as_bytes(high: NDArray[np.int32]) -> NDArray[np.uint8]:
    stream = high.astype(np.uint8)
    long = np.flatnonzero(high >= CONTINUES)
    if not len(long):
        return stream
    stream[long] = high[long] % CONTINUES
    return np.insert(stream, np.repeat(long, high[long] // CONTINUES), CONTINUES)


def _from_bytes(stream: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """Return the high parts; None if the last one is incomplete."""
    continued = np.flatnonzero(stream == CONTINUES)
    if not len(continued):
        return stream.astype(np.int64)
    if continued[-1] == len(stream) - 1:
        return None
    high = np.delete(stream, continued).astype(np.int64)
    np.add.at(high, continued - np.arange(len(continued)), CONTINUES)
    return high
