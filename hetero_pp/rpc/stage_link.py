"""Links between two stages over the network: bidirectional gRPC streams of raw frames (see link_end).

One stage serves and the other dials: the stage before, unless only that one can be dialled. A stage has one link to
each neighbour in each generation of its group. A link outlives its stream: the stage that dialled dials again, and both
ends continue.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import grpc

from hetero_pp.core.errors import Forbidden, LinkClosed, MalformedMessage, Refused
from hetero_pp.messages.messages_pb2 import LinkFarewell, LinkHello, LinkLeft
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.channels import make_server
from hetero_pp.rpc.dialling import SERVICE, Dialling
from hetero_pp.rpc.generations import Generations
from hetero_pp.rpc.link_end import STOP_SECONDS, GrpcLinkEnd, LinkSide
from hetero_pp.rpc.link_hello import HELLO_BYTES_MAX, Complaint, first_frame
from hetero_pp.rpc.link_stream import LinkStream
from hetero_pp.rpc.plain_text import TEXT_BYTES_MAX, plain
from hetero_pp.rpc.services import service_handler

HELLO_SECONDS = 10.0

_SESSION_BYTES = 8
_MOST_OPEN = 6
"""Open calls of the neighbour: a link, remains of former ones, and one to come."""
_HOLDERS = 2
"""Holders of the neighbour's slot that may call at once: a former one may, until the exchange names the next."""
_SPARE = 2
"""Threads of a server that refuse strangers."""


class ExpectedNeighbour(NamedTuple):
    """The neighbour that the exchange told this member of."""

    generation: int
    holder: int | None
    """Number of its ticket's holder; 0: no ticket; None: not known."""


NOBODY = ExpectedNeighbour(0, None)
"""Expectation before the first assignment: generations begin at 1."""


class StageLinkDialer:
    """Dials the stage after this one, or the one before if it sends backward; one link for each generation."""

    def __init__(self, side: LinkSide) -> None:
        self._side, self._generations = side, Generations(side.introduction.peer)
        self._dialling: Dialling | None = None

    def dial(self, address: str, generation: int, timeout: float, holder: int | None = None) -> GrpcLinkEnd:
        """Return this member's end of a new link; links of older generations, and one of this, are over.

        The neighbour may not be listening yet. With `holder`, only the neighbour with this holder number answers; with
        a certificate, no former holder does.

        Raises LinkTimeout if nobody answers within `timeout` seconds, LinkClosed if this generation is over, for the
        neighbour or here. Raises PeerAtFault if the neighbour's hello is wrong, Refused if it refuses this member.
        """
        self._generations.drop(generation, f"this member is at generation {generation}")
        self._generations.come(generation, self._make_end)
        end = self._generations.take(generation, 0.0)
        try:
            self._dialling = Dialling(address, end, self._side.introduction, generation, holder)
            self._dialling.connect(timeout)
        except BaseException:
            end.abort(f"could not connect to {address}")
            raise
        return end

    def give_up(self, before: int, cause: str) -> None:
        """End links of generations before this one, and one that is being dialled."""
        self._generations.give_up(before, cause)

    def close(self) -> None:
        """Wait a bounded time until the neighbour knows that the link is over. Call it after the link has ended."""
        if self._dialling is not None:
            self._dialling.wait_until_parted()

    def _make_end(self) -> GrpcLinkEnd:
        return GrpcLinkEnd(self._side, secrets.token_bytes(_SESSION_BYTES), self._side.on_refusal)


