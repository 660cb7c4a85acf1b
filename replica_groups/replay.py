"""theta after a round, from theta before it, its round record and the contributions it names, bit for bit."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hetero_pp.errors import MalformedContribution
from hetero_pp.model import block_of
from hetero_pp.outer.step import RoundOptimizer, Shapes, mean_of
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, decode_blob
from hetero_pp.pseudo_gradient.error_feedback import CompressionSettings
from hetero_pp.rpc.messages_pb2 import RoundRecord

FetchBlob = Callable[[str, str], bytes]
"""(replica, block) -> the bytes of a blob of the round."""


def shapes_by_block(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shapes]:
    """Parameter shapes grouped by the layer block they belong to, in block order."""
    blocks: dict[str, Shapes] = defaultdict(dict)
    for name, shape in sorted(shapes.items()):
        blocks[block_of(name)][name] = shape
    return dict(sorted(blocks.items()))


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def replay(
    theta: Mapping[str, Tensor], run: str, record: RoundRecord, fetch: FetchBlob, optimizer: RoundOptimizer
) -> None:
    """Apply one round, in place, to the parameters in `theta` and the optimizer's state.

    Only the blobs of the blocks that the optimizer needs are fetched: in most methods, those of `theta`.

    Whole blocks must be in `theta`. Raises MalformedContribution if a blob is not the one the record names.
    """
    for block, shapes in shapes_by_block(optimizer.needs(theta)).items():
        decoded = list(_decode_all(block, shapes, run, record, fetch, optimizer.settings.compression))
        for name, shape in shapes.items():
            optimizer.take(theta, name, mean_of(shape, ((weight, tensors[name]) for weight, tensors in decoded)))
    optimizer.finish(theta)


def _decode_all(
    block: str, shapes: Shapes, run: str, record: RoundRecord, fetch: FetchBlob, settings: CompressionSettings
) -> Iterable[tuple[float, dict[str, DecodedTensor]]]:
    for entry in record.contributions:
        data = fetch(entry.replica, block)
        named = next(blob.sha256 for blob in entry.blobs if blob.block == block)
        if hashlib.sha256(data).digest() != named:
            raise MalformedContribution(f"{entry.replica}, {block}: not the blob that the round record names")
        address = BlobAddress(run, record.round, entry.replica, block)
        yield entry.weight, decode_blob(data, address, shapes, settings)
