"""Contributions of the true sizes: valid headers and digests, and random bytes in place of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hetero_pp.core.seeds import seed_of
from hetero_pp.model.transformer import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_of


class RehearsedBlobs(Mapping[str, bytes]):
    """Blobs of one contribution, by block. Each is made anew when it is asked for, so that none is held.

    They are random, so that nothing on their way can compress them.
    """

    def __init__(
        self,
        addresses: Mapping[str, BlobAddress],
        shapes: Mapping[str, Shapes],
        sizes: Mapping[str, int],
        settings: CompressionSettings,
        generation: int,
    ) -> None:
        """`sizes` are the predicted bytes of each block's blob (`blob_sizes`), `shapes` those of its tensors."""
        self._addresses, self._shapes, self._sizes = addresses, shapes, sizes
        self._settings, self._generation = settings, generation

    def __getitem__(self, block: str) -> bytes:
        address, names = self._addresses[block], sorted(self._shapes[block])
        contents = dict.fromkeys(names, b"")
        room = self._sizes[block] - len(self._blob(address, contents))
        seed = seed_of("rehearsed blob", address.run, address.round, address.replica, block, self._generation)
        contents[names[0]] = np.random.default_rng(seed).bytes(max(0, room))
        return self._blob(address, contents)

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def _blob(self, address: BlobAddress, contents: Mapping[str, bytes]) -> bytes:
        shapes = self._shapes[address.block]
        return blob_of(address, ((name, shapes[name], data) for name, data in contents.items()), self._settings)
