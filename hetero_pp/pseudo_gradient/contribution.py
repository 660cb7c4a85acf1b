"""Bytes of a contribution: one self-describing blob per layer block. Described in docs/wire-format.md.

A blob is identified by the sha256 of its bytes, a contribution by the sha256 over those of its blobs in block order.
Decoding is total: any bytes give valid values or `MalformedContribution`. Sizes are checked before anything is
allocated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hetero_pp.core import bits
from hetero_pp.messages.messages_pb2 import BlobEntry, BlobHeader, ContributionEntry
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.error_feedback import Selection
from hetero_pp.pseudo_gradient.quantise import BASES, Kept, Quantised, dequantise, dequantise_signs
from hetero_pp.pseudo_gradient.selection import groups_of
from hetero_pp.pseudo_gradient.streams import (
    Reader,
    Writer,
    by_columns,
    by_rows,
    expected_position_bits,
    read_positions,
    scans_columns,
    write_positions,
)

MAGIC = b"HPPB"
FORMAT_VERSION = 1
QUANTISERS = {"levels": 0, "signs": 1}  # As they are numbered in a blob. All but signs send a table of levels a tensor.
BEFORE_BODY = len(MAGIC) + 1 + hashlib.sha256().digest_size

MAX_BLOB_BYTES = 4 << 30  # upper bound of a blob's size, larger than any block's; receivers check it first
_LARGEST = 3.4e38  # largest value that a float of a record holds

_HEADER_ROOM, _TENSOR_ROOM, _BYTES_A_VALUE = 1 << 10, 4 << 10, 12
"""Bytes of header, of a tensor and of a value in the bound on a blob's size.

A position takes at most four bytes, and so does a value; the rest is for streams that do not compress.
"""

EXPECTED_CODE_BITS = {1: 1.0, 2: 1.25, 3: 1.6, 4: 2.1, 8: 5.5, 32: 28.5}
"""Expected bits of one of the largest values, by `value_bits`, from real runs; levels are not used equally often."""

SAVED_OF_DENSE = 0.5
"""Bits saved by entropy coding for even levels over six standard deviations of a normal distribution."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BlobAddress:
    """Address of a blob in a run; a blob under another address is refused."""

    run: str
    round: int
    replica: str
    block: str


@dataclass(frozen=True)
class DecodedTensor:
    """Sparse values of one tensor: flat indices [n], unique, and values [n] in fp32."""

    indices: Tensor
    values: Tensor

    def add_to(self, total: Tensor, weight: float) -> None:
        """Add weight * values to `total` at the indices, in fp32."""
        total.view(-1).index_add_(0, self.indices, self.values if weight == 1.0 else self.values * weight)

    def scaled(self, factor: float) -> DecodedTensor:
        """Return the values times a factor, in fp32."""
        return self if factor == 1.0 else DecodedTensor(self.indices, self.values * factor)

    def part(self, start: int, stop: int) -> DecodedTensor:
        """Return the values in [start, stop) of the flattened tensor, with indices relative to `start`."""
        inside = (self.indices >= start) & (self.indices < stop)
        return DecodedTensor(self.indices[inside] - start, self.values[inside])


# ---- writing ----


def encode_blob(
    address: BlobAddress, tensors: Iterable[tuple[str, Shape, Selection]], settings: CompressionSettings
) -> bytes:
    """Encode the selections of one layer block's tensors, in the order of their names."""
    encoded = ((name, shape, encode_tensor(shape, selection, settings)) for name, shape, selection in tensors)
    return blob_of(address, encoded, settings)


def blob_of(address: BlobAddress, tensors: Iterable[tuple[str, Shape, bytes]], settings: CompressionSettings) -> bytes:
    """Return the blob of one layer block's encoded tensors, in the order of their names."""
    writer = Writer()
    writer.put_text(address.run)
    writer.put("Q", address.round)
    writer.put_text(address.replica)
    writer.put_text(address.block)
    _put_settings(writer, settings)
    for name, shape, content in tensors:
        writer.put("B", 1)
        writer.put_text(name)
        writer.put(f"B{len(shape)}Q", len(shape), *shape)
        writer.put("Q", len(content))
        writer.put_bytes(content)
    writer.put("B", 0)
    body = writer.take()
    return b"".join([MAGIC, bytes([FORMAT_VERSION]), hashlib.sha256(body).digest(), body])


