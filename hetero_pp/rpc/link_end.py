"""One end of a stage link over the network, which continues on a new stream when its stream breaks.

Each direction of a stream carries a LinkHello, by which each end checks the other, and then

    frames of messages (see framing) ... | END
    ACK, between two messages: the number of messages that have arrived whole

Messages are numbered over all streams of a link, and an END counts as one. Messages that the other end has not
acknowledged are kept, and sent again on the next stream. An end is done once its END and its peer's END have arrived.
"""

from __future__ import annotations

import hmac
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from hetero_pp.config.lines import Direction, LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed, MalformedMessage, PeerAtFault
from hetero_pp.link.framing import MOST_TOGETHER, BufferPool, Decoder, Pieces, encode
from hetero_pp.link.protocol import (
    ACKNOWLEDGED_EVERY,
    END_CLOSED,
    FRAME_BYTES,
    PEER_CLOSED,
    PREFIX_BYTES,
    Ledger,
    Message,
    sealed,
    wire_bytes,
    wire_frames,
)
from hetero_pp.link.shaping import Lines, ShapedQueue, StreamQueue, busy_seconds
from hetero_pp.messages.messages_pb2 import LinkHello
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import shown_by
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.limits import CLOSE_SECONDS, HELLO_BYTES_MAX, STOP_SECONDS

# Received bytes after which they are acknowledged, or ACKNOWLEDGED_EVERY messages. Not each message, because an
# acknowledgement costs both ends time.
HELD_BYTES = 4 << 20
COUNT_BYTES = 2
"""Number of low bytes of a count that an ACK has. The peer is never behind by more than they can express."""

OnRefusal = Callable[[str, str, Kind], None]  # receives every refusal: (sender, reason, kind)

_TOKEN, _END, _ACK = "token", b"\x04", b"\x06"


class Complaint(NamedTuple):
    """Reason to refuse the other end of a link."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class LinkSide:
    """A member's side of a link, for all its ends: there is one in each generation of the group."""

    spec: LinkSpec
    credentials: Credentials
    member: str
    seed: int
    lines: Lines = field(default_factory=Lines)  # the member's access lines, which all its links share
    patience: float = 0.0
    """Seconds for which a link without a stream waits for another one; then the neighbour counts as gone."""
    ledger: Ledger = field(default_factory=Ledger)  # bytes sent to the neighbour
    on_refusal: OnRefusal = lambda sender, reason, kind: None

    @property
    def sends(self) -> Direction:
        """Direction in which the member sends."""
        return "backward" if self.member == self.spec.target else "forward"

    @property
    def peer(self) -> str:
        """The neighbour."""
        return self.spec.target if self.sends == "forward" else self.spec.source

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call to the neighbour: the link's token, unless a certificate proves the caller."""
        return ((_TOKEN, self.credentials.token),) if self.credentials.identity is None else ()

    def holder_of(self, context: grpc.ServicerContext) -> int | None:
        """Return the holder number that a call of the neighbour shows, 0 without a ticket; None for other callers."""
        if self.credentials.identity is not None:
            found = shown_by(context)
            return found.holder if found is not None and found.name == self.peer else None
        metadata = context.invocation_metadata()
        is_shown = any(key == _TOKEN and self._is_token(value) for key, value in metadata if isinstance(value, str))
        return 0 if is_shown else None

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.credentials.token.encode())

    def hello(self, generation: int, end: GrpcLinkEnd, stream: int, received: int, goes_on: bool) -> LinkHello:
        """Return this member's hello for a stream, after `received` messages of the link."""
        return LinkHello(
            version=PROTOCOL_VERSION,
            token=self.credentials.token,
            link=self.spec.name,
            sender=self.member,
            generation=generation,
            session=end.session,
            stream=stream,
            received=received,
            goes_on=goes_on,
        )

    def read(self, frame: bytes) -> tuple[LinkHello, Complaint | None]:
        """Parse a hello; return it, and the reason to refuse its sender (see `judge`)."""
        if len(frame) > HELLO_BYTES_MAX:
            reason = f"found a hello of {len(frame)} bytes, expected at most {HELLO_BYTES_MAX}"
            return LinkHello(), Complaint(Kind.STRANGER, reason)
        try:
            hello = LinkHello.FromString(frame)
        except DecodeError:
            return LinkHello(), Complaint(Kind.STRANGER, f"found {len(frame)} bytes that are no hello")
        return hello, self.judge(hello)

    def judge(self, hello: LinkHello) -> Complaint | None:
        """Return the reason to refuse the sender of a hello; None for the neighbour. Ignores the generation."""
        if not self._is_token(hello.token):
            return Complaint(Kind.STRANGER, "found another token than the link's")  # and is told no more
        for name, wanted in {"version": PROTOCOL_VERSION, "link": self.spec.name, "sender": self.peer}.items():
            if getattr(hello, name) != wanted:
                return Complaint(Kind.UNEXPECTED, f"found {name} {getattr(hello, name)}, expected {wanted}")
        return None


