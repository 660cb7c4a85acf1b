"""Messages between neighbouring stages, their bytes on the wire, and the interface of a link end."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.core import bits
from hetero_pp.core.errors import MalformedMessage, PeerAtFault
from hetero_pp.messages.messages_pb2 import BF16, FP32, UINT8, DType, LinkHeader, Statement, TensorHeader

FRAME_BYTES = 1 << 20  # Size of the raw frames of a payload. A single large gRPC message is six times slower.
PREFIX_BYTES = 4  # bytes for the length of the header, at the start of a message's first frame

_GRPC_PREFIX = 5
_HTTP2_FRAME_HEADER = 9
_HTTP2_FRAME_BYTES = 16384


def raw_frames(n_bytes: int) -> list[int]:
    """Return the sizes of the frames of bytes without a header, such as contributions and run checkpoints."""
    whole, last = divmod(n_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + [last]


def wire_bytes(frames: Sequence[int]) -> int:
    """Return the bytes on the wire for frames of these sizes, with gRPC's prefix and HTTP/2's frame headers.

    TCP and IP headers (about 3 % at 1500-byte packets) are not included, because a process cannot see them.
    """
    total = 0
    for size in frames:
        body = size + _GRPC_PREFIX
        total += body + _HTTP2_FRAME_HEADER * -(-body // _HTTP2_FRAME_BYTES)
    return total


@dataclass(slots=True)
class Count:
    """Traffic of one direction in one round. `busy_seconds` is the time for which the shaped link was occupied."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    busy_seconds: float = 0.0


class Ledger:
    """Counts of one direction of one link, by round. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[int, Count] = defaultdict(Count)

    def add(self, round_: int, payload: int, wire: int, busy_seconds: float = 0.0) -> None:
        """Count one message of `payload` tensor bytes that took `wire` bytes."""
        with self._lock:
            count = self._rounds[round_]
            count.messages += 1
            count.payload_bytes += payload
            count.wire_bytes += wire
            count.busy_seconds += busy_seconds

    def of_round(self, round_: int) -> Count:
        """Return a copy of the counts of one round."""
        with self._lock:
            return replace(self._rounds.get(round_, Count()))


WIRE_DTYPES: dict[DType, torch.dtype] = {FP32: torch.float32, BF16: torch.bfloat16, UINT8: torch.uint8}
"""Data types that can cross a link, by their numbers on the wire."""

MAX_MESSAGE_BYTES = 1 << 30  # default limit for the payload of one message
ACKNOWLEDGED_EVERY = 32  # largest number of messages between two acknowledgements of a receiver

PEER_CLOSED = "the peer closed the link"
END_CLOSED = "this end of the link is closed"

_NUMBERS = {dtype: number for number, dtype in WIRE_DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Header and tensors in the dtype of the wire (fp32, bf16, or uint8 for bits).

    The sending link fills in `header.tensors`.
    """

    header: LinkHeader
    tensors: tuple[Tensor, ...] = ()

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class LinkEnd(Protocol):
    """Sends messages to one neighbour and receives messages from it, in order.

    Sending and receiving overlap with computation. Sent tensors must not be changed. Received tensors may lie in a
    buffer that is reused once the message is recycled.
    """

    ledger: Ledger  # traffic that this end has sent

    def send(self, message: Message) -> None:
        """Queue a message and return at once.

        Raises LinkClosed if the link has failed or this end is closed, ValueError for a message that cannot be sent.
        """

    def receive(self, timeout: float | None = None) -> Message:
        """Return the next message. Raises LinkTimeout after `timeout` seconds, LinkClosed if no message can follow.

        Messages that a peer sent before closing are returned before LinkClosed is raised.
        """

    def recycle(self, message: Message) -> None:
        """Return the buffer of a received message. Its tensors must not be used afterwards. Optional."""

    @property
    def unacknowledged(self) -> int:
        """Number of sent messages that the other end has not acknowledged."""

    def accuse(self, reason: str) -> PeerAtFault:
        """Abort the link because of a malformed message, and return the error to raise.

        The refusal is counted with the other end as its sender.
        """

    def close(self) -> None:
        """Deliver all sent messages, then end this direction; the peer can still send.

        Returns once the peer has received everything, after a few seconds at most. Safe to call twice.
        """

    def abort(self, cause: str) -> None:
        """Discard unsent messages and end both directions at once.

        Receivers at both ends get LinkClosed. It has `cause` at this end, and at the peer where the transport can carry
        it. Safe to call twice: the first cause is kept.
        """