def _put_settings(writer: Writer, settings: CompressionSettings) -> None:
    """Write the settings that a receiver needs to read tensors."""
    writer.put("dII", settings.density, *settings.tile)
    writer.put("BB", QUANTISERS[settings.quantiser], settings.value_bits)


def encode_tensor(shape: Shape, selection: Selection, settings: CompressionSettings) -> bytes:
    writer = Writer()
    groups, quantised = list(groups_of(shape, settings.tile)), selection.quantised
    values = quantised.values if quantised.codes is None else quantised.codes
    turns = scans_columns(groups, selection.positions)
    writer.put("B", turns)
    ordered, start = [], 0
    for group, positions in zip(groups, selection.positions, strict=True):
        own = values[start : start + positions.numel()].view(positions.shape)
        start += positions.numel()
        if turns and positions.shape[1] < group.size:
            positions, order = by_columns(group, positions)
            own = own.gather(1, order)
        write_positions(writer, group, positions)
        ordered.append(own.reshape(-1))
    _put_values(writer, quantised, ordered[0] if len(ordered) == 1 else torch.cat(ordered), settings)
    return writer.take()


def _put_values(writer: Writer, quantised: Quantised, ordered: Tensor, settings: CompressionSettings) -> None:
    """Write values, or their codes with levels or magnitudes; `ordered` is either, in the order of the scan."""
    if quantised.codes is None:
        writer.put_stream(ordered.numpy().astype("<f4", copy=False).tobytes())
        return
    if quantised.levels is not None:
        writer.put_bytes(quantised.levels.numpy().astype("<f4", copy=False).tobytes())
    if quantised.magnitudes is not None:
        writer.put("h", quantised.base)
        writer.put_stream(quantised.magnitudes.numpy().tobytes())
    writer.put_stream(bits.pack(ordered.numpy(), _width_of_codes(settings)).tobytes())


def _width_of_codes(settings: CompressionSettings) -> int:
    """Return the packed bits of a code: a divisor of 8, because an entropy coder needs whole codes in a byte."""
    return 4 if settings.value_bits == 3 else settings.value_bits


# ---- reading ----


class ReceivedBlob:
    """A blob with checked digest, header and outline. Its tensors are decoded one at a time."""

    def __init__(
        self, data: bytes, address: BlobAddress, shapes: Mapping[str, Shape], settings: CompressionSettings
    ) -> None:
        """The tensors must be exactly those of `shapes`, compressed with the run's settings.

        Raises MalformedContribution for anything else.
        """
        self._settings, self._block, self._shapes = settings, address.block, shapes
        reader = Reader(_checked_body(data, address.block), address.block)
        found = BlobAddress(reader.take_text(), reader.take("Q")[0], reader.take_text(), reader.take_text())
        if found != address:
            raise reader.error(f"found {found}, expected {address}")
        expected = Writer()
        _put_settings(expected, settings)
        if reader.take_bytes(len(expected.take())) != expected.take():
            raise reader.error("was compressed with other settings than this run's")
        outline = list(_outline(reader, shapes))
        if [name for name, _ in outline] != sorted(shapes):
            raise reader.error(f"found the tensors {[name for name, _ in outline]}, expected {sorted(shapes)}")
        self._contents = dict(outline)

    def tensor(self, name: str) -> DecodedTensor:
        """Return the values of a tensor. Raises MalformedContribution."""
        positions, turns, values = self._read(name)
        indices = []
        for group, found in zip(groups_of(self._shapes[name], self._settings.tile), positions, strict=True):
            is_turned = turns and found.shape[1] < group.size
            indices.append(group.flat_indices(by_rows(group, found) if is_turned else found).reshape(-1))
        return DecodedTensor(indices[0] if len(indices) == 1 else torch.cat(indices), values)

    def values(self, name: str) -> Tensor:
        """Return the values of a tensor without their indices. Raises MalformedContribution as `tensor` does."""
        return self._read(name)[2]

    def _read(self, name: str) -> tuple[list[Tensor], int, Tensor]:
        """Return the positions of each group of a tensor, whether they count along columns, and the values."""
        reader = Reader(self._contents[name], f"{self._block}: {name}")
        (turns,) = reader.take("B")
        if turns not in (0, 1):
            raise reader.error(f"found scan {turns}, expected 0 or 1")
        groups = groups_of(self._shapes[name], self._settings.tile)
        positions = [read_positions(reader, group, group.kept(self._settings.density)) for group in groups]
        count = sum(map(Tensor.numel, positions))
        values = _read_values(reader, count, [(len(one), one.shape[1]) for one in positions], self._settings)
        reader.end()
        return positions, turns, values


