"""The bytes of a contribution: one blob per layer block, each a protobuf message that describes itself.

A blob is known by the sha256 of its bytes, a contribution by the sha256 over its blobs' in block order. Decoding is
total: any bytes give valid values or `MalformedContribution`; sizes are checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from hetero_pp import bits
from hetero_pp.errors import MalformedContribution
from hetero_pp.pseudo_gradient.chunks import Group, groups_of
from hetero_pp.pseudo_gradient.error_feedback import CompressionSettings, Selection
from hetero_pp.rpc.messages_pb2 import Blob, BlobEntry, TensorPayload

FORMAT_VERSION = 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BlobAddress:
    """Which blob of a run this is; a blob under another address is refused."""

    run: str
    round: int
    replica: str
    block: str


@dataclass(frozen=True)
class DecodedTensor:
    """The sparse values of one tensor: flat indices [n], unique, and values [n] in fp32."""

    indices: Tensor
    values: Tensor

    def add_to(self, total: Tensor, weight: float) -> None:
        """total += weight * values, at the indices, in fp32."""
        flat = total.view(-1)
        flat[self.indices] = flat[self.indices] + self.values * weight


def encode_blob(
    address: BlobAddress, selections: Mapping[str, tuple[Shape, Selection]], settings: CompressionSettings
) -> bytes:
    """Serialise what is sent of one layer block's tensors."""
    blob = Blob(version=FORMAT_VERSION, run=address.run, round=address.round, replica=address.replica)
    blob.block = address.block
    for name, (shape, selection) in sorted(selections.items()):
        blob.tensors.append(_encode_tensor(name, shape, selection, settings))
    return blob.SerializeToString(deterministic=True)


def _encode_tensor(name: str, shape: Shape, selection: Selection, settings: CompressionSettings) -> TensorPayload:
    payload = TensorPayload(name=name, shape=shape, tile=settings.tile, density=settings.density)
    payload.positions = b"".join(
        bits.pack(positions.numpy(), bits.width_of(group.size)).tobytes()
        for group, positions in zip(groups_of(shape, settings.tile), selection.positions, strict=True)
        if group.kept(settings.density) < group.size
    )
    payload.code_bits = settings.value_bits
    if selection.codes is None or selection.levels is None:
        payload.codes = selection.values.numpy().astype("<f4").tobytes()
    else:
        payload.codes = bits.pack(selection.codes.numpy(), settings.value_bits).tobytes()
        payload.levels.extend(selection.levels.tolist())
    return payload


def decode_blob(
    data: bytes, address: BlobAddress, shapes: Mapping[str, Shape], settings: CompressionSettings
) -> dict[str, DecodedTensor]:
    """The tensors of a blob, which must be exactly those of `shapes`, compressed as the run's settings say.

    Raises MalformedContribution for anything else.
    """
    try:
        blob = Blob.FromString(data)
    except DecodeError:
        raise MalformedContribution("not a blob") from None
    found = (blob.version, blob.run, blob.round, blob.replica, blob.block)
    expected = (FORMAT_VERSION, address.run, address.round, address.replica, address.block)
    if found != expected:
        raise MalformedContribution(f"found version, run, round, replica, block {found}, expected {expected}")
    if [payload.name for payload in blob.tensors] != sorted(shapes):
        raise MalformedContribution(f"{address.block}: expected the tensors {sorted(shapes)}")
    return {payload.name: _decode_tensor(payload, shapes[payload.name], settings) for payload in blob.tensors}


def _decode_tensor(payload: TensorPayload, shape: Shape, settings: CompressionSettings) -> DecodedTensor:
    found = (tuple(payload.shape), tuple(payload.tile), payload.density, payload.code_bits)
    expected = (shape, settings.tile, settings.density, settings.value_bits)
    if found != expected:
        raise MalformedContribution(f"{payload.name}: found shape, tile, density, bits {found}, expected {expected}")
    groups = list(groups_of(shape, settings.tile))
    indices = _decode_positions(payload, groups, settings.density)
    values = _decode_values(payload, len(indices))
    if not bool(torch.isfinite(values).all()):
        raise MalformedContribution(f"{payload.name}: a value is not finite")
    return DecodedTensor(indices, values)


