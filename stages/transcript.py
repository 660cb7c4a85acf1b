"""Transcript of a round: what a stage sent to its neighbours and received from them, as digests, in schedule order.

A stage commits to its transcript with its contribution. An audit trains the round again and compares the transcripts of
all stages hop by hop, so that it finds the stage that computed something else.

Two neighbours may say different things about a message. So at the end of an inner loop each signs for the other what it
has sent. The other compares this with what it received, and keeps the signature as a proof. The flush that ends an
inner loop carries it forward, and a second flush carries it backward.

Machines whose bits differ also keep a sketch of each message: eight sums of all its numbers with random signs. A change
of a single token moves all eight. Honest differences move them as little as they change the message.

Shapes: B sequences, L positions, K numbers per token, T = B L tokens, N messages.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.core.seeds import seed_of
from hetero_pp.link.protocol import NOT_KNOWN, Holders, Message, Signer
from hetero_pp.messages.messages_pb2 import EVALUATION, FLUSH, LinkHeader, StageMessages, Statement
from hetero_pp.pipeline.coefficients import CoefficientFormat, Symbols

SUMS = 8  # numbers in a sketch


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

The flushes at the end of an inner loop count as the first activation and the first gradient of one more step.
"""
SKETCHED = np.dtype([*RECORD.descr, ("sketch", "<f4", (SUMS,))])  # the same with a sketch


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


class Entry:
    """A message of a transcript, which may not exist yet. This one keeps nothing."""

    def note(self, message: Message, symbols: Symbols = ()) -> Message:
        """Begin to digest the message, and return it. `symbols` is what a sketch is made of."""
        return message

    def wait(self) -> None:
        """Wait until the message is digested. Its tensors may be changed then."""


class NoTranscript:
    """The part of a transcript that a stage's worker needs, for a stage that is not audited: keeps nothing."""

    ends_both_ways = False  # whether a flush is sent backward, too, at the end of an inner loop

    def enter(self, generation: int, signer: Signer | None, holders: Holders = NOT_KNOWN) -> None:
        """Sign in another generation of the group; without a signer, nothing is signed. `holders`: of neighbours."""

    def begin(self, step: int = 0) -> None:
        """Begin an inner loop at a step, counted from 0: forget all messages but those of its earlier steps."""

    def expect(self, way: Way, header: LinkHeader) -> Entry:
        """Return the entry of the next message in the order of the schedule, for `Entry.note`."""
        return _NOTHING

    def received(self, way: Way, message: Message, symbols: Symbols = ()) -> Entry:
        """Begin to digest the next message in the order of the schedule, which has arrived; return its entry.

        Raises MalformedMessage for a flush without the sender's signature under all that was received from it.
        """
        return _NOTHING

    def to_bytes(self) -> bytes:
        """Return what the stage commits to (StageMessages), once all messages are digested; empty without any."""
        return b""


_NOTHING = Entry()


@dataclass(frozen=True)
class GroupPosition:
    """A stage in its group. Signatures are valid there only."""

    run: str
    members: Sequence[str]  # members of the group, in their order
    stage: int

    @property
    def member(self) -> str:
        return self.members[self.stage]

    def other(self, way: Way) -> str:
        """Return the neighbour at the other end of a way."""
        step = 1 if way in (Way.SENT_ACTIVATION, Way.RECEIVED_GRADIENT) else -1
        return self.members[self.stage + step]

    def signed(self, way: Way, round_: int, generation: int, records: NDArray[np.void]) -> bytes:
        """Return the bytes that the sender of all messages on a way signs, from the records [N] of either end."""
        ends = (self.member, self.other(way)) if way.is_sent else (self.other(way), self.member)
        of_way = records[records["way"] == way]
        digest = hashlib.sha256(b"".join(of_way[key].tobytes() for key in ("micro_batch", "step", "norm", "sha256")))
        return "\n".join(["messages", self.run, *ends, str(round_), str(generation), digest.hexdigest()]).encode()


