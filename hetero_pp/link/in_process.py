"""A link between two stages of one process: no copies, the shape and the byte counts of the real one."""

from __future__ import annotations

from hetero_pp.errors import LinkClosed
from hetero_pp.link.ledger import Ledger
from hetero_pp.link.protocol import END_CLOSED, Message, sealed, wire_frames
from hetero_pp.link.shaping import Clock, ShapedQueue, busy_seconds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.link.turns import StreamQueue
from hetero_pp.links import LinkShape, LinkSpec

Queue = ShapedQueue[Message] | StreamQueue[Message]


def in_process_pair(
    spec: LinkSpec, seed: int, clock: Clock | None = None, lines: Lines | None = None
) -> tuple[InProcessLinkEnd, InProcessLinkEnd]:
    """Both ends of a link: the first sends forward, the second backward. All links of a machine share its `lines`."""
    lines = lines or Lines(clock=clock)
    forward: Queue = lines.crossing(spec, "forward", seed)
    backward: Queue = lines.crossing(spec, "backward", seed)
    return (
        InProcessLinkEnd(spec.forward, forward, backward),
        InProcessLinkEnd(spec.backward, backward, forward),
    )


class InProcessLinkEnd:
    """One end; implements LinkEnd. Messages pass by reference."""

    def __init__(self, shape: LinkShape, outgoing: Queue, incoming: Queue) -> None:
        self.ledger = Ledger()
        self._shape = shape
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    def send(self, message: Message) -> None:
        if self._closed:
            raise LinkClosed(END_CLOSED)
        message = sealed(message)
        frames = wire_frames(message)
        self._outgoing.put(message, frames)
        wire = sum(frames)
        self.ledger.add(message.header.round, message.payload_bytes, wire, busy_seconds(self._shape, wire))

    def receive(self, timeout: float | None = None) -> Message:
        return self._incoming.get(timeout)

    def recycle(self, message: Message) -> None:
        """Nothing to give back: the tensors are the sender's own."""

    def close(self) -> None:
        self._closed = True
        self._outgoing.close()

    def abort(self, cause: str) -> None:
        self._outgoing.abort(cause)
        self._incoming.abort(cause)
