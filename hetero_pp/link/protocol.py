"""Messages between two neighbouring stages, and the interface of a link end: in process or over gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.core.errors import PeerAtFault
from hetero_pp.link.ledger import Ledger, frame_sizes, wire_bytes
from hetero_pp.messages.messages_pb2 import BF16, FP32, UINT8, DType, LinkHeader, Statement, TensorHeader

WIRE_DTYPES: dict[DType, torch.dtype] = {FP32: torch.float32, BF16: torch.bfloat16, UINT8: torch.uint8}
"""Data types that can cross a link, by their numbers on the wire."""

MAX_MESSAGE_BYTES = 1 << 30
"""Default limit for the payload of one message."""

ACKNOWLEDGED_EVERY = 32
"""Largest number of messages between two acknowledgements of a receiver."""

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

    ledger: Ledger
    """Traffic that this end has sent."""

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
    generation: int = 0
    """Generation of the group."""
    signer: Signer | None = None
    """Set if members have certificates."""
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
    """Return the bytes on the wire of each frame of a sealed message; equal for every transport."""
    return [wire_bytes([size]) for size in frame_sizes(message.header.ByteSize(), message.payload_bytes)]
