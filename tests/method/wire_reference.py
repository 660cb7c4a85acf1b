"""A decoder of contributions that follows docs/wire-format.md alone: plain Python, value by value, and zstandard."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import zstandard


class Bytes:
    """Reads fields from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def text(self) -> str:
        return self.take(self.numbers("H")[0]).decode()

    def stream(self) -> bytes:
        coding, length = self.numbers("BI")
        data = self.take(length)
        return data if coding == 0 else zstandard.ZstdDecompressor().decompress(data)


def bits_of(data: bytes, width: int, count: int) -> list[int]:
    """Return `count` numbers of `width` bits, most significant bit first."""
    text = "".join(f"{byte:08b}" for byte in data)
    return [int(text[index * width : (index + 1) * width], 2) for index in range(count)]


def decode(blob: bytes) -> dict[str, Any]:
    """Return the header's fields, and `tensors`: values by flat index, by name."""
    whole = Bytes(blob)
    assert whole.take(4) == b"HPPB" and whole.numbers("B") == (1,)
    assert whole.take(32) == hashlib.sha256(blob[37:]).digest()
    found: dict[str, Any] = {"run": whole.text(), "round": whole.numbers("Q")[0]}
    found |= {"replica": whole.text(), "block": whole.text()}
    found["density"], *found["tile"] = whole.numbers("dII")
    found["quantiser"], found["value_bits"] = whole.numbers("BB")
    found["tensors"] = {}
    while whole.numbers("B") == (1,):
        name = whole.text()
        shape = whole.numbers(f"{whole.numbers('B')[0]}Q")
        content = Bytes(whole.take(whole.numbers("Q")[0]))
        found["tensors"][name] = _tensor(content, shape, found)
        assert content.at == len(content.data)
    assert whole.at == len(blob)
    return found


def _chunks(shape: tuple[int, ...], tile: list[int]) -> list[list[tuple[list[list[int]], int]]]:
    """Return the chunks of each group as rows of flat indices."""
    if len(shape) != 2:
        count = 1
        for side in shape:
            count *= side
        return [[([list(range(count))], count)]]
    rows, columns = shape
    groups = []
    whole_rows, whole_columns = rows // tile[0] * tile[0], columns // tile[1] * tile[1]
    for tops, height in ((range(0, whole_rows, tile[0]), tile[0]), (range(whole_rows, rows, rows), rows - whole_rows)):
        for lefts, width in (
            (range(0, whole_columns, tile[1]), tile[1]),
            (range(whole_columns, columns, columns), columns - whole_columns),
        ):
            chunks = [
                ([[row * columns + column for column in range(left, left + width)] for row in range(top, top + height)])
                for top in tops
                for left in lefts
            ]
            if chunks:
                groups.append([(chunk, height * width) for chunk in chunks])
    return groups


def _tensor(content: Bytes, shape: tuple[int, ...], header: dict[str, Any]) -> dict[int, float]:
    (by_columns,) = content.numbers("B")
    where: list[list[int]] = []
    for group in _chunks(shape, header["tile"]):
        size = group[0][1]
        kept = max(1, int(header["density"] * size + 0.5))
        if kept == size:
            where += [[index for row in rows for index in row] for rows, _ in group]
            continue
        (low,) = content.numbers("B")
        lows = bits_of(content.take((len(group) * kept * low + 7) // 8), low, len(group) * kept) if low else None
        highs, high = [], 0
        for byte in content.stream():
            high += byte
            if byte < 255:
                highs.append(high)
                high = 0
        assert len(highs) == len(group) * kept
        for number, (rows, _) in enumerate(group):
            scan = [index for row in (zip(*rows, strict=True) if by_columns else rows) for index in row]
            position, found = -1, []
            for place in range(number * kept, (number + 1) * kept):
                position += 1 + (highs[place] << low) + (lows[place] if lows else 0)
                found.append(scan[position])
            where.append(found)
    flat = [index for chunk in where for index in chunk]
    return dict(zip(flat, _values(content, where, len(flat), header), strict=True))


def _values(content: Bytes, where: list[list[int]], count: int, header: dict[str, Any]) -> list[float]:
    width = header["value_bits"]
    if width == 32:
        return list(struct.unpack(f"<{count}f", content.stream()))
    packed = {1: 1, 2: 2, 3: 4, 4: 4, 8: 8}[width]
    if header["quantiser"] == 0:
        levels = content.numbers(f"{1 << width}f")
        return [levels[code] for code in bits_of(content.stream(), packed, count)]
    (base,) = content.numbers("h")
    table = [0.0] + [struct.unpack("<f", struct.pack("<f", 2.0 ** (base - 8 + c / 16)))[0] for c in range(1, 256)]
    magnitudes = [table[byte] for byte in content.stream()]
    each = [magnitude for magnitude, chunk in zip(magnitudes, where, strict=True) for _ in chunk]
    signs = bits_of(content.stream(), packed, count)
    return [-magnitude if sign else magnitude for magnitude, sign in zip(each, signs, strict=True)]