def decode_blob(
    data: bytes, address: BlobAddress, shapes: Mapping[str, Shape], settings: CompressionSettings
) -> dict[str, DecodedTensor]:
    """Return all tensors of a blob at once. Raises MalformedContribution as ReceivedBlob does."""
    blob = ReceivedBlob(data, address, shapes, settings)
    return {name: blob.tensor(name) for name in sorted(shapes)}


def _checked_body(data: bytes, what: str) -> memoryview:
    """Return the bytes after the digest, if the digest matches them."""
    reader = Reader(data, what)
    if reader.take_bytes(len(MAGIC)) != MAGIC:
        raise reader.error("not a blob")
    (version,) = reader.take("B")
    if version != FORMAT_VERSION:
        raise reader.error(f"found format version {version}, expected {FORMAT_VERSION}")
    digest, body = reader.take_bytes(hashlib.sha256().digest_size), memoryview(data)[BEFORE_BODY:]
    if hashlib.sha256(body).digest() != digest:
        raise reader.error("the digest does not match the content")
    return body


def _outline(reader: Reader, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, memoryview]]:
    """Yield the name and the bytes of each tensor in a blob."""
    while True:
        (more,) = reader.take("B")
        if more not in (0, 1):
            raise reader.error(f"found {more} at the start of a tensor or the end of the blob, expected 1 or 0")
        if not more:
            break
        name = reader.take_text()
        (dimensions,) = reader.take("B")
        shape = reader.take(f"{dimensions}Q")
        if shape != shapes.get(name):
            raise reader.error(f"found the tensor {name!r} {list(shape)}, which is not in this block")
        (length,) = reader.take("Q")
        yield name, reader.take_bytes(length)
    reader.end()


def _read_values(reader: Reader, count: int, kept: Kept, settings: CompressionSettings) -> Tensor:
    width = settings.value_bits
    if width == 32:
        return _floats(reader, reader.take_stream(4 * count, 4 * count))
    levels, magnitudes, base = None, None, 0
    if settings.quantiser != "signs":
        levels = _floats(reader, reader.take_bytes(4 << width))
    else:
        (base,) = reader.take("h")
        if base not in BASES:
            raise reader.error(f"found the exponent {base}, expected {BASES.start} to {BASES.stop - 1}")
        chunks = sum(chunks for chunks, _ in kept)
        magnitudes = torch.frombuffer(bytearray(reader.take_stream(chunks, chunks)), dtype=torch.uint8)
    size = bits.packed_size(count, _width_of_codes(settings))
    packed = np.frombuffer(reader.take_stream(size, size), dtype=np.uint8)
    codes = torch.from_numpy(bits.unpack(packed, _width_of_codes(settings), count))
    if levels is not None:
        if int(codes.max()) >= len(levels):
            raise reader.error(f"found a code beyond {len(levels)} levels")
        return dequantise(codes, levels)
    assert magnitudes is not None
    return dequantise_signs(codes, magnitudes, base, kept)


def _floats(reader: Reader, data: memoryview) -> Tensor:
    found = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    if not bool(torch.isfinite(found).all()):
        raise reader.error("a value is not finite")
    return found


def entry_of(block: str, sha256: bytes, size: int, values: Sequence[Tensor]) -> BlobEntry:
    """Return a blob's entry in the round record, with the norm and the peak of its tensors' values."""
    squares = sum(float(one.double().square().sum()) for one in values)
    return BlobEntry(
        block=block,
        sha256=sha256,
        size=size,
        kept_values=sum(len(one) for one in values),
        norm=min(math.sqrt(squares), _LARGEST),
        peak=max((float(one.abs().max()) for one in values if len(one)), default=0.0),
    )


def scale_of(entry: ContributionEntry) -> float:
    """Return the factor by which a contribution's values are multiplied."""
    return entry.scale or 1.0


