"""Bytes of a contribution: fields one after the other, and streams that are compressed if that makes them smaller.

Reading is total: nothing is read beyond the end, and nothing is allocated that the bytes do not justify. Described in
docs/wire-format.md.
"""

from __future__ import annotations

import struct

import zstandard

from hetero_pp.errors import MalformedContribution

LEVEL = 1
"""zstd's fastest: what is coded here has no repetitions, so only its entropy coder counts."""

AS_IT_IS, ZSTD = 0, 1


class Writer:
    """Fields, little-endian, in the order they are put."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def put(self, layout: str, *values: float) -> None:
        """Numbers, as `struct` lays them out."""
        self._parts.append(struct.pack(f"<{layout}", *values))

    def put_bytes(self, data: bytes) -> None:
        """Bytes whose number the reader knows."""
        self._parts.append(data)

    def put_text(self, text: str) -> None:
        """Its length in two bytes, and UTF-8."""
        data = text.encode()
        self.put("H", len(data))
        self._parts.append(data)

    def put_stream(self, data: bytes) -> None:
        """How it is coded, the length as it is coded in four bytes, and that."""
        coded = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data) if data else b""
        is_smaller = len(coded) < len(data)
        self.put("BI", ZSTD if is_smaller else AS_IT_IS, len(coded) if is_smaller else len(data))
        self._parts.append(coded if is_smaller else data)

    def take(self) -> bytes:
        """Everything that was put."""
        return b"".join(self._parts)


class Reader:
    """Takes fields off the front of `data`. Every method raises MalformedContribution if they are not there."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        """`what` is named in errors."""
        self._rest = memoryview(data)
        self._what = what

    def take(self, layout: str) -> tuple[int, ...]:
        """Whole numbers, as `struct` lays them out."""
        return struct.unpack(f"<{layout}", self.take_bytes(struct.calcsize(f"<{layout}")))

    def take_bytes(self, count: int) -> memoryview:
        """So many bytes, where they are."""
        if count > len(self._rest):
            raise self.error(f"found {len(self._rest)} bytes where {count} were announced")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def take_text(self) -> str:
        """What `put_text` put."""
        (length,) = self.take("H")
        try:
            return str(self.take_bytes(length), "utf-8")
        except UnicodeDecodeError:
            raise self.error("a name is not UTF-8") from None

    def take_stream(self, least: int, most: int) -> memoryview:
        """What `put_stream` put, of `least` to `most` bytes; no more than that is ever allocated."""
        coding, length = self.take("BI")
        coded = self.take_bytes(length)
        size = length if coding == AS_IT_IS else self._size_of_frame(coding, coded)
        if not least <= size <= most:
            raise self.error(f"found a stream of {size} bytes, expected {least} to {most}")
        return coded if coding == AS_IT_IS else self._decompressed(coded, size)

    def end(self) -> None:
        """Nothing may be left."""
        if len(self._rest):
            raise self.error(f"found {len(self._rest)} bytes behind the end")

    def error(self, reason: str) -> MalformedContribution:
        """What to raise."""
        return MalformedContribution(f"{self._what}: {reason}")

    def _size_of_frame(self, coding: int, coded: memoryview) -> int:
        """What a frame says of itself; the decompressor believes it whatever bound it is given."""
        if coding != ZSTD:
            raise self.error(f"found a stream coded by way {coding}, expected {AS_IT_IS} or {ZSTD}")
        try:
            size = zstandard.frame_content_size(coded)
        except zstandard.ZstdError:
            raise self.error("a stream is no zstd frame") from None
        if size < 0:
            raise self.error("a zstd frame does not say its size")
        return size

    def _decompressed(self, coded: memoryview, size: int) -> memoryview:
        try:
            found = zstandard.ZstdDecompressor().decompress(coded, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError:
            raise self.error("a zstd frame is damaged") from None
        if len(found) != size:
            raise self.error(f"found {len(found)} bytes in a zstd frame of {size}")
        return memoryview(found)
