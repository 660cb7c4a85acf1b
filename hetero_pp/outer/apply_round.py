"""Application of a round: theta after it from theta before it, its record and its contributions, bit for bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from hetero_pp.core.device import CPU
from hetero_pp.core.errors import MalformedContribution
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import Shapes, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import robust_mean
from hetero_pp.outer.step import RoundOptimizer, mean_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob, scale_of

FetchBlob = Callable[[str, str], bytes]  # (replica, block) -> bytes of a blob of the round


class Part(Protocol):
    """A part of every tensor of theta: some of its rows."""

    @property
    def shapes(self) -> Shapes:
        """Whole shape of each tensor."""

    @property
    def rows(self) -> Mapping[str, range]:
        """The rows of each tensor."""


class _OnHost(dict[str, Tensor]):
    """Copies of theta in host memory, made when they are asked for."""

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._theta = theta

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._theta[name].cpu()
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._theta

    def __iter__(self) -> Iterator[str]:
        return iter(self._theta)

    def put_back(self) -> None:
        """Write the copies to the device, and forget them."""
        for name, copy in super().items():
            self._theta[name].copy_(copy)
        self.clear()


def apply_round(
    theta: Mapping[str, Tensor],
    run: str,
    record: RoundRecord,
    fetch: FetchBlob,
    optimizer: RoundOptimizer,
    part: Part | None = None,
) -> None:
    """Apply one round, in place, to the parameters in `theta` and the optimizer's state.

    Fetches only the blobs that the optimizer needs: in most methods those of the blocks of `theta`. Blocks that the
    record does not name stay as they are: they belong to other fragments.

    `theta` must contain every tensor of each of its blocks, or the rows of `part`. A theta on a device is copied to the
    host, one tensor at a time, and back: all members compute the step there, so they get equal bits. Raises
    MalformedContribution if a blob is not the one that the record names.
    """
    weights = {entry.replica: entry.weight for entry in record.contributions}
    optimizer.begin(record.round, weights, record.tokens)
    needed = shapes_in(record, needed_shapes(theta, optimizer, part))
    if any(tensor.device != CPU for tensor in theta.values()):
        theta = _OnHost(theta)
    for block, shapes in needed.items():
        blobs = list(_fetch_all(block, shapes, run, record, fetch, optimizer.settings.compression))
        for name, shape in shapes.items():
            weighted = ((weight_of(entry, block), blob.tensor(name).scaled(scale_of(entry))) for entry, blob in blobs)
            rows = range(shape[0]) if part is None else part.rows[name]
            # Not kept in a variable, which would hold one tensor's mean while the next one is computed.
            optimizer.take(theta, name, _mean(shape, rows, weighted, optimizer.settings))
            if isinstance(theta, _OnHost) and optimizer.settings.source == "difference":
                theta.put_back()  # a gradient's step is taken in `finish`, for all tensors at once
    optimizer.finish(theta)
    if isinstance(theta, _OnHost):
        theta.put_back()


def blocks_in(record: RoundRecord) -> frozenset[str]:
    """Return the blocks that a round changes, which all contributions have."""
    return frozenset(blob.block for entry in record.contributions[:1] for blob in entry.blobs)


def shapes_in(record: RoundRecord, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shapes]:
    """Return the parameters' shapes by block, of the blocks that a round changes."""
    changed = blocks_in(record)
    return {block: own for block, own in shapes_by_block(shapes).items() if block in changed}


def weight_of(entry: ContributionEntry, block: str) -> float:
    """Return a block's weight: the contribution's, by the share of its inner steps that the block comes from."""
    steps = next(blob.steps for blob in entry.blobs if blob.block == block)
    return entry.weight * steps / entry.steps if steps else entry.weight


def needed_shapes(theta: Mapping[str, Tensor], optimizer: RoundOptimizer, part: Part | None = None) -> Shapes:
    """Return the whole shapes of the tensors whose contributions a round fetches, by name."""
    return optimizer.needs(theta) if part is None else {name: part.shapes[name] for name in theta}


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
