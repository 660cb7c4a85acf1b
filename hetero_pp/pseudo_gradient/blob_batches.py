"""Small blobs that cross in one call, because each call and each flush has its own cost.

A deposit has blobs of one replica, and the reply to a fetch has blobs of one block. The header of the first blob names
the others in `following`, and their bytes follow its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeVar

from hetero_pp.messages.messages_pb2 import BlobHeader

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