Holders = tuple[int | None, int | None]
"""Holder numbers of the previous and the next stage, as in AssignReply; None: unknown, or no stage."""

NOT_KNOWN: Holders = (None, None)


class Signer(Protocol):
    """Signs what a member has sent, and checks what its neighbours have signed."""

    def sign(self, data: bytes) -> Statement: ...

    def check(self, statement: Statement, data: bytes, member: str, holder: int | None = None) -> None:
        """Raise MalformedMessage unless `member` has signed these bytes, as this holder of its slot (None: any)."""


@dataclass(frozen=True)
class LinkEnds:
    """Link ends of a stage. An end is None at the first or last stage of a group, and in a replica without stages."""

    upstream: LinkEnd | None = None
    downstream: LinkEnd | None = None
    generation: int = 0  # generation of the group
    signer: Signer | None = None  # set if members have certificates
    holders: Holders = NOT_KNOWN

    @property
    def both(self) -> list[LinkEnd]:
        return [end for end in (self.upstream, self.downstream) if end is not None]

    def close(self) -> None:
        for end in self.both:
            end.close()

    def abort(self, cause: str) -> None:
        for end in self.both:
            end.abort(cause)


def sealed(message: Message) -> Message:
    """Return a message ready for sending: tensors are dense and detached, and its own header describes them.

    Raises ValueError if a dtype or the size cannot cross a link.
    """
    tensors = tuple(tensor.detach().contiguous() for tensor in message.tensors)
    header = LinkHeader()
    header.CopyFrom(message.header)
    header.ClearField("tensors")
    for tensor in tensors:
        if tensor.dtype not in _NUMBERS:
            raise ValueError(f"found a tensor of {tensor.dtype}, expected one of {', '.join(map(str, _NUMBERS))}")
        header.tensors.append(TensorHeader(dtype=_NUMBERS[tensor.dtype], shape=tensor.shape))
    result = Message(header, tensors)
    if result.payload_bytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"found {result.payload_bytes} bytes, expected at most {MAX_MESSAGE_BYTES} in a message")
    return result


def wire_frames(message: Message) -> list[int]:
    """Return the bytes on the wire of each frame of a sealed message; equal for every transport.

    All frames but the last are full; the first begins with the header.
    """
    whole, last = divmod(PREFIX_BYTES + message.header.ByteSize() + message.payload_bytes, FRAME_BYTES)
    return [wire_bytes([size]) for size in [FRAME_BYTES] * whole + [last] * (last > 0)]


def pack_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return token ids [B, L + 1] as uint8, packed to ceil(log2 V) bits each."""
    return torch.from_numpy(bits.pack(tokens.numpy(), bits.width_of(vocabulary)))


def unpack_tokens(packed: Tensor, vocabulary: int, batch: int, length: int) -> Tensor:
    """Return the packed ids [B, L + 1]. Raises MalformedMessage if they are invalid."""
    count = batch * (length + 1)
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        found = f"a tensor of {packed.dtype} with {packed.dim()} dimensions"
        raise MalformedMessage(f"token ids: found {found}, expected packed bytes")
    try:
        ids = bits.unpack(packed.numpy(), bits.width_of(vocabulary), count)
    except ValueError as error:
        raise MalformedMessage(f"token ids: {error}") from None
    if int(ids.max()) >= vocabulary:
        raise MalformedMessage(f"token ids: found {ids.max()}, expected less than {vocabulary}")
    return torch.from_numpy(ids.astype("int64")).view(batch, length + 1)


def packed_tokens_bytes(batch: int, length: int, vocabulary: int) -> int:
    """Return the bytes of one micro-batch's ids on the wire."""
    return bits.packed_size(batch * (length + 1), bits.width_of(vocabulary))
