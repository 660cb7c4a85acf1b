"""Bytes of a contribution: fields in sequence, and streams that are compressed if that makes them smaller.

Reading is total: it never reads beyond the end and allocates nothing that the bytes do not justify. Described in
docs/wire-format.md.
"""

from __future__ import annotations

import struct

import zstandard

from hetero_pp.core.errors import MalformedContribution

LEVEL = 1
"""zstd's fastest level: the data has no repetitions, so only the entropy coder matters."""

AS_IT_IS, ZSTD = 0, 1


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
