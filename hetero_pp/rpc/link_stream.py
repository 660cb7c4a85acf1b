"""One end of one gRPC stream of a stage link: outgoing frames, and the message that is being received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.ledger import FRAME_BYTES, PREFIX_BYTES
from hetero_pp.link.protocol import Message
from hetero_pp.link.shaping import ShapedQueue
from hetero_pp.link.turns import StreamQueue
from hetero_pp.rpc.framing import MOST_TOGETHER, BufferPool, Decoder, Pieces, encode


class FramePart(NamedTuple):
    """The next frame of an iterator."""

    frames: Iterator[Pieces]
    size: int
    """Bytes of a frame that other messages may share; FRAME_BYTES if none may."""


Outgoing = ShapedQueue[FramePart] | StreamQueue[FramePart]


class LinkStream:
    """Frames of one stream. gRPC's threads take outgoing ones, and pass received ones to the link's end."""

    def __init__(self, outgoing: Outgoing, buffers: BufferPool) -> None:
        self.decoder = Decoder(buffers=buffers)
        self.hang_up: Callable[[], object] = lambda: None
        """Cancels the stream."""
        self._outgoing = outgoing

    def put(self, message: Message, frames: Sequence[int]) -> None:
        """Queue a sealed message; `frames` are the wire bytes of its frames."""
        is_whole = len(frames) == 1
        size = PREFIX_BYTES + message.header.ByteSize() + message.payload_bytes if is_whole else FRAME_BYTES
        part = FramePart(encode(message), size)
        for wire in frames:
            self._outgoing.put(part, [wire])

    def put_control(self, control: bytes) -> None:
        """Queue a frame that takes no time on a shaped link."""
        self._outgoing.put(FramePart(iter([[control]]), FRAME_BYTES))

    def close(self) -> None:
        """End the stream after what is queued."""
        self._outgoing.close()

    def frames(self) -> Iterator[bytes]:
        """Yield frames when they are due. Messages that are late share frames, because a frame costs gRPC much time.

        Tensors become bytes in gRPC's thread, and no earlier than needed.
        """
        late: FramePart | None = None
        with suppress(LinkClosed):
            while True:
                part = late or self._outgoing.get()
                pieces, size, count = next(part.frames), part.size, 1
                while (late := self._late(size, count)) is not None and size + late.size <= FRAME_BYTES:
                    pieces += next(late.frames)
                    size, count = size + late.size, count + 1
                yield b"".join(pieces)

    def _late(self, size: int, count: int) -> FramePart | None:
        """Return the next part if it is due, and a frame of this size and so many messages may have room for it."""
        return self._outgoing.poll() if size < FRAME_BYTES and count < MOST_TOGETHER else None

    def stop(self, cause: str) -> None:
        """Drop what is queued, and end the stream."""
        self._outgoing.abort(cause)

    def hang_up_after(self, grace: float) -> None:
        """Cancel the stream if it is not over by then."""
        timer = threading.Timer(grace, self.hang_up)
        timer.daemon = True
        timer.start()