class StageLinkServer:
    """Serves the link to one neighbour, the stage before unless it sends forward, and refuses everybody else.

    The neighbour gets one link in each generation. One of a newer generation than this member's waits; the link in use
    is then over, as it is for the neighbour. A server that listens must be closed, or the process cannot end.
    """

    def __init__(self, side: LinkSide, expected: ExpectedNeighbour | None = NOBODY) -> None:
        """Create a server that accepts `expected` until `expect` is called; None: the neighbour in any generation."""
        self.refusals = 0
        self._side, self._introduction, self._expected = side, side.introduction, expected
        self._generations = Generations(self._introduction.peer)
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def listen(self, address: str, *others: StageLinkServer) -> int:
        """Listen on HOST:PORT, for the neighbours of other servers, too; return the port.

        PORT 0 takes any free one. Raises OSError if it is busy.
        """
        authenticator = _NeighbourAuthenticator([self, *others])
        threads = _SPARE + _HOLDERS * _MOST_OPEN * (1 + len(others))
        handler = service_handler(SERVICE, authenticator, authenticator, _MOST_OPEN)
        self._server, port = make_server(address, [handler], threads, self._introduction.credentials.identity)
        return port

    def close(self, grace: float = STOP_SECONDS) -> None:
        """Stop listening, and cut the link after `grace` seconds. Call it after the link has ended."""
        if self._server is not None:
            self._server.stop(grace).wait()

    def accept(self, timeout: float | None = None, generation: int = 0) -> GrpcLinkEnd:
        """Return this member's end, once the neighbour is here; links of older generations, and one of this, are over.

        Raises LinkTimeout after `timeout` seconds, LinkClosed if this generation is over, for the neighbour or here.
        """
        return self._generations.take(generation, timeout)

    def give_up(self, before: int, cause: str) -> None:
        """End links of generations before this one, and wake callers that wait for one."""
        self._generations.give_up(before, cause)

    def expect(self, generation: int, holder: int | None) -> None:
        """Accept no generation after this one, and in this one only the neighbour with this holder number (None: any).

        Both are what the exchange told.
        """
        self._expected = ExpectedNeighbour(generation, holder)

    def waits_for(self, context: grpc.ServicerContext) -> str | None:
        """Return the neighbour if a call is its own, with its holder number if it has one; else None."""
        holder = self._introduction.holder_of(context)
        if holder is None:
            return None
        return f"{self._introduction.peer} (holder {holder})" if holder else self._introduction.peer

    def require_current(self, context: grpc.ServicerContext) -> None:
        """Raise Forbidden for a former holder of the neighbour's slot, before anything of its call is read."""
        holder, expected = self._introduction.holder_of(context), self._expected
        if expected is not None and expected.holder is not None and holder is not None and holder < expected.holder:
            raise Forbidden(f"found holder {holder} of {self._introduction.peer}, expected {expected.holder}")

    def open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve the neighbour's call `Open`."""
        hello, complaint = self._introduction.read(first_frame(requests, HELLO_SECONDS, context.cancel))
        if complaint is not None and self._accuse(complaint, context):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, complaint.reason)
        if complaint is not None:
            self._turn_away(hello, complaint, context)
        self._require_expected(hello, context)
        end = self._admit(hello, context)
        stream = end.new_stream()
        stream.hang_up = context.cancel
        received = self._attach(end, stream, hello, context)
        name = f"link-{self._introduction.link}"
        threading.Thread(target=end.read, args=(stream, requests), name=name, daemon=True).start()
        answer = self._introduction.hello(hello.generation, hello.session, hello.stream, received, hello.goes_on)
        yield answer.SerializeToString()
        yield from stream.frames()
        failure = end.wait_until_delivered(stream)
        if failure is not None and context.is_active():
            context.abort(grpc.StatusCode.ABORTED, failure)

    def leave(self, request: LinkFarewell, context: grpc.ServicerContext) -> LinkLeft:
        """Serve the neighbour's call `Leave`."""
        complaint = self._introduction.judge(request.hello)
        if complaint is not None:
            self._turn_away(request.hello, complaint, context)
        end = self._generations.of(request.hello.generation)
        if end is not None and end.session == request.hello.session:
            end.lost(f"the peer aborted: {request.cause}")
        return LinkLeft()

    def _accuse(self, complaint: Complaint, context: grpc.ServicerContext) -> bool:
        """Fail the awaited link because of a wrong hello, and return whether it was failed.

        Its user then gets PeerAtFault, so that the exchange hears which member sent the hello. A link that is connected
        goes on. Only a certificate shows that the hello is of the present neighbour.
        """
        expected, holder = self._expected, self._introduction.holder_of(context)
        if self._introduction.credentials.identity is None or expected is None or holder != expected.holder:
            return False
        end = self._generations.of(expected.generation)
        if end is None:
            try:
                end = self._generations.come(expected.generation, lambda: self._make_end(b""))
            except LinkClosed:
                return False
        if end.is_connected:
            return False
        end.accuse(complaint.reason)
        return True

    def _require_expected(self, hello: LinkHello, context: grpc.ServicerContext) -> None:
        """End a call of a generation, or of a holder, that the exchange has not told this member of."""
        expected = self._expected
        if expected is None or hello.generation < expected.generation:
            return
        if hello.generation > expected.generation:  # the neighbour may have been told a moment ago: it dials again
            why = f"found generation {hello.generation}, expected {expected.generation}"
            context.abort(grpc.StatusCode.UNAVAILABLE, why)
        holder = self._introduction.holder_of(context)
        if expected.holder is not None and holder != expected.holder:
            reason = f"found holder {holder} of {self._introduction.peer}, expected {expected.holder}"
            self._turn_away(hello, Complaint(Kind.FORBIDDEN, reason), context)

    def _admit(self, hello: LinkHello, context: grpc.ServicerContext) -> GrpcLinkEnd:
        """Return this member's end of the link that a neighbour asks for, or end the call."""
        session, present = hello.session, self._generations.of(hello.generation)
        if hello.goes_on and (present is None or present.session != session):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "found a link to be continued, expected a new one")
        try:
            return self._generations.come(
                hello.generation, lambda: self._make_end(session), lambda end: session != b"" and end.session == session
            )
        except LinkClosed as error:  # no stranger, only late
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Refused as error:
            self._turn_away(hello, Complaint(Kind.UNEXPECTED, str(error)), context)

    def _attach(self, end: GrpcLinkEnd, stream: LinkStream, hello: LinkHello, context: grpc.ServicerContext) -> int:
        """Attach a stream; return the number of messages received so far, or end the call."""
        try:
            return end.attach(stream, hello.stream, hello.received)
        except LinkClosed as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except MalformedMessage as error:
            self._turn_away(hello, Complaint(Kind.MALFORMED, str(error)), context)

    def _turn_away(self, hello: LinkHello, complaint: Complaint, context: grpc.ServicerContext) -> NoReturn:
        """Count a refusal, and end the call."""
        is_shown = self._introduction.credentials.identity is not None
        sender = self._introduction.peer if is_shown else plain(hello.sender)
        self.refuse(sender, complaint.reason, complaint.kind)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, complaint.reason)

    def _make_end(self, session: bytes) -> GrpcLinkEnd:
        return GrpcLinkEnd(self._side, session, self.refuse)

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a refusal."""
        with self._lock:
            self.refusals += 1
        if self._side.on_refusal is not None:
            self._side.on_refusal(sender, reason, kind)


class _NeighbourAuthenticator:
    """The server at one address for several neighbours: passes each call to the server of its caller."""

    def __init__(self, servers: Sequence[StageLinkServer]) -> None:
        self._servers = servers

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        server = self._of(context)
        caller = server.waits_for(context)
        if caller is None:
            reason = "found another token than the link's"
            self.refuse(context.peer(), reason, Kind.STRANGER)
            raise Refused(reason)
        try:
            server.require_current(context)
        except Forbidden as error:
            self.refuse(caller, str(error), Kind.FORBIDDEN)
            raise
        return caller

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        self._servers[0].refuse(sender, reason, kind)

    def request_bytes_max(self, call: str) -> int:
        return HELLO_BYTES_MAX + 2 * TEXT_BYTES_MAX

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        """Do nothing: what the neighbour sends on the link itself counts against it (`_accuse`)."""

    def Open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self._of(context).open(requests, context)

    def Leave(self, request: LinkFarewell, context: grpc.ServicerContext) -> LinkLeft:
        return self._of(context).leave(request, context)

    def _of(self, context: grpc.ServicerContext) -> StageLinkServer:
        """Return the server that waits for a call's caller; any server if none does."""
        return next((server for server in self._servers if server.waits_for(context) is not None), self._servers[0])
