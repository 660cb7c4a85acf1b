"""One end of a link between two neighbouring stages: what the in-process and the gRPC link have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.errors import PeerAtFault
from hetero_pp.link.ledger import Ledger, frame_sizes, wire_bytes
from hetero_pp.messages.messages_pb2 import BF16, FP32, UINT8, DType, LinkHeader, TensorHeader

WIRE_DTYPES: dict[DType, torch.dtype] = {FP32: torch.float32, BF16: torch.bfloat16, UINT8: torch.uint8}
"""What may cross a link, by its number on the wire."""

MAX_MESSAGE_BYTES = 1 << 30
"""The largest payload of one message, unless the caller says otherwise."""

ACKNOWLEDGED_EVERY = 32
"""Messages after which a receiver acknowledges at the latest."""

PEER_CLOSED = "the peer closed the link"
END_CLOSED = "this end of the link is closed"

_NUMBERS = {dtype: number for number, dtype in WIRE_DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A header and the tensors it describes, in the dtype of the wire (fp32, bf16, or uint8 for bits).

    `header.tensors` is filled in by the link that sends.
    """

    header: LinkHeader
    tensors: tuple[Tensor, ...] = ()

    @property
    def payload_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class LinkEnd(Protocol):
    """Sends towards one neighbour and receives from it, both in order.

    Sending and receiving run beside the caller's compute. Tensors that were sent must not be changed;
    received tensors may lie in a buffer that is used again once the message is recycled.
    """

    ledger: Ledger
    """What this end has sent."""

    def send(self, message: Message) -> None:
        """Queue a message and return at once.

        Raises LinkClosed if the link has failed or this end is closed, ValueError for what cannot cross.
        """

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises LinkTimeout after `timeout` seconds, LinkClosed if no more can come.

        What a peer sent before it closed arrives before LinkClosed does.
        """

    def recycle(self, message: Message) -> None:
        """Give a received message's buffer back; its tensors must not be used any more. Optional."""

    @property
    def unacknowledged(self) -> int:
        """Number of sent messages that the other end has not acknowledged."""

    def accuse(self, reason: str) -> PeerAtFault:
        """Abort the link because of a malformed message, and return the error to raise.

        The refusal is counted with the other end as its sender.
        """

    def close(self) -> None:
        """Deliver what was sent, then end this direction; the peer can still send.

        Returns once the peer has everything, after a few seconds at most. Safe to call twice.
        """

    def abort(self, cause: str) -> None:
        """Drop what is under way and end both directions at once.

        Both ends' receivers wake with LinkClosed, this one's with `cause` (the peer's too where the transport
        can carry it). Safe to call twice: the first cause stays.
        """


def sealed(message: Message) -> Message:
    """The message as it will cross: tensors dense and outside autograd, its own header that describes them.

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
    """What the frames of a sealed message take on the wire; equal on every transport."""
    return [wire_bytes([size]) for size in frame_sizes(message.header.ByteSize(), message.payload_bytes)]
