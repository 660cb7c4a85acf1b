"""Transcript of a round: what a stage sent to its neighbours and received from them, as digests, in schedule order.

A stage commits to its transcript with its contribution. An audit trains the round again and compares the transcripts of
all stages hop by hop, so that it finds the stage that computed something else.

Machines whose bits differ also keep a sketch of each message: eight sums of all its numbers with random signs. A change
of a single token moves all eight. Honest differences move them as little as they change the message.

Shapes: B sequences, L positions, K numbers per token, T = B L tokens, N messages.
"""

from __future__ import annotations

import hashlib
import math
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.core.seeds import seed_of
from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import EVALUATION, FLUSH, LinkHeader
from hetero_pp.pipeline.coefficients import CoefficientFormat, Symbols

SUMS = 8
"""Numbers in a sketch."""


class Way(IntEnum):
    """Way of a message, as seen by the stage that keeps the transcript."""

    RECEIVED_ACTIVATION = 0
    SENT_ACTIVATION = 1
    RECEIVED_GRADIENT = 2
    SENT_GRADIENT = 3

    @property
    def is_sent(self) -> bool:
        return self in (Way.SENT_ACTIVATION, Way.SENT_GRADIENT)


RECORD = np.dtype([("way", "u1"), ("micro_batch", "<u2"), ("step", "<u4"), ("norm", "<f8"), ("sha256", "u1", 32)])
"""A message: way, micro-batch, inner step of the round, gradient norm in its header (NaN: none), and digest.

The flush at the end of an inner loop counts as the first activation of one more step.
"""
SKETCHED = np.dtype([*RECORD.descr, ("sketch", "<f4", (SUMS,))])
"""The same with a sketch."""


class Sketches:
    """Sketches of the coefficients that cross the boundaries of a replica, by random signs that everybody knows."""

    def __init__(self, format_: CoefficientFormat, seed: int, replica: str) -> None:
        self._format, self._of = format_, (seed, replica)
        self._signs: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, symbols: Symbols) -> Tensor:
        """Return the sketch [SUMS] of symbols in host memory."""
        coefficients_TK = self._format.coefficients(symbols).flatten(0, 1)
        signs_ST, signs_K = self._signs_of(*coefficients_TK.shape)
        return signs_ST @ (coefficients_TK @ signs_K)

    def _signs_of(self, tokens: int, numbers: int) -> tuple[Tensor, Tensor]:
        """Return random signs [SUMS, T] and [K] for messages of this shape."""
        if (tokens, numbers) not in self._signs:
            generator = torch.Generator().manual_seed(seed_of("sketch", *self._of, tokens, numbers))
            drawn = torch.randint(0, 2, (SUMS * tokens + numbers,), generator=generator).float() * 2 - 1
            self._signs[tokens, numbers] = drawn[numbers:].view(SUMS, tokens), drawn[:numbers]
        return self._signs[tokens, numbers]


class Entry(Protocol):
    """A message of a transcript, which may not exist yet."""

    def note(self, message: Message, symbols: Symbols = ()) -> Message:
        """Begin to digest the message, and return it. `symbols` is what a sketch is made of."""

    def wait(self) -> None:
        """Wait until the message is digested. Its tensors may be changed then."""


class KeepsMessages(Protocol):
    """The part of a transcript that a stage's worker needs."""

    def begin(self) -> None:
        """Forget the messages of the inner loop before, or of one that was cut off."""

    def expect(self, way: Way, header: LinkHeader) -> Entry:
        """Return the entry of the next message in the order of the schedule, for `Entry.note`."""

    def received(self, way: Way, message: Message, symbols: Symbols = ()) -> Entry:
        """Begin to digest the next message in the order of the schedule, which has arrived; return its entry."""

    def to_bytes(self) -> bytes:
        """Return the records of all messages [N]; empty without any."""


class _NotKept:
    """Keeps nothing. Implements KeepsMessages and Entry."""

    def begin(self) -> None: ...

    def expect(self, way: Way, header: LinkHeader) -> Entry:
        return self

    def received(self, way: Way, message: Message, symbols: Symbols = ()) -> Entry:
        return self

    def to_bytes(self) -> bytes:
        return b""

    def note(self, message: Message, symbols: Symbols = ()) -> Message:
        return message

    def wait(self) -> None: ...


NOT_KEPT = _NotKept()
"""Transcript of a stage that is not audited."""


class Transcript:
    """Messages of the newest inner loop of one stage; evaluations are left out. Implements KeepsMessages.

    A thread computes the digests, because the stage computes meanwhile.
    """

    def __init__(self, sketches: Sketches | None = None) -> None:
        """`sketches` is set if an audit allows a tolerance."""
        self._sketches = sketches
        self._thread = ThreadPoolExecutor(1, "digests")
        self._entries: list[_Kept] = []
        self._step = 0

    def begin(self) -> None:
        self._entries = []

    def expect(self, way: Way, header: LinkHeader) -> Entry:
        if header.purpose == EVALUATION:
            return NOT_KEPT
        if header.purpose != FLUSH:
            self._step = header.step
        step = self._step + (header.purpose == FLUSH)
        self._entries.append(entry := _Kept(way, step, header.micro_batch, self._thread, self._sketches))
        return entry

    def received(self, way: Way, message: Message, symbols: Symbols = ()) -> Entry:
        entry = self.expect(way, message.header)
        entry.note(message, symbols)
        return entry

    def to_bytes(self) -> bytes:
        """Return the records of all messages [N], once all are digested."""
        records = np.zeros(len(self._entries), RECORD if self._sketches is None else SKETCHED)
        for record, entry in zip(records, self._entries, strict=True):
            entry.write(record)
        return records.tobytes()


@dataclass
class _Kept:
    """Implements Entry."""

    way: Way
    step: int
    micro_batch: int
    thread: ThreadPoolExecutor
    sketches: Sketches | None
    found: Future[tuple[float, bytes, Tensor | None]] | None = None
    """Norm, digest and sketch of the message."""

    def note(self, message: Message, symbols: Symbols = ()) -> Message:
        self.found = self.thread.submit(self._digest, message, symbols)
        return message

    def wait(self) -> None:
        assert self.found is not None, "this message was not noted"
        self.found.result()

    def _digest(self, message: Message, symbols: Symbols) -> tuple[float, bytes, Tensor | None]:
        header, norm = message.header, _norm_of(message.header)
        digest = hashlib.sha256(struct.pack("<I?d", header.rows, header.is_last, norm))
        for tensor in message.tensors:
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return norm, digest.digest(), self.sketches.of(symbols) if self.sketches is not None and symbols else None

    def write(self, record: np.void) -> None:
        """Write this message into a record, once it is digested."""
        assert self.found is not None, "this message was not noted"
        norm, digest, sketch = self.found.result()
        record["way"], record["micro_batch"], record["step"] = self.way, self.micro_batch, self.step
        record["norm"], record["sha256"] = norm, np.frombuffer(digest, np.uint8)
        if sketch is not None:
            record["sketch"] = sketch.numpy()


def _norm_of(header: LinkHeader) -> float:
    """Return the gradient norm in a header, or the sum of squares in that of a gradient; NaN without one."""
    if header.HasField("gradient_norm"):
        return header.gradient_norm
    return header.squared_norm if header.HasField("squared_norm") else math.nan


def records_of(data: bytes, is_sketched: bool) -> NDArray[np.void]:
    """Return the records [N] of a transcript. Raises ValueError for bytes that are none."""
    return np.frombuffer(data, SKETCHED if is_sketched else RECORD)
