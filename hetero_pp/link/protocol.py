"""One end of a link between two neighbouring stages: what the in-process and the gRPC link have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetero_pp.link.ledger import Ledger
from hetero_pp.rpc.messages_pb2 import LinkHeader


@dataclass(frozen=True, slots=True)
class Message:
    """A header and the tensors it describes, already in the dtype of the wire (fp32, bf16, or uint8 for bits).

    `header.tensors` is filled in by the link that sends.
    """

    header: LinkHeader
    tensors: tuple[Tensor, ...] = ()


class LinkEnd(Protocol):
    """Sends towards one neighbour and receives from it, both in order.

    Sending and receiving run beside the caller's compute. Tensors that were sent must not be changed by the caller
    afterwards; received tensors may lie in a buffer that is used again once the message is recycled.
    """

    ledger: Ledger
    """What this end has sent."""

    def send(self, message: Message) -> None:
        """Queue a message and return at once. Raises LinkClosed if the link has failed."""

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises LinkTimeout after `timeout` seconds, LinkClosed if the peer is gone."""

    def recycle(self, message: Message) -> None:
        """Give a received message's buffer back; its tensors must not be used any more. Optional but cheap."""

    def close(self) -> None:
        """Deliver what was sent, then end this direction. Safe to call twice; blocks for a few seconds at most."""
