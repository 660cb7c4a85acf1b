"""One gRPC stream of a stage link, at one of its ends: what is to go out on it, and the message that comes in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hetero_pp.errors import LinkClosed
from hetero_pp.link.protocol import Message
from hetero_pp.link.shaping import ShapedQueue
from hetero_pp.link.turns import StreamQueue
from hetero_pp.rpc.framing import BufferPool, Decoder, encode

Outgoing = ShapedQueue[Iterator[bytes]] | StreamQueue[Iterator[bytes]]


class LinkStream:
    """gRPC's threads take frames out, and hand those that come to the link's end."""

    def __init__(self, outgoing: Outgoing, buffers: BufferPool) -> None:
        self.decoder = Decoder(buffers=buffers)
        self.hang_up: Callable[[], object] = lambda: None
        """Breaks the stream."""
        self._outgoing = outgoing

    def put(self, message: Message, frames: Sequence[int]) -> None:
        """A sealed message, behind all before it; `frames` are the bytes that its frames take on the wire."""
        parts = encode(message)
        for size in frames:
            self._outgoing.put(parts, [size])

    def put_control(self, control: bytes) -> None:
        """A frame that takes no time on a shaped link."""
        self._outgoing.put(iter([control]))

    def close(self) -> None:
        """Nothing more goes out than what is inside."""
        self._outgoing.close()

    def frames(self) -> Iterator[bytes]:
        """What goes out, when it is due.

        An item in the queue stands for the next frame of a message's iterator, so that tensors become bytes
        here, in gRPC's thread, and no earlier than they must.
        """
        with suppress(LinkClosed):
            while True:
                yield next(self._outgoing.get())

    def stop(self, cause: str) -> None:
        """Nothing more goes out."""
        self._outgoing.abort(cause)

    def hang_up_after(self, grace: float) -> None:
        """Break the stream if it is not over by then."""
        timer = threading.Timer(grace, self.hang_up)
        timer.daemon = True
        timer.start()
