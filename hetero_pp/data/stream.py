"""Tokens and batches of one replica from a streamed corpus, in a shuffled order that resumes exactly.

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
import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.core.text import without_controls
from hetero_pp.data.batches import permute
from hetero_pp.data.tokenizers import CannotEncode, Tokenizer

ENCODED_AT_ONCE = 64  # number of documents per tokenizer call: enough for all cores
_SHOWN_CHARACTERS = 40
_REMEMBERED = 1024  # number of recent steps to which reading can go back
Document = tuple[int, int, int]  # (epoch, shard, number in the shard)


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
    block: int  # number of completed blocks of this epoch
    parts: tuple[ShardPart, ...]
    """Everything that the replica has to read in this epoch, from the start of the block on."""
    taken: int = 0  # number of consumed documents of the block
    offset: int = 0  # number of consumed tokens of the next document

    def as_json(self) -> dict[str, Any]:
        """Return the position as plain numbers, lists and strings."""
        return self._asdict() | {"parts": [list(part) for part in self.parts]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Position:
        """Return the position from the result of `as_json`."""
        return cls(**{**state, "parts": tuple(ShardPart(*part) for part in state["parts"])})


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


class TokenStream:
    """The tokens of a replica: each document followed by a separator, epoch after epoch if `repeat`."""

    def __init__(self, order: Order, tokenizer: Tokenizer, repeat: bool) -> None:
        self.order = order
        self.tokenizer = tokenizer
        self.repeat = repeat
        self._at = order.start(0)
        self._blocks: Iterator[Block] | None = None  # blocks after the current one; None before the first is read
        self._block: list[tuple[Document, str]] = []
        self._encoded: dict[int, np.ndarray] = {}  # ids of documents of the current block, by their place in it

    @property
    def position(self) -> Position:
        """Position of the next token."""
        return self._at

    def seek(self, position: Position) -> None:
        """Go back to an earlier position. Within the current block this is free; otherwise the block is read again."""
        if position._replace(taken=0, offset=0) != self._at._replace(taken=0, offset=0):
            self._blocks = None
        self._at = position

    def take(self, count: int) -> np.ndarray:
        """Return the next tokens, [count]. Raises ConfigError at the end of the corpus if it may not be repeated."""
        pieces = [np.empty(0, np.int64)]
        while count:
            ids = self._document()
            piece = ids[self._at.offset : self._at.offset + count]
            count -= len(piece)
            pieces.append(piece)
            end = self._at.offset + len(piece)
            if end == len(ids):
                self._at = self._at._replace(taken=self._at.taken + 1, offset=0)
            else:
                self._at = self._at._replace(offset=end)
        return np.concatenate(pieces)

    def _document(self) -> np.ndarray:
        """Return the ids of the document at the position, including its separator."""
        if self._blocks is None:
            self._blocks = self._open()
        while self._at.taken >= len(self._block):
            if (following := next(self._blocks, None)) is not None:
                (self._at, self._block), self._encoded = following, {}
                continue
            if not self.repeat:
                raise ConfigError(
                    ("data", "repeat"),
                    f"found false, and the stream of replica {self.order.replica} of {self.order.replicas} has ended, "
                    "expected true (--repeat), more text, or fewer steps",
                )
            self._at = self.order.start(self._at.epoch + 1)
            self._blocks = self._open()
            if not self._block:
                raise self.order.without_text()
        first = self._at.taken
        if first not in self._encoded:  # encode it, and some documents after it
            ids = encode(self.tokenizer, [text for _, text in self._block[first : first + ENCODED_AT_ONCE]])
            self._encoded = dict(enumerate(ids, start=first))
        return self._encoded[first]

    def _open(self) -> Iterator[Block]:
        """Read the block at the position, if there is one; return those after it."""
        blocks = self.order.blocks(self._at)
        _, self._block = next(blocks, (self._at, []))
        self._encoded = {}
        return blocks


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each text, followed by a separator, int64."""
    separator = np.array([tokenizer.separator], np.int64)
    try:
        encoded = tokenizer.encode_batch(texts)
    except CannotEncode as error:
        start = without_controls(texts[error.index][:_SHOWN_CHARACTERS])
        raise error.of(f"the document of the stream that begins with `{start}`") from None
    return [np.concatenate([ids.astype(np.int64), separator]) for ids in encoded]


class StreamBatches:
    """Batches of one replica: rows of L + 1 consecutive tokens of its stream.

    The batch of a step is a function of (seed, replica, step). Reaching a step requires reading the text before it,
    from the nearest known position: a recent step, the loaded position, or the start.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, batch_size: int) -> None:
        self.stream = stream
        self.shape = (batch_size, sequence_length + 1)
        self._step = 0
        self._positions = {0: stream.position}
        """Step -> position of its batch, for the earliest known step and the recent ones."""
        self._ahead: dict[int, tuple[torch.Tensor, Position]] = {}
        """Step -> batch that was read ahead, and the position after it."""
        self._next_is = 0, stream.position  # the step after the last trained one, and the position of its batch

    def train(self, step: int) -> torch.Tensor:
        """Return the batch of step `step` (from 0), int64 [B, L + 1]. Steps before the loaded one cannot be read."""
        if step not in self._ahead:
            self._seek(step)
        batch, end = self._ahead[step] if step in self._ahead else self._next()
        self._next_is = step + 1, end
        return batch

    def read_ahead(self, steps: range) -> None:
        self._ahead = {}
        self._seek(steps.start)
        try:
            self._ahead = {step: self._next() for step in steps}
        except ConfigError:
            self.stream.seek(self._positions[self._step])
            raise

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch, as plain numbers, lists and strings."""
        step, position = self._next_is
        return {"step": step, **position.as_json()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a replica with the same settings; the following tokens are the same as then."""
        own = dict(state)
        step, position = own.pop("step"), Position.from_json(own)
        self.stream.seek(position)
        self._step, self._positions = step, {step: position}
        self._next_is, self._ahead = (step, position), {}

    def _seek(self, step: int) -> None:
        """Go to the start of the batch of a step."""
        if step != self._step:
            self._step = max(known for known in self._positions if known <= step)
            self.stream.seek(self._positions[self._step])
        while self._step < step:
            self._next()

    def _next(self) -> tuple[torch.Tensor, Position]:
        rows, columns = self.shape
        batch = torch.from_numpy(self.stream.take(rows * columns).reshape(rows, columns))
        self._step += 1
        self._positions[self._step] = self.stream.position
        if len(self._positions) > _REMEMBERED:
            second = next(step for number, step in enumerate(self._positions) if number == 1)
            del self._positions[second]
        return batch, self.stream.position
