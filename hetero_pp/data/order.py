"""Shuffled order in which a replica reads the documents of a streamed corpus, with exact resumption.

Documents are read in blocks of `shuffle_buffer`. A block is permuted by a key and consumed completely before the next
one is read. The content of a buffer that is refilled one document at a time would depend on everything read before. A
block depends only on its start, so a position is a few numbers, and resuming costs reading one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Current epoch. `parts` may include remainders of earlier epochs if the number of replicas changed."""
    block: int
    """Number of completed blocks of this epoch."""
    parts: tuple[Part, ...]
    """Everything that the replica has to read in this epoch, from the start of the block on."""
    read: Mapping[Document, int | None]
    """Documents of these parts that were consumed under another number of replicas -> tokens consumed (None: all)."""
    taken: int = 0
    """Number of consumed documents of the block."""
    offset: int = 0
    """Number of consumed tokens of the next document."""

    def as_json(self) -> dict[str, Any]:
        """Return the position as plain numbers, lists and strings."""
        read = [[*document, tokens] for document, tokens in self.read.items()]
        return self._asdict() | {"parts": [list(part) for part in self.parts], "read": read}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Position:
        """Return the position of which `as_json` returned this state."""
        parts = tuple(Part(*part) for part in state["parts"])
        read = {(epoch, shard, number): tokens for epoch, shard, number, tokens in state["read"]}
        return cls(**{**state, "parts": parts, "read": read})


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
        return Position(epoch, 0, self._share(epoch), {})

    def _share(self, epoch: int) -> tuple[Part, ...]:
        return deal(epoch_of(self.shards.count, epoch, self.seed, self.held_out), self.replicas, self.replica)

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
        """Yield (part index, document, text) in order, without blank and already consumed documents."""
        for index, part in enumerate(position.parts):
            texts = self.shards.documents(part.shard, part.start)
            for number, text in enumerate(islice(texts, 0, None, part.step)):
                document = (part.epoch, part.shard, part.start + number * part.step)
                if text.strip() and position.read.get(document, 0) is not None:
                    yield index, document, text

    def left(self, position: Position, until: int) -> tuple[list[Part], dict[Document, int | None]]:
        """Return the parts that are left up to the end of epoch `until`, and the consumed documents among them."""
        read = dict(position.read)
        _, block = next(self.blocks(position), (position, []))
        read |= {document: None for document, _ in block[: position.taken]}
        if position.taken < len(block) and position.offset:
            read[block[position.taken][0]] = position.offset
        later = [part for epoch in range(position.epoch + 1, until + 1) for part in self._share(epoch)]
        return [*position.parts, *later], read


def go_on_with(orders: Sequence[Order], positions: Sequence[Position], replicas: int, replica: int) -> Position:
    """Return the position of replica `replica` of `replicas` after the number of replicas changed.

    `orders` and `positions` describe all replicas before the change. Everything that they had not consumed, up to the
    end of the latest epoch that any of them reached, is dealt again. Every document, even a partly consumed one, is
    therefore read as many times as if nothing had changed.
    """
    epoch = max(position.epoch for position in positions)
    ranked: list[tuple[int, int, Part]] = []
    read: dict[Document, int | None] = {}
    for order, position in zip(orders, positions, strict=True):
        parts, own_read = order.left(position, epoch)
        ranked += [(part.epoch, number, part) for number, part in enumerate(parts)]
        read |= own_read
    mine = deal(
        [part for _, _, part in sorted(ranked)], replicas, replica
    )  # started parts come first, divided among all replicas
    return Position(epoch, 0, mine, _within(read, mine))


def _within(read: Mapping[Document, int | None], parts: Iterable[Part]) -> dict[Document, int | None]:
    """Keep the consumed documents that lie in the given parts."""
    by_shard: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_shard.setdefault((part.epoch, part.shard), []).append(part)
    return {
        document: tokens
        for document, tokens in read.items()
        if any(part.holds(*document) for part in by_shard.get(document[:2], []))
    }