def _decode_positions(payload: TensorPayload, groups: list[Group], density: float) -> Tensor:
    packed = np.frombuffer(payload.positions, dtype=np.uint8)
    sizes = [_position_bytes(group, density) for group in groups]
    if packed.size != sum(sizes):
        raise MalformedContribution(f"{payload.name}: found {packed.size} bytes of positions, expected {sum(sizes)}")
    indices, start = [], 0
    for group, size in zip(groups, sizes, strict=True):
        kept = group.kept(density)
        if kept == group.size:
            indices.append(group.flat_indices(torch.arange(kept).expand(group.count, kept)).reshape(-1))
            continue
        numbers = bits.unpack(packed[start : start + size], bits.width_of(group.size), group.count * kept)
        positions = torch.from_numpy(numbers.astype(np.int64)).view(group.count, kept)
        if bool((positions[:, 1:] <= positions[:, :-1]).any()) or int(positions[:, -1].max()) >= group.size:
            raise MalformedContribution(f"{payload.name}: positions are not ascending within their chunk")
        indices.append(group.flat_indices(positions).reshape(-1))
        start += size
    return torch.cat(indices)


def _position_bytes(group: Group, density: float) -> int:
    """Of a dense group none are sent."""
    kept = group.kept(density)
    return 0 if kept == group.size else bits.packed_size(group.count * kept, bits.width_of(group.size))


def _decode_values(payload: TensorPayload, count: int) -> Tensor:
    width = payload.code_bits
    packed = np.frombuffer(payload.codes, dtype=np.uint8)
    if packed.size != bits.packed_size(count, width):
        raise MalformedContribution(f"{payload.name}: found {packed.size} bytes of codes for {count} values")
    if width == 32:
        return torch.from_numpy(packed.view("<f4").astype(np.float32))
    if len(payload.levels) != 1 << width:
        raise MalformedContribution(f"{payload.name}: found {len(payload.levels)} levels, expected {1 << width}")
    levels = torch.tensor(list(payload.levels), dtype=torch.float32)
    return levels[torch.from_numpy(bits.unpack(packed, width, count).astype(np.int64))]


def entry_of(address: BlobAddress, data: bytes, kept_values: int) -> BlobEntry:
    """How the round record names a blob."""
    return BlobEntry(block=address.block, sha256=hashlib.sha256(data).digest(), size=len(data), kept_values=kept_values)


def contribution_digest(entries: Iterable[BlobEntry]) -> bytes:
    """The digest of a whole contribution, over its blobs in block order."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.block):
        digest.update(entry.block.encode() + b"\0" + entry.sha256)
    return digest.digest()


def kept_values(shape: Shape, settings: CompressionSettings) -> int:
    """Values sent of a tensor of this shape."""
    return sum(group.count * group.kept(settings.density) for group in groups_of(shape, settings.tile))


def payload_bytes(shape: Shape, settings: CompressionSettings) -> tuple[int, int]:
    """Bytes of the positions and of the codes of a tensor of this shape."""
    positions = sum(_position_bytes(group, settings.density) for group in groups_of(shape, settings.tile))
    return positions, bits.packed_size(kept_values(shape, settings), settings.value_bits)


def blob_bytes(address: BlobAddress, shapes: Mapping[str, Shape], settings: CompressionSettings) -> int:
    """The size of a blob of tensors of these shapes, which does not depend on their values."""
    blob = Blob(version=FORMAT_VERSION, run=address.run, round=address.round, replica=address.replica)
    blob.block = address.block
    size = blob.ByteSize()
    for name, shape in shapes.items():
        payload = TensorPayload(name=name, shape=shape, tile=settings.tile, density=settings.density)
        payload.code_bits = settings.value_bits
        if settings.value_bits < 32:
            payload.levels.extend([0.0] * (1 << settings.value_bits))
        # The two large fields are only counted: those of a 70B model would fill the memory.
        size += _field_bytes(payload.ByteSize() + sum(map(_field_bytes, payload_bytes(shape, settings))))
    return size


def _field_bytes(length: int) -> int:
    """What protobuf writes of bytes or a message of this length: a tag (fields up to 15), the length, itself."""
    return 1 + max(1, -(-length.bit_length() // 7)) + length if length else 0
