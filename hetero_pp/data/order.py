"""The order in which a replica reads the documents of a streamed corpus: shuffled, and exact to go on with.

Documents are read in blocks of `shuffle_buffer`; a block is permuted by a key and given out whole before the next is
read. Unlike a buffer that is refilled one document at a time, whose content depends on all that was read before,
this is a function of where the block starts. So a position is a few numbers, and going on costs reading one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from hetero_pp.data.batches import permute
from hetero_pp.data.parts import Part, deal, epoch_of
from hetero_pp.seeds import seed_of

Document = tuple[int, int, int]
"""(epoch, shard, number in the shard)."""


class ShardReader(Protocol):
    """Numbered shards of documents."""

    count: int

    def documents(self, shard: int, start: int) -> Iterator[str]:
        """The texts of a shard from document `start` on."""


class Position(NamedTuple):
    """Where a replica stands in the stream."""

    epoch: int
    """That is being read; there may be parts left of earlier ones if the number of replicas changed."""
    block: int
    """Blocks of the epoch before this one."""
    parts: tuple[Part, ...]
    """All that the replica has to read in this epoch from the start of the block on."""
    read: Mapping[Document, int | None]
    """Of these parts: tokens that were given of a document before (None: all), when there were other replicas."""
    taken: int = 0
    """Documents of the block that were given."""
    offset: int = 0
    """Tokens of the next one that were given, counted from its start."""

    def as_json(self) -> dict[str, Any]:
        """As plain numbers, lists and strings."""
        read = [[*document, tokens] for document, tokens in self.read.items()]
        return self._asdict() | {"parts": [list(part) for part in self.parts], "read": read}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Position:
        """What `as_json` was called on."""
        parts = tuple(Part(*part) for part in state["parts"])
        read = {(epoch, shard, number): tokens for epoch, shard, number, tokens in state["read"]}
        return cls(**{**state, "parts": parts, "read": read})


Block = tuple[Position, list[tuple[Document, str]]]
"""The start of a block and its documents with their texts, in the order in which they are given."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What decides the order in which replica `replica` of `replicas` reads the shards' documents."""

    shards: ShardReader
    seed: int
    replica: int
    replicas: int
    shuffle_buffer: int
    held_out: int = 0
    """Documents at the start of shard 0 that nobody trains on."""

    def start(self, epoch: int) -> Position:
        """The start of an epoch."""
        return Position(epoch, 0, self._share(epoch), {})

    def _share(self, epoch: int) -> tuple[Part, ...]:
        return deal(epoch_of(self.shards.count, epoch, self.seed, self.held_out), self.replicas, self.replica)

    def blocks(self, position: Position) -> Iterator[Block]:
        """The blocks of the rest of the epoch, from the one of the position on."""
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
        """Documents of the parts in order, without those that are blank or were given: (which part, document, text)."""
        for index, part in enumerate(position.parts):
            texts = self.shards.documents(part.shard, part.start)
            for number, text in enumerate(islice(texts, 0, None, part.step)):
                document = (part.epoch, part.shard, part.start + number * part.step)
                if text.strip() and position.read.get(document, 0) is not None:
                    yield index, document, text

    def left(self, position: Position, until: int) -> tuple[list[Part], dict[Document, int | None]]:
        """What the replica at a position has not given yet up to the end of epoch `until`, and what it has of that."""
        read = dict(position.read)
        _, block = next(self.blocks(position), (position, []))
        read |= {document: None for document, _ in block[: position.taken]}
        if position.taken < len(block) and position.offset:
            read[block[position.taken][0]] = position.offset
        later = [part for epoch in range(position.epoch + 1, until + 1) for part in self._share(epoch)]
        return [*position.parts, *later], read


def go_on_with(orders: Sequence[Order], positions: Sequence[Position], replicas: int, replica: int) -> Position:
    """The position of replica `replica` of now `replicas` after all of before (`orders`) came to `positions`.

    What they had not given yet up to the end of the latest epoch that one of them was in is dealt anew, so that every
    document is given as often as if nothing had changed: the rest of one that was given in part, too.
    """
    epoch = max(position.epoch for position in positions)
    ranked: list[tuple[int, int, Part]] = []
    read: dict[Document, int | None] = {}
    for order, position in zip(orders, positions, strict=True):
        parts, own_read = order.left(position, epoch)
        ranked += [(part.epoch, number, part) for number, part in enumerate(parts)]
        read |= own_read
    mine = deal([part for _, _, part in sorted(ranked)], replicas, replica)  # those begun come first, spread over all
    return Position(epoch, 0, mine, _within(read, mine))


def _within(read: Mapping[Document, int | None], parts: Iterable[Part]) -> dict[Document, int | None]:
    """Of the documents that were read, those that the parts hold."""
    by_shard: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_shard.setdefault((part.epoch, part.shard), []).append(part)
    return {
        document: tokens
        for document, tokens in read.items()
        if any(part.holds(*document) for part in by_shard.get(document[:2], []))
    }
