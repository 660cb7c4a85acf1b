"""One end of one gRPC stream of a stage link: outgoing frames, and the message that is being received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.protocol import Message
from hetero_pp.link.shaping import ShapedQueue
from hetero_pp.link.turns import StreamQueue
from hetero_pp.rpc.framing import BufferPool, Decoder, encode

Outgoing = ShapedQueue[Iterator[bytes]] | StreamQueue[Iterator[bytes]]


class LinkStream:
    """Frames of one stream. gRPC's threads take outgoing ones, and pass received ones to the link's end."""

    def __init__(self, outgoing: Outgoing, buffers: BufferPool) -> None:
        self.decoder = Decoder(buffers=buffers)
        self.hang_up: Callable[[], object] = lambda: None
        """Cancels the stream."""
        self._outgoing = outgoing

    def put(self, message: Message, frames: Sequence[int]) -> None:
        """Queue a sealed message; `frames` are the wire bytes of its frames."""
        parts = encode(message)
        for size in frames:
            self._outgoing.put(parts, [size])

    def put_control(self, control: bytes) -> None:
        """Queue a frame that takes no time on a shaped link."""
        self._outgoing.put(iter([control]))

    def close(self) -> None:
        """End the stream after what is queued."""
        self._outgoing.close()

    def frames(self) -> Iterator[bytes]:
        """Yield frames when they are due.

        An item in the queue stands for the next frame of a message's iterator, so that tensors become bytes in gRPC's
        thread, and no earlier than needed.
        """
        with suppress(LinkClosed):
            while True:
                yield next(self._outgoing.get())

    def stop(self, cause: str) -> None:
        """Drop what is queued, and end the stream."""
        self._outgoing.abort(cause)

    def hang_up_after(self, grace: float) -> None:
        """Cancel the stream if it is not over by then."""
        timer = threading.Timer(grace, self.hang_up)
        timer.daemon = True
        timer.start()
