"""The link between two stages over the network: one bidirectional gRPC stream of raw frames.

The downstream stage serves, its upstream neighbour dials. In each direction go

    LinkHello | frames of messages (see framing) ... | END
    ACK, between two messages, once the other direction's END is here

An end that has said END and ACK is done. A stream that breaks before is a dead peer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import grpc
from google.protobuf.message import DecodeError

from hetero_pp.errors import LinkClosed, LinkTimeout, MalformedMessage, Refused
from hetero_pp.link.ledger import Ledger, wire_bytes
from hetero_pp.link.protocol import END_CLOSED, PEER_CLOSED, Message, sealed, wire_frames
from hetero_pp.link.shaping import ShapedQueue, busy_seconds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.link.turns import StreamQueue
from hetero_pp.links import Direction, LinkShape, LinkSpec
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, LinkHello
from hetero_pp.messages.messages_pb2_grpc import StageLinkServicer
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel, make_server
from hetero_pp.rpc.framing import Decoder, encode
from hetero_pp.rpc.services import call_path, service_handler

SERVICE = DESCRIPTOR.services_by_name["StageLink"]
HELLO_SECONDS = 10.0
CLOSE_SECONDS = 5.0
STOP_SECONDS = 1.0
"""How long a link that has ended here may take to tell its peer why, once the server stops."""

OnRefusal = Callable[[str, str], None]
"""Told of every refusal: (sender, reason)."""

_END = b"\x04"
_ACK = b"\x06"
_CONTROL_BYTES = 1
_WORKERS = 4
"""Of a server: one for the link, the others to refuse strangers."""
_MAX_HELLO_BYTES = 4096


def open_stage_link(
    address: str,
    spec: LinkSpec,
    run: str,
    member: str,
    seed: int,
    timeout: float,
    on_refusal: OnRefusal | None = None,
    lines: Lines | None = None,
) -> GrpcLinkEnd:
    """Dial the downstream neighbour, which may not be listening yet; the end returned sends forward.

    Raises LinkTimeout if nobody answers within `timeout` seconds, Refused if the two do not belong together.
    """
    with ExitStack() as undo:
        channel = make_channel(address)
        undo.callback(channel.close)
        end = GrpcLinkEnd(spec, "forward", seed, on_refusal, lines)
        undo.callback(end.abort, f"could not connect to {address}")
        stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(SERVICE, "Open"))
        call = stream(itertools.chain([_hello(run, spec.name, member)], end.frames()), wait_for_ready=True)
        try:
            hello = _first(call, timeout, call.cancel)
        except grpc.RpcError as error:
            raise _open_error(error, address, timeout) from error
        _, reason = _judge(hello, run, spec.name, spec.target)
        if reason is not None:
            raise Refused(f"the listener at {address} is not the other end of {spec.name}: {reason}")
        end.start(call, call.cancel, channel.close)
        undo.pop_all()
        return end


def _open_error(error: grpc.RpcError, address: str, timeout: float) -> Exception:
    """Why a stream could not be opened."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.CANCELLED:
        return LinkTimeout(f"{address} did not answer within {timeout:g} s")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Refused(f"{address} refused: {details}")
    return LinkClosed(f"{address} closed the link: {details}")