class Transcript(NoTranscript):
    """Messages of the newest inner loop of one stage; evaluations are left out.

    A thread computes the digests, because the stage computes meanwhile.
    """

    ends_both_ways = True

    def __init__(self, position: GroupPosition, sketches: Sketches | None = None) -> None:
        """`sketches` is set if an audit allows a tolerance."""
        self._position, self._sketches = position, sketches
        self._thread = ThreadPoolExecutor(1, "digests")
        self._done: list[NDArray[np.void]] = []  # records of the steps before the newest one
        self._entries: list[_KeptEntry] = []  # messages of the newest step
        self._step = 0
        self._generation = 0
        self._signer: Signer | None = None
        self._holders: Holders = NOT_KNOWN
        self._statements: dict[Way, Statement] = {}

    def enter(self, generation: int, signer: Signer | None, holders: Holders = NOT_KNOWN) -> None:
        self._generation, self._signer, self._holders = generation, signer, holders

    def begin(self, step: int = 0) -> None:
        self._entries, self._statements = [one for one in self._entries if one.step < step], {}
        if step == 0:
            self._done, self._step = [], 0

    def expect(self, way: Way, header: LinkHeader) -> Entry:
        if header.purpose == EVALUATION:
            return _NOTHING
        if header.purpose != FLUSH and header.step != self._step:
            self._done.append(self._newest())
            self._entries, self._step = [], header.step
        entry = _KeptEntry(self, way, self._step + (header.purpose == FLUSH), header.micro_batch)
        self._entries.append(entry)
        return entry

    def received(self, way: Way, message: Message, symbols: Symbols = ()) -> Entry:
        entry = self.expect(way, message.header)
        entry.note(message, symbols)
        header = message.header
        if header.purpose == FLUSH and self._signer is not None:
            holder = self._holders[way is Way.RECEIVED_GRADIENT]
            self._signer.check(header.statement, self._signed(way, header.round), self._position.other(way), holder)
            self._statements[way] = header.statement
        return entry

    def digest(self, message: Message, symbols: Symbols) -> Future[Digested]:
        """Begin to digest a message."""
        return self._thread.submit(_digested, message, symbols, self._sketches)

    def sign(self, way: Way, header: LinkHeader) -> None:
        """Sign all messages that were sent on a way, in the header of the last one, a flush."""
        if self._signer is not None:
            header.statement.CopyFrom(self._signer.sign(self._signed(way, header.round)))

    def to_bytes(self) -> bytes:
        found = StageMessages(records=self._records().tobytes())
        if (before := self._statements.get(Way.RECEIVED_ACTIVATION)) is not None:
            found.from_previous.CopyFrom(before)
        if (after := self._statements.get(Way.RECEIVED_GRADIENT)) is not None:
            found.from_next.CopyFrom(after)
        return found.SerializeToString(deterministic=True)

    def _signed(self, way: Way, round_: int) -> bytes:
        return self._position.signed(way, round_, self._generation, self._records())

    def _records(self) -> NDArray[np.void]:
        """Return the records of all messages [N], once they are digested."""
        return np.concatenate([*self._done, self._newest()])

    def _newest(self) -> NDArray[np.void]:
        """Return the records of the newest step."""
        records = np.zeros(len(self._entries), RECORD if self._sketches is None else SKETCHED)
        for record, entry in zip(records, self._entries, strict=True):
            entry.write(record)
        return records


Digested = tuple[float, bytes, Tensor | None]
"""Content of a record beside its place in the schedule: norm, sha256, and sketch."""


def _digested(message: Message, symbols: Symbols, sketches: Sketches | None) -> Digested:
    # The gradient norm, or the sum of squares in the header of a gradient; NaN without one.
    header, norm = message.header, math.nan
    if header.HasField("gradient_norm"):
        norm = header.gradient_norm
    elif header.HasField("squared_norm"):
        norm = header.squared_norm
    digest = hashlib.sha256(struct.pack("<I?d", header.rows, header.is_last, norm))
    for tensor in message.tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return norm, digest.digest(), sketches.of(symbols) if sketches is not None and symbols else None


@dataclass
class _KeptEntry(Entry):
    """A message of a Transcript."""

    transcript: Transcript
    way: Way
    step: int
    micro_batch: int
    found: Future[Digested] | None = None

    def note(self, message: Message, symbols: Symbols = ()) -> Message:
        self.found = self.transcript.digest(message, symbols)
        if self.way.is_sent and message.header.purpose == FLUSH:
            self.transcript.sign(self.way, message.header)
        return message

    def wait(self) -> None:
        assert self.found is not None, "this message was not noted"
        self.found.result()

    def write(self, record: np.void) -> None:
        """Write this message into a record, once it is digested."""
        assert self.found is not None, "this message was not noted"
        norm, digest, sketch = self.found.result()
        record["way"], record["micro_batch"], record["step"] = self.way, self.micro_batch, self.step
        record["norm"], record["sha256"] = norm, np.frombuffer(digest, np.uint8)
        if sketch is not None:
            record["sketch"] = sketch.numpy()


def records_of(found: StageMessages, is_sketched: bool) -> NDArray[np.void]:
    """Return the records [N] of a transcript. Raises ValueError for bytes that are none."""
    return np.frombuffer(found.records, SKETCHED if is_sketched else RECORD)