def contribution_digest(entries: Iterable[BlobEntry]) -> bytes:
    """Return the digest of a whole contribution, over its blobs in block order."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.block):
        digest.update(entry.block.encode() + b"\0" + entry.sha256)
    return digest.digest()


def kept_values(shape: Shape, settings: CompressionSettings) -> int:
    """Return the number of values sent for a tensor of this shape."""
    return sum(group.count * group.kept(settings.density) for group in groups_of(shape, settings.tile))


def expected_bytes(shape: Shape, settings: CompressionSettings) -> tuple[int, int]:
    """Estimate the bytes of positions and of values for a tensor of this shape, before its values are known."""
    groups = list(groups_of(shape, settings.tile))
    positions = sum(group.count * expected_position_bits(group, group.kept(settings.density)) for group in groups)
    is_dense = settings.density == 1 and 1 < settings.value_bits < 32
    each = settings.value_bits - SAVED_OF_DENSE if is_dense else EXPECTED_CODE_BITS[settings.value_bits]
    values = kept_values(shape, settings) * each
    magnitudes = sum(group.count for group in groups) if settings.quantiser == "signs" else 0
    return round(positions / 8), round(values / 8) + magnitudes


def most_bytes(shapes: Mapping[str, Shape], settings: CompressionSettings) -> int:
    """Return an upper bound of a blob's size for tensors of these shapes; longer blobs are refused unread."""
    return _HEADER_ROOM + sum(
        _TENSOR_ROOM + len(name) + _BYTES_A_VALUE * kept_values(shape, settings) for name, shape in shapes.items()
    )


def blob_bytes(address: BlobAddress, shapes: Mapping[str, Shape], settings: CompressionSettings) -> int:
    """Estimate the size of a blob of tensors of these shapes, from the number of values kept."""
    size = len(encode_blob(address, (), settings))
    for name, shape in shapes.items():
        levels = 4 << settings.value_bits if settings.quantiser != "signs" and settings.value_bits < 32 else 0
        streams = 6 * sum(1 for _ in groups_of(shape, settings.tile)) + 5
        size += 20 + len(name.encode()) + 8 * len(shape) + streams + levels + sum(expected_bytes(shape, settings))
    return size


# ---- small blobs that cross in one call, because each call and each flush has its own cost ----

# A deposit has blobs of one replica, and the reply to a fetch has blobs of one block. The header of the first blob
# names the others in `following`, and their bytes follow its own.

Data = TypeVar("Data", bound=Sized)

BATCH_BYTES_MAX = 4 << 20  # Bytes of blobs in one deposit, at most. A larger blob is deposited alone.
FOLLOWING_BYTES_MAX, FOLLOWING_MAX = 4 << 20, 1_024
"""Bytes and number of blobs that follow the first one in the reply to a fetch, at most. None follow a larger blob.

Their names must fit in the header of a frame.
"""


def payload_bytes(header: BlobHeader) -> int:
    """Return the size of the payload after a header: its blob and those that follow, unless the blob is at a URL."""
    return 0 if header.url else header.size + sum(one.size for one in header.following)


def join_blobs(common: BlobHeader, blobs: Sequence[tuple[str, bytes]]) -> tuple[BlobHeader, bytes]:
    """Return the header and the payload of a deposit of blobs, by block. `common`: what is the same for all."""
    (block, first), *rest = blobs
    header = BlobHeader()
    header.CopyFrom(common)
    header.block, header.size = block, len(first)
    for block, data in rest:
        header.following.add(block=block, size=len(data))
    return header, b"".join(data for _, data in blobs) if rest else first


def split_blobs(header: BlobHeader, data: bytes) -> Iterator[tuple[BlobHeader, bytes]]:
    """Yield each blob of a deposit with a header of its own."""
    common, start = BlobHeader(), 0
    common.CopyFrom(header)
    common.ClearField("following")
    for block, size in [(header.block, header.size), *((one.block, one.size) for one in header.following)]:
        own = BlobHeader()
        own.CopyFrom(common)
        own.block, own.size = block, size
        yield own, data[start : start + size] if header.following else data
        start += size


def batches(blobs: Iterable[tuple[str, Data]]) -> Iterator[list[tuple[str, Data]]]:
    """Yield blobs by block as they are made, those together that fit in one deposit. Only their lengths matter."""
    batch, room = list[tuple[str, Data]](), BATCH_BYTES_MAX
    for block, data in blobs:
        if batch and len(data) > room:
            yield batch
            batch, room = [], BATCH_BYTES_MAX
        batch.append((block, data))
        room -= len(data)
    if batch:
        yield batch