class StageLinkServer(StageLinkServicer):
    """Waits for the upstream neighbour of one stage: takes it once, and refuses everybody else.

    Whoever has it `listen` must `close` it, or the process cannot end.
    """

    def __init__(
        self,
        spec: LinkSpec,
        run: str,
        member: str,
        seed: int,
        on_refusal: OnRefusal | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.refusals = 0
        self._spec, self._run, self._member, self._seed = spec, run, member, seed
        self._on_refusal, self._lines = on_refusal, lines
        self._lock = threading.Lock()
        self._taken = False
        self._accepted: ShapedQueue[GrpcLinkEnd] = ShapedQueue(LinkShape())
        self._server: grpc.Server | None = None

    def listen(self, address: str) -> int:
        """Listen on HOST:PORT; returns the port (PORT 0 takes any free one). OSError if it cannot be had."""
        handler = service_handler(SERVICE, self, _anybody)
        self._server, port = make_server(address, [handler], _WORKERS)
        return port

    def close(self, grace: float = STOP_SECONDS) -> None:
        """Listen no more. To be called when the link is closed or aborted: after `grace` seconds it is cut."""
        if self._server is not None:
            self._server.stop(grace).wait()

    def accept(self, timeout: float | None = None) -> GrpcLinkEnd:
        """The end that sends backward, once the neighbour is here. LinkTimeout after `timeout` seconds."""
        try:
            return self._accepted.get(timeout)
        except LinkTimeout:
            raise LinkTimeout(f"{self._spec.source} did not connect within {timeout:g} s") from None

    def Open(  # type: ignore[override]  # a Frame is raw bytes
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        first = _first(requests, HELLO_SECONDS, context.cancel)
        sender, reason = _judge(first, self._run, self._spec.name, self._spec.source)
        with self._lock:
            if reason is None and self._taken:
                reason = f"{sender} is already connected"
            self._taken = self._taken or reason is None
        if reason is not None:
            self._refuse(sender, reason)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        yield _hello(self._run, self._spec.name, self._member)
        end = GrpcLinkEnd(self._spec, "backward", self._seed, self._refuse, self._lines)
        end.start(requests)
        if not context.add_callback(end.lost):
            end.lost()
        self._accepted.put(end)
        yield from end.frames()
        failure = end.wait_until_delivered()
        if failure is not None and context.is_active():
            context.abort(grpc.StatusCode.ABORTED, failure)

    def _refuse(self, sender: str, reason: str) -> None:
        with self._lock:
            self.refusals += 1
        if self._on_refusal is not None:
            self._on_refusal(sender, reason)


class GrpcLinkEnd:
    """One end; implements LinkEnd. gRPC's threads send, one thread of its own receives."""

    def __init__(
        self, spec: LinkSpec, direction: Direction, seed: int, on_refusal: OnRefusal | None, lines: Lines | None
    ) -> None:
        """Sends in `direction`. `lines`: those of the member at this end, which all its links share."""
        lines = lines or Lines()
        opposite: Direction = "backward" if direction == "forward" else "forward"
        self.ledger = Ledger()
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
        self._failure: str | None = None
        self._hang_up: Callable[[], object] = lambda: None

    def start(
        self,
        frames: Iterator[bytes],
        hang_up: Callable[[], object] = lambda: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to receive. `hang_up` breaks the stream, `at_end` is called when it is over."""
        self._hang_up = hang_up
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
        self._failure = self._failure or cause
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
        return self._failure

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


def _anybody(context: grpc.ServicerContext) -> None:
    """Lets everybody open a stream: who they are is in its first frame."""


def _hello(run: str, link: str, sender: str) -> bytes:
    return LinkHello(version=PROTOCOL_VERSION, run=run, link=link, sender=sender).SerializeToString()


def _first(frames: Iterator[bytes], timeout: float, cancel: Callable[[], object]) -> bytes:
    """The first frame of a stream, which is cancelled if that does not come in time (grpc.RpcError)."""
    timer = threading.Timer(timeout, cancel)
    timer.daemon = True
    timer.start()
    try:
        return next(frames, b"")
    finally:
        timer.cancel()


def _judge(frame: bytes, run: str, link: str, sender: str) -> tuple[str, str | None]:
    """Who says hello, and why not to talk to them (None: they are who we wait for)."""
    if len(frame) > _MAX_HELLO_BYTES:
        return "", f"found a hello of {len(frame)} bytes, expected at most {_MAX_HELLO_BYTES}"
    try:
        hello = LinkHello.FromString(frame)
    except DecodeError:
        return "", f"found {len(frame)} bytes that are no hello"
    wanted = {"version": PROTOCOL_VERSION, "link": link, "sender": sender}
    for name, value in wanted.items():
        if getattr(hello, name) != value:
            return hello.sender, f"found {name} {getattr(hello, name)}, expected {value}"
    if hello.run != run:  # the run's identifier is what a stranger does not know, so it is not told
        return hello.sender, "found the identifier of another run"
    return hello.sender, None


def _cause(error: grpc.RpcError) -> str:
    """Why a stream broke: with the peer's own words if it gave some."""
    if not isinstance(error, grpc.Call):
        return "the peer hung up"
    if error.code() is grpc.StatusCode.ABORTED:
        return f"the peer aborted: {error.details()}"
    return f"the peer is gone ({error.details()})"
