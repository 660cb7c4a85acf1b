"""Tokens and batches of one replica from a streamed corpus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hetero_pp.core.control_characters import without_controls
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.order import Block, Order, Position
from hetero_pp.data.tokenizers import CannotEncode, Tokenizer

ENCODED_AT_ONCE = 64
"""Number of documents per tokenizer call: enough for all cores."""
_SHOWN_CHARACTERS = 40
_REMEMBERED = 1024
"""Number of recent steps to which reading can go back."""


class TokenStream:
    """The tokens of a replica: each document followed by a separator, epoch after epoch if `repeat`."""

    def __init__(self, order: Order, tokenizer: Tokenizer, repeat: bool) -> None:
        self.order = order
        self.tokenizer = tokenizer
        self.repeat = repeat
        self._at = order.start(0)
        self._blocks: Iterator[Block] | None = None
        """Blocks after the current one; None before the first is read."""

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
            self._open()
        while self._at.taken >= len(self._block):
            self._next_block()
        if self._at.taken not in self._encoded:
            self._encode()
        return self._encoded[self._at.taken]

    def _open(self) -> None:
        """Read the block at the position, if there is one."""
        self._blocks = self.order.blocks(self._at)
        _, self._block = next(self._blocks, (self._at, []))
        self._encoded: dict[int, np.ndarray] = {}

    def _next_block(self) -> None:
        """Go to the start of the next block, which may be in the next epoch."""
        assert self._blocks is not None
        found = next(self._blocks, None)
        if found is None:
            self._next_epoch()
        else:
            self._at, self._block = found
            self._encoded = {}

    def _encode(self) -> None:
        """Encode the document at the position and some documents after it."""
        first = self._at.taken
        ids = encode(self.tokenizer, [text for _, text in self._block[first : first + ENCODED_AT_ONCE]])
        self._encoded = dict(enumerate(ids, start=first))

    def _next_epoch(self) -> None:
        if not self.repeat:
            raise ConfigError(
                ("data", "repeat"),
                f"found false, and the stream of replica {self.order.replica} of {self.order.replicas} has ended, "
                "expected true (--repeat), more text, or fewer steps",
            )
        self._at = self.order.start(self._at.epoch + 1)
        self._open()
        if not self._block:
            raise self.order.without_text()


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
        self._next_is = 0, stream.position
        """The step after the last trained one, and the position of its batch."""

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
        position = dict(state)
        self._go_to(position.pop("step"), Position.from_json(position))

    def _go_to(self, step: int, position: Position) -> None:
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
        """Return the next batch of the stream, and the position after it."""
        rows, columns = self.shape
        batch = torch.from_numpy(self.stream.take(rows * columns).reshape(rows, columns))
        self._step += 1
        self._positions[self._step] = self.stream.position
        if len(self._positions) > _REMEMBERED:
            second = next(step for number, step in enumerate(self._positions) if number == 1)
            del self._positions[second]
        return batch, self.stream.position
