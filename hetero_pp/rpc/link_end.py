"""One end of a stage link over the network: frames of messages out and in, and how it ends.

In each direction go, behind a hello (see link_hello),

    frames of messages (see framing) ... | END
    ACK, between two messages, once the other direction's END is here

An end that has said END and ACK is done. A stream that breaks before is a dead peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc

from hetero_pp.errors import LinkClosed, MalformedMessage
from hetero_pp.link.ledger import Ledger, wire_bytes
from hetero_pp.link.protocol import END_CLOSED, PEER_CLOSED, Message, sealed, wire_frames
from hetero_pp.link.shaping import ShapedQueue, busy_seconds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.link.turns import StreamQueue
from hetero_pp.links import Direction, LinkShape, LinkSpec
from hetero_pp.rpc.framing import Decoder, encode

CLOSE_SECONDS = 5.0

OnRefusal = Callable[[str, str], None]
"""Told of every refusal: (sender, reason)."""

_END = b"\x04"
_ACK = b"\x06"
_CONTROL_BYTES = 1


class GrpcLinkEnd:
    """One end; implements LinkEnd. gRPC's threads send, one thread of its own receives."""

    def __init__(
        self,
        spec: LinkSpec,
        direction: Direction,
        seed: int,
        ledger: Ledger,
        lines: Lines,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """Sends in `direction`. `lines`: those of the member at this end, which all its links share."""
        opposite: Direction = "backward" if direction == "forward" else "forward"
        self.ledger = ledger
        self._name = spec.name
        self._peer = spec.target if direction == "forward" else spec.source
        self._shape = spec.shape(direction)
        self._on_refusal = on_refusal
        self._outgoing: ShapedQueue[Iterator[bytes]] | StreamQueue[Iterator[bytes]]
        self._outgoing = lines.leaving(spec, direction, seed)
        self._incoming: ShapedQueue[Message] = ShapedQueue(LinkShape())
        self._arrivals = lines.arriving(spec, opposite, seed) if spec.has_lines else None
        self._decoder = Decoder()
        self._lock = threading.Lock()
        self._said: set[bytes] = set()
        self._peer_closed = False
        self._delivered = threading.Event()
        self.failure: str | None = None
        """Why it was aborted here."""
        self._hang_up: Callable[[], object] = lambda: None

    def hang_up_by(self, hang_up: Callable[[], object]) -> None:
        """What breaks the stream, for `abort`; at once if this end was aborted before."""
        self._hang_up = hang_up
        if self.failure is not None:
            hang_up()

    def start(self, frames: Iterator[bytes], at_end: Callable[[], object] = lambda: None) -> None:
        """Begin to receive. `at_end` is called when the stream is over."""
        reader = threading.Thread(target=self._read, args=(frames, at_end), name=f"link-{self._name}", daemon=True)
        reader.start()

    def send(self, message: Message) -> None:
        message = sealed(message)
        parts = encode(message)
        sizes = wire_frames(message)
        with self._lock:
            if _END in self._said:
                raise LinkClosed(END_CLOSED)
            for size in sizes:
                self._outgoing.put(parts, [size])
        wire = sum(sizes)
        self.ledger.add(message.header.round, message.payload_bytes, wire, busy_seconds(self._shape, wire))

    def receive(self, timeout: float | None = None) -> Message:
        return self._incoming.get(timeout)

    def recycle(self, message: Message) -> None:
        self._decoder.recycle(message)

    def close(self) -> None:
        self._say(_END)
        self._delivered.wait(CLOSE_SECONDS)

    def abort(self, cause: str) -> None:
        self.failure = self.failure or cause
        self._incoming.abort(cause)
        self.lost(cause)
        self._hang_up()

    def lost(self, cause: str = "the peer hung up") -> None:
        """The stream is over; what a peer sent before it closed can still be received."""
        self._outgoing.abort(cause)
        if not self._peer_closed:
            self._incoming.abort(cause)
        self._delivered.set()

    def frames(self) -> Iterator[bytes]:
        """What goes out, when it is due.

        An item in the queue stands for the next frame of a message's iterator, so that tensors become bytes
        here, in gRPC's thread, and no earlier than they must.
        """
        with suppress(LinkClosed):
            while True:
                yield next(self._outgoing.get())

    def wait_until_delivered(self) -> str | None:
        """Wait until the peer has everything or never will; returns why this end failed, if it did."""
        self._delivered.wait()
        return self.failure

    def _say(self, control: bytes) -> None:
        """Queue END or ACK behind the messages, once; after both nothing more goes out."""
        with self._lock, suppress(LinkClosed):
            if control in self._said:
                return
            self._said.add(control)
            self._outgoing.put(iter([control]))
            if len(self._said) == 2:
                self._outgoing.close()

    def _read(self, frames: Iterator[bytes], at_end: Callable[[], object]) -> None:
        """Receive until the stream is over."""
        try:
            for frame in frames:
                self._take(frame)
            self.lost(PEER_CLOSED if self._peer_closed else "the peer hung up")
        except MalformedMessage as error:
            reason = f"malformed data from {self._peer}: {error}"
            if self._on_refusal is not None:
                self._on_refusal(self._peer, reason)
            self.abort(reason)
        except LinkClosed as error:
            self.lost(str(error))
        except grpc.RpcError as error:
            self.lost(_cause(error))
        finally:
            at_end()

    def _take(self, frame: bytes) -> None:
        """One frame from the peer."""
        if self._decoder.between_messages and len(frame) == _CONTROL_BYTES:
            self._take_control(frame)
            return
        if self._peer_closed:
            raise MalformedMessage("found a message after the end")
        due = None if self._arrivals is None else self._arrivals.come(wire_bytes([len(frame)]))
        if (message := self._decoder.feed(frame)) is not None:
            self._incoming.put_due(message, due)

    def _take_control(self, frame: bytes) -> None:
        if frame == _END:
            self._peer_closed = True
            self._incoming.close()
            self._say(_ACK)
        elif frame == _ACK and _END in self._said:
            self._delivered.set()
        else:
            raise MalformedMessage(f"found the control byte {frame!r} where it has no meaning")


def _cause(error: grpc.RpcError) -> str:
    """Why a stream broke: with the peer's own words if it gave some."""
    if not isinstance(error, grpc.Call):
        return "the peer hung up"
    if error.code() is grpc.StatusCode.ABORTED:
        return f"the peer aborted: {error.details()}"
    return f"the peer is gone ({error.details()})"
