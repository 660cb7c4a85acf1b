"""Inputs for fuzzing the decoder of contributions, and the check of each result: valid, or refused.

The first byte of an input selects the compression settings. The second selects what the rest is: a whole blob, the body
of a blob, or the content of its first tensor. Everything around the rest is made valid, including the digest, which a
mutation would never match.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hetero_pp.core.errors import MalformedContribution
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import (
    BEFORE_BODY,
    FORMAT_VERSION,
    MAGIC,
    BlobAddress,
    decode_blob,
    encode_blob,
    kept_values,
)
from hetero_pp.pseudo_gradient.error_feedback import select

ADDRESS = BlobAddress("r", 1, "a", "b")
WAYS = [
    CompressionSettings.model_validate({"tile": (8, 8), **cells})
    for cells in (
        {"density": 1 / 8, "value_bits": 2},
        {"density": 1 / 8, "value_bits": 1, "quantiser": "signs"},
        {"density": 1 / 16, "value_bits": 32},
        {"density": 1.0, "value_bits": 8},
    )
]
SHAPES: list[dict[str, tuple[int, ...]]] = [{"x": (64, 43)}, {"x": (16, 11)}, {"x": (700,)}, {"x": (9,), "y": (2, 3)}]


@dataclass
class Count:
    """Numbers of inputs by outcome."""

    inputs: int = 0
    decoded: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Honest:
    """A blob that a replica would send, and the range of the first tensor's content in it."""

    blob: bytes
    content: slice

    @classmethod
    def of(cls, way: int) -> Honest:
        """Return the blob for the settings with this index."""
        settings, generator = WAYS[way], torch.Generator().manual_seed(way)
        chosen = [
            (name, shape, select(torch.zeros(shape), torch.randn(shape, generator=generator) ** 3, settings))
            for name, shape in SHAPES[way].items()
        ]
        blob = encode_blob(ADDRESS, chosen, settings)
        name, shape, _ = chosen[0]
        before = len(encode_blob(ADDRESS, (), settings)) - 1 + 1 + 2 + len(name) + 1 + 8 * len(shape)
        (length,) = struct.unpack("<Q", blob[before : before + 8])
        return cls(blob, slice(before + 8, before + 8 + length))

    def with_content(self, content: bytes) -> bytes:
        """Return the body of the blob with other content of its first tensor."""
        before, after = self.blob[BEFORE_BODY : self.content.start - 8], self.blob[self.content.stop :]
        return before + struct.pack("<Q", len(content)) + content + after


HONEST = [Honest.of(way) for way in range(len(WAYS))]


def seeds() -> Iterator[bytes]:
    """Yield honest blobs as inputs, in each of the three forms."""
    for way, honest in enumerate(HONEST):
        assert honest.with_content(honest.blob[honest.content]) == honest.blob[BEFORE_BODY:]
        yield bytes([way, 0]) + honest.blob
        yield bytes([way, 1]) + honest.blob[BEFORE_BODY:]
        yield bytes([way, 2]) + honest.blob[honest.content]


def mutated(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Return an input with a few changes of the kinds that fuzzers make, after the two bytes that select its form."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randint(2, len(found)), dice.choice((1, 1, 2, 4, 8, 40))
        match dice.randrange(5):
            case 0:
                found[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = dice.randbytes(length)
            case 3:
                found[at : at + length] = dice.choice((b"\x00", b"\xff")) * length
            case 4:
                start = dice.randrange(len(other))
                found[at : at + length] = other[start : start + length]
    return bytes(found)


def try_one(data: bytes, count: Count) -> None:
    """Decode an input, and check the result.

    Raises AssertionError if decoded values are not valid. Exceptions that escape the decoder pass through.
    """
    count.inputs += 1
    if len(data) < 2:
        return
    way, content = data[0] % len(WAYS), data[2:]
    form = data[1] % 8
    if form:
        content = HONEST[way].with_content(content) if form > 1 else content
        content = MAGIC + bytes([FORMAT_VERSION]) + hashlib.sha256(content).digest() + content
    try:
        decoded = decode_blob(content, ADDRESS, SHAPES[way], WAYS[way])
    except MalformedContribution as error:
        count.refused += 1
        reason = re.sub(r"[0-9]+", "N", str(error).split(": ", 1)[-1].split("BlobAddress")[0])
        if reason in count.reasons or len(count.reasons) < 100:
            count.reasons[reason] = count.reasons.get(reason, 0) + 1
        return
    count.decoded += 1
    assert decoded.keys() == SHAPES[way].keys()
    for name, shape in SHAPES[way].items():
        where, values = decoded[name].indices, decoded[name].values
        assert len(where) == len(values) == kept_values(shape, WAYS[way])
        assert bool(torch.isfinite(values).all()) and values.dtype == torch.float32
        assert int(where.min()) >= 0 and int(where.max()) < math.prod(shape)
        assert len(where.unique()) == len(where)
