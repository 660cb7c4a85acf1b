"""Shuffled order in which a replica reads the documents of a streamed corpus, with exact resumption.

Documents are read in blocks of `shuffle_buffer`. A block is permuted by a key and consumed completely before the next
one is read. The content of a buffer that is refilled one document at a time would depend on everything read before. A
block depends only on its start, so a position is a few numbers, and resuming costs reading one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import permute
from hetero_pp.data.parts import Part, deal, epoch_of

Document = tuple[int, int, int]
"""(epoch, shard, number in the shard)."""


class ShardReader(Protocol):
    """Numbered shards of documents."""

    count: int

    def documents(self, shard: int, start: int) -> Iterator[str]:
        """Yield the texts of a shard, starting with document `start`."""


class Position(NamedTuple):
    """Position of a replica in the stream."""

    epoch: int
    block: int
    """Number of completed blocks of this epoch."""
    parts: tuple[Part, ...]
    """Everything that the replica has to read in this epoch, from the start of the block on."""
    taken: int = 0
    """Number of consumed documents of the block."""
    offset: int = 0
    """Number of consumed tokens of the next document."""

    def as_json(self) -> dict[str, Any]:
        """Return the position as plain numbers, lists and strings."""
        return self._asdict() | {"parts": [list(part) for part in self.parts]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Position:
        """Return the position of which `as_json` returned this state. Former states also have an empty `read`."""
        known = {key: value for key, value in state.items() if key != "read"}
        return cls(**{**known, "parts": tuple(Part(*part) for part in state["parts"])})


Block = tuple[Position, list[tuple[Document, str]]]
"""Start of a block, and its documents with their texts in shuffled order."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Parameters of the order in which replica `replica` of `replicas` reads the documents of the shards."""

    shards: ShardReader
    seed: int
    replica: int
    replicas: int
    shuffle_buffer: int
    held_out: int = 0
    """Documents at the start of shard 0 that no replica trains on."""

    def start(self, epoch: int) -> Position:
        """Return the start position of an epoch."""
        parts = deal(epoch_of(self.shards.count, epoch, self.seed, self.held_out), self.replicas, self.replica)
        return Position(epoch, 0, parts)

    def blocks(self, position: Position) -> Iterator[Block]:
        """Yield the remaining blocks of the epoch, starting with the block of the position."""
        reader = self._read(position)
        at = position
        while block := list(islice(reader, self.shuffle_buffer)):
            key = seed_of(self.seed, "block", self.replica, at.epoch, at.block)
            yield at, [block[i][1:] for i in permute(np.arange(len(block)), len(block), key)]
            index, (epoch, shard, last) = block[-1][:2]
            part = position.parts[index]
            rest = Part(epoch, shard, last + part.step, part.step)
            at = at._replace(block=at.block + 1, parts=(rest, *position.parts[index + 1 :]), taken=0, offset=0)

    def _read(self, position: Position) -> Iterator[tuple[int, Document, str]]:
        """Yield (part index, document, text) in order, without blank documents."""
        for index, part in enumerate(position.parts):
            texts = self.shards.documents(part.shard, part.start)
            for number, text in enumerate(islice(texts, 0, None, part.step)):
                if text.strip():
                    yield index, (part.epoch, part.shard, part.start + number * part.step), text
