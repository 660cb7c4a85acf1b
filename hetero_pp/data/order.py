"""Shuffled order in which a replica reads its documents of a streamed corpus, with exact resumption.

A shard is a file of documents that can only be read from its start. A part is every `step`-th document of a shard,
beginning at `start`. Whole shards are dealt as long as each replica gets the same number. Each of the remaining shards
is split among all replicas. With many shards, one replica reads each; with fewer shards than replicas, all replicas
read each.

Documents are read in blocks of `shuffle_buffer`. A block is permuted by a key and consumed completely before the next
one is read. The content of a buffer that is refilled one document at a time would depend on everything read before. A
block depends only on its start, so a position is a few numbers, and resuming costs reading one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import permute

Document = tuple[int, int, int]
"""(epoch, shard, number in the shard)."""


class ShardPart(NamedTuple):
    """Documents start, start + step, start + 2 step, ... of a shard, to be read in an epoch."""

    epoch: int
    shard: int
    start: int
    step: int

    def split(self, count: int) -> list[ShardPart]:
        """Return `count` parts that together contain each document of this part once."""
        return [self._replace(start=self.start + i * self.step, step=self.step * count) for i in range(count)]

    def holds(self, epoch: int, shard: int, document: int) -> bool:
        """Return whether the part contains the document."""
        offset = document - self.start
        return (epoch, shard) == (self.epoch, self.shard) and offset >= 0 and offset % self.step == 0


def deal(parts: Sequence[ShardPart], replicas: int, replica: int) -> tuple[ShardPart, ...]:
    """Return the parts of one replica: every `replicas`-th part, and its share of each part that is left over."""
    split = len(parts) % replicas
    return (*(part.split(replicas)[replica] for part in parts[:split]), *parts[split + replica :: replicas])


def epoch_of(shards: int, epoch: int, seed: int, held_out: HeldOut) -> list[ShardPart]:
    """Return all shards in the order of an epoch, without the documents that are held out."""
    order = permute(np.arange(shards), shards, seed_of(seed, "shards", epoch))
    return [ShardPart(epoch, int(shard), held_out.documents if shard == held_out.shard else 0, 1) for shard in order]


class HeldOut(NamedTuple):
    """The first documents of a shard, on which no replica trains."""

    shard: int = 0
    documents: int = 0


NOTHING_HELD_OUT = HeldOut()


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
    parts: tuple[ShardPart, ...]
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
        """Return the position from the result of `as_json`. Former states also have an empty `read`."""
        known = {key: value for key, value in state.items() if key != "read"}
        return cls(**{**known, "parts": tuple(ShardPart(*part) for part in state["parts"])})


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
    held_out: HeldOut = NOTHING_HELD_OUT

    def start(self, epoch: int) -> Position:
        parts = deal(epoch_of(self.shards.count, epoch, self.seed, self.held_out), self.replicas, self.replica)
        return Position(epoch, 0, parts)

    def require_text(self) -> None:
        """Raise ConfigError if the replica has no document to train on. Reads one document."""
        if next(self._read(self.start(0)), None) is None:
            raise self.without_text()

    def without_text(self) -> ConfigError:
        """Return the error for a replica that has no document to train on."""
        which = f"replica {self.replica} of {self.replicas}"
        if not self.held_out.documents:
            return ConfigError(("data", "corpus"), f"found no text for {which}, expected more documents")
        found = f"found {self.held_out.documents}, which leaves no text for {which}"
        return ConfigError(("data", "stream", "validation_documents"), f"{found}, expected fewer, or more documents")

    def blocks(self, position: Position) -> Iterator[Block]:
        """Yield the remaining blocks of the epoch, starting with the block of the position."""
        reader = self._read(position)
        at = position
        while block := list(islice(reader, self.shuffle_buffer)):
            key = seed_of(self.seed, "block", self.replica, at.epoch, at.block)
            yield at, [block[i][1:] for i in permute(np.arange(len(block)), len(block), key)]
            index, (epoch, shard, last) = block[-1][:2]
            part = position.parts[index]
            rest = ShardPart(epoch, shard, last + part.step, part.step)
            at = at._replace(block=at.block + 1, parts=(rest, *position.parts[index + 1 :]), taken=0, offset=0)

    def _read(self, position: Position) -> Iterator[tuple[int, Document, str]]:
        """Yield (part index, document, text) in order, without blank documents."""
        for index, part in enumerate(position.parts):
            texts = self.shards.documents(part.shard, part.start)
            for number, text in enumerate(islice(texts, 0, None, part.step)):
                if text.strip():
                    yield index, (part.epoch, part.shard, part.start + number * part.step), text