def after(seconds: float, call: Callable[[], object]) -> threading.Timer:
    """Call something after some seconds, unless the timer is cancelled; the process need not wait for it."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


class FramePart(NamedTuple):
    """The next frame of an iterator."""

    frames: Iterator[Pieces]
    size: int  # bytes of a frame that other messages may share; FRAME_BYTES if none may


class LinkStream:
    """One end of one gRPC stream. gRPC's threads take outgoing frames, and pass received ones to the link's end."""

    def __init__(self, outgoing: ShapedQueue[FramePart] | StreamQueue[FramePart], buffers: BufferPool) -> None:
        self.decoder = Decoder(buffers=buffers)
        self.hang_up: Callable[[], object] = lambda: None  # cancels the stream
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
                pieces, size, count, late = next(part.frames), part.size, 1, None
                while size < FRAME_BYTES and count < MOST_TOGETHER:
                    late = self._outgoing.poll()
                    if late is None or size + late.size > FRAME_BYTES:
                        break
                    pieces += next(late.frames)
                    size, count, late = size + late.size, count + 1, None
                yield b"".join(pieces)

    def stop(self, cause: str, grace: float | None = None) -> None:
        """Drop what is queued and end the stream; cancel it if it is not over after `grace` seconds."""
        self._outgoing.abort(cause)
        if grace is not None:
            after(grace, self.hang_up)


class GrpcLinkEnd:
    """One end of a link; implements LinkEnd. gRPC's threads send; one thread for each stream receives."""

    def __init__(self, side: LinkSide, session: bytes, on_refusal: OnRefusal) -> None:
        self.ledger, self.session = side.ledger, session
        self.over: str | None = None  # why the link is over
        self.failure: str | None = None  # why it was aborted here
        self.streams = 0  # number of attached streams
        self._accusation: PeerAtFault | None = None
        """Error that names the peer, if the peer sent what no honest stage sends."""
        self._side, self._on_refusal = side, on_refusal
        self._last_stream = 0
        self._at_over: Callable[[], None] = lambda: None
        opposite: Direction = "backward" if side.sends == "forward" else "forward"
        self._arrivals = side.lines.arriving(side.spec, opposite, side.seed) if side.spec.has_lines else None
        self._incoming: ShapedQueue[Message] = ShapedQueue(LinkShape())
        self._buffers = BufferPool()
        self._changed = threading.Condition()
        self._stream: LinkStream | None = None
        self._timer: threading.Timer | None = None
        self._outbox: deque[tuple[Message, list[int]] | None] = deque()
        """Unacknowledged messages, and the wire bytes of their frames; None stands for END."""
        self._arrived = self._received = self._told = self._untold_bytes = 0
        """Messages that the peer has, that have arrived here, and that this end has acknowledged; bytes since then."""
        self._has_ended = self._peer_closed = self._is_delivered = False

    # ---- LinkEnd ----

    def send(self, message: Message) -> None:
        message = sealed(message)
        frames = wire_frames(message)
        with self._changed:
            if self._accusation is not None:
                raise self._accusation
            if self.over is not None or self._has_ended:
                raise LinkClosed(self.over or END_CLOSED)
            self._outbox.append((message, frames))
            if self._stream is not None:
                self._stream.put(message, frames)
        wire = sum(frames)
        busy = busy_seconds(self._side.spec.shape(self._side.sends), wire)
        self.ledger.add(message.header.round, message.payload_bytes, wire, busy)

    def receive(self, timeout: float | None = None) -> Message:
        try:
            return self._incoming.get(timeout)
        except LinkClosed:
            if self._accusation is not None:
                raise self._accusation from None
            raise

    def recycle(self, message: Message) -> None:
        self._buffers.recycle(message)

    @property
    def unacknowledged(self) -> int:
        with self._changed:
            return len(self._outbox)

    def accuse(self, reason: str) -> PeerAtFault:
        cause = f"malformed data from {self._side.peer}: {reason}"
        self._accusation = accusation = self._accusation or PeerAtFault(self._side.peer, cause)
        self._on_refusal(self._side.peer, cause, Kind.MALFORMED)
        self.abort(cause)
        return accusation

    def close(self) -> None:
        def has_peer_left() -> bool:
            """Return whether only this end's END has not arrived, and cannot: a closed peer does not wait for it."""
            return self._stream is None and self._has_ended and self._peer_closed and len(self._outbox) <= 1

        with self._changed:
            if self.over is None and not self._has_ended:
                self._has_ended = True
                self._outbox.append(None)
                if self._stream is not None:
                    self._tell(self._stream)
                    self._put_end(self._stream)
            self._changed.wait_for(lambda: self._is_delivered or has_peer_left(), CLOSE_SECONDS)
            if has_peer_left():
                self.lost(PEER_CLOSED)

    def abort(self, cause: str) -> None:
        self.failure = self.failure or cause
        self._incoming.abort(cause)
        self.lost(cause)

    # ---- streams ----

    @property
    def is_connected(self) -> bool:
        """Whether a stream is attached."""
        with self._changed:
            return self._stream is not None

    @property
    def received(self) -> int:
        """Number of messages that have arrived whole."""
        with self._changed:
            return self._received

    def new_stream(self) -> LinkStream:
        """Return a stream that sends nothing before it is attached."""
        side = self._side
        return LinkStream(side.lines.leaving(side.spec, side.sends, side.seed), self._buffers)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call this once the link is over for any reason; at once if it is already."""
        with self._changed:
            self._at_over = call
            is_over = self.over is not None
        if is_over:
            call()

    def attach(self, stream: LinkStream, number: int, arrived: int) -> int:
        """Continue on stream `number`; the peer has received `arrived` messages so far.

        Returns the number that this end has received. Raises LinkClosed if the link is over or at a later stream,
        MalformedMessage if there cannot be so many.
        """
        with self._changed:
            if self.over is not None:
                raise LinkClosed(self.over)
            if number < self._last_stream:
                raise LinkClosed(f"found stream {number}, expected at least {self._last_stream}")
            self._last_stream = number
            self._have_arrived(arrived)
            before, self._stream = self._stream, stream
            self.streams += 1
            if self._timer is not None:
                self._timer.cancel()
            self._told, self._untold_bytes = self._received, 0
            for sent in self._outbox:
                if sent is not None:
                    stream.put(*sent)
            if self._has_ended:
                self._put_end(stream)
            self._changed.notify_all()
            received = self._received
        if before is not None:
            before.stop("another stream has replaced this one")
            before.hang_up()
        return received

    def cut(self, stream: LinkStream, cause: str) -> None:
        """Note that a stream is broken: wait for another one, unless everything has arrived on both sides."""
        with self._changed:
            if stream is self._stream:
                self._stream = None
                if self._has_ended and self._peer_closed and not self._outbox:
                    self.lost(PEER_CLOSED)
                    after(STOP_SECONDS, stream.hang_up)  # not stopped: the last acknowledgement still has to leave
                    return
                if (patience := self._side.patience) > 0:

                    def give_up() -> None:
                        with self._changed:
                            if self._stream is None:
                                self.lost(f"{cause}, for {patience:g} s")

                    self._timer = after(patience, give_up)
                else:
                    self.lost(PEER_CLOSED if self._peer_closed else cause)
            self._changed.notify_all()
        stream.stop(cause, STOP_SECONDS)

    def lost(self, cause: str) -> None:
        """End the link; what the peer sent before it closed can still be received."""
        with self._changed:
            is_first, self.over = self.over is None, self.over or cause
            at_over = self._at_over
            stream, self._stream = self._stream, None
            if self._timer is not None:
                self._timer.cancel()
            if not self._peer_closed:
                self._incoming.abort(cause)
            self._outbox.clear()
            self._is_delivered = True
            self._changed.notify_all()
        if stream is not None:
            stream.stop(cause, STOP_SECONDS)
        if is_first:
            at_over()

    def wait_until_delivered(self, stream: LinkStream) -> str | None:
        """Wait until the peer has everything, or this stream is replaced; return why this end failed, if it did."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_delivered or self._stream is not stream)
            return self.failure

    def read(self, stream: LinkStream, frames: Iterator[bytes]) -> None:
        """Receive until the stream is broken or over."""
        try:
            for frame in frames:
                self._take(stream, frame)
            self.cut(stream, "the peer closed the stream")
        except MalformedMessage as error:
            self.accuse(str(error))
        except LinkClosed as error:
            self.lost(str(error))
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                self.cut(stream, "the peer closed the stream")
            elif error.code() is not grpc.StatusCode.ABORTED:
                self.cut(stream, f"the peer disconnected ({error.details()})")
            else:
                with self._changed:
                    is_present = stream is self._stream
                if is_present:  # the peer has aborted the link, which no other stream repairs
                    self.lost(f"the peer aborted: {error.details()}")

    # ---- what comes ----

    def _take(self, stream: LinkStream, frame: bytes) -> None:
        if stream.decoder.between_messages and 0 < len(frame) < PREFIX_BYTES:
            self._take_control(stream, frame)
            return
        if stream is not self._stream:
            return
        due = None if self._arrivals is None else self._arrivals.come(wire_bytes([len(frame)]))
        if not (messages := stream.decoder.feed(frame)):
            return
        with self._changed:
            if stream is not self._stream:
                return  # it comes again on the stream that has taken this one's place
            if self._peer_closed:
                raise MalformedMessage("found a message after the end")
            self._incoming.put_due(messages, due)
            for message in messages:
                self._received += 1
                self._untold_bytes += message.payload_bytes
                if self._received - self._told >= ACKNOWLEDGED_EVERY or self._untold_bytes >= HELD_BYTES:
                    self._tell(stream)

    def _take_control(self, stream: LinkStream, frame: bytes) -> None:
        with self._changed:
            if stream is not self._stream:
                return
            if frame == _END and not self._peer_closed:
                self._peer_closed = True
                self._received += 1
                self._incoming.close()
                self._tell(stream)
                if self._has_ended:
                    stream.close()
            elif frame[:1] == _ACK and len(frame) == 1 + COUNT_BYTES:
                low = int.from_bytes(frame[1:], "little")
                self._have_arrived(self._arrived + (low - self._arrived) % (1 << 8 * COUNT_BYTES))
                self._is_delivered = self._has_ended and not self._outbox
                self._changed.notify_all()
            else:
                raise MalformedMessage(f"found the control byte {frame!r} in the wrong state")

    def _have_arrived(self, count: int) -> None:
        """Forget messages that the peer has: `count` since the link began."""
        most = self._arrived + len(self._outbox)
        if not self._arrived <= count <= most:
            raise MalformedMessage(f"found {count} messages that have arrived, expected {self._arrived} to {most}")
        for _ in range(count - self._arrived):
            self._outbox.popleft()
        self._arrived = count

    def _tell(self, stream: LinkStream) -> None:
        """Acknowledge the messages that have arrived whole."""
        self._told, self._untold_bytes = self._received, 0
        stream.put_control(_ACK + (self._received % (1 << 8 * COUNT_BYTES)).to_bytes(COUNT_BYTES, "little"))

    def _put_end(self, stream: LinkStream) -> None:
        """Send END, unless the peer has it; it is the last frame if the peer's END is here."""
        if self._outbox:
            stream.put_control(_END)
        self._is_delivered = not self._outbox
        if self._peer_closed:
            stream.close()
