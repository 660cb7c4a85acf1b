"""Application of a round: theta after it from theta before it, its record and its contributions, bit for bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hetero_pp.core.errors import MalformedContribution
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import Shapes, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import robust_mean
from hetero_pp.outer.step import RoundOptimizer, mean_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob, scale_of

FetchBlob = Callable[[str, str], bytes]
"""(replica, block) -> bytes of a blob of the round."""


def apply_round(
    theta: Mapping[str, Tensor], run: str, record: RoundRecord, fetch: FetchBlob, optimizer: RoundOptimizer
) -> None:
    """Apply one round, in place, to the parameters in `theta` and the optimizer's state.

    Fetches only the blobs that the optimizer needs: in most methods those of the blocks of `theta`.

    `theta` must contain every tensor of each of its blocks. Raises MalformedContribution if a blob is not the one that
    the record names.
    """
    optimizer.begin(record.round, {entry.replica: entry.weight for entry in record.contributions})
    for block, shapes in shapes_by_block(optimizer.needs(theta)).items():
        blobs = list(_fetch_all(block, shapes, run, record, fetch, optimizer.settings.compression))
        for name, shape in shapes.items():
            weighted = ((entry.weight, blob.tensor(name).scaled(scale_of(entry))) for entry, blob in blobs)
            # Not kept in a variable, which would hold one tensor's mean while the next one is computed.
            optimizer.take(theta, name, _mean(shape, optimizer.rows(name, shape), weighted, optimizer.settings))
    optimizer.finish(theta)


def _mean(
    shape: tuple[int, ...], rows: range, weighted: Iterable[tuple[float, DecodedTensor]], settings: OuterSettings
) -> Tensor:
    """Return the rows of the mean of whole contributions to one tensor."""
    if settings.is_robust:
        return robust_mean(shape, list(weighted), settings, rows)
    cut = ((weight, cut_rows(decoded, shape, rows)) for weight, decoded in weighted)
    return mean_of((len(rows), *shape[1:]), cut, settings.divides_by)


def _fetch_all(
    block: str, shapes: Shapes, run: str, record: RoundRecord, fetch: FetchBlob, settings: CompressionSettings
) -> Iterable[tuple[ContributionEntry, ReceivedBlob]]:
    for entry in record.contributions:
        data = fetch(entry.replica, block)
        named = next(blob.sha256 for blob in entry.blobs if blob.block == block)
        if hashlib.sha256(data).digest() != named:
            raise MalformedContribution(f"{entry.replica}, {block}: differs from the blob in the round record")
        address = BlobAddress(run, record.round, entry.replica, block)
        yield entry, ReceivedBlob(data, address, shapes, settings)


def cut_rows(decoded: DecodedTensor, shape: tuple[int, ...], rows: range) -> DecodedTensor:
    """Return the decoded values of some rows, with indices that count from the first of them."""
    if len(rows) == shape[0]:
        return decoded
    stride = math.prod(shape[1:])
    return decoded.part(rows.start * stride, rows.stop * stride)
