"""Links between two stages over the network: bidirectional gRPC streams of raw frames (see link_end).

One stage serves and the other dials: the stage before, unless only that one can be dialled. A stage has one link to
each neighbour in each generation of its group. A link outlives its stream: the stage that dialled dials again, and both
ends continue.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

import grpc

from hetero_pp.config.links import RELAYED, LinkSpec, is_loopback
from hetero_pp.core.errors import Forbidden, HeteroPPError, LinkClosed, LinkTimeout, MalformedMessage, Refused
from hetero_pp.core.proxies import route_to
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, LinkFarewell, LinkHello, LinkLeft
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.channels import make_channel, make_server
from hetero_pp.rpc.identities import Credentials, holder_name
from hetero_pp.rpc.limits import TEXT_BYTES_MAX, plain
from hetero_pp.rpc.link_end import (
    HELLO_BYTES_MAX,
    STOP_SECONDS,
    Complaint,
    GrpcLinkEnd,
    Introduction,
    LinkSide,
    LinkStream,
    OnRefusal,
    first_frame,
)
from hetero_pp.rpc.relayed import RelayedDialler, RelayedListener
from hetero_pp.rpc.services import IncomingFrames, calls_of, service_handler
from hetero_pp.store.faults import Faults


class Generations:
    """The newest link to one neighbour. A link may arrive before this member reaches its generation, and then waits.

    Safe to use from several threads.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._changed = threading.Condition()
        self._generation = 0
        """Current generation. Links of earlier generations are ended."""
        self._cause = ""
        self._end: GrpcLinkEnd | None = None
        """Link of the current generation, once it has arrived."""
        self._is_taken = False

    def come(
        self,
        generation: int,
        make: Callable[[], GrpcLinkEnd],
        is_same: Callable[[GrpcLinkEnd], bool] = lambda end: False,
    ) -> GrpcLinkEnd:
        """Register a link of a generation, made by `make`, and abort a link of an earlier generation.

        If the generation already has a link, returns it if `is_same`. A disconnected one is aborted, because the
        neighbour has restarted. Raises LinkClosed if the generation has ended, Refused if the neighbour is already
        connected.
        """
        with self._changed:
            if generation < self._generation:
                raise LinkClosed(f"found generation {generation}, expected at least {self._generation}")
            present = self._end if generation == self._generation else None
            if present is not None and is_same(present):
                return present
            if present is not None and present.is_connected:
                raise Refused(f"{self.peer} is already connected")
            cause = (
                f"{self.peer} has restarted" if present is not None else f"{self.peer} is at generation {generation}"
            )
            older = self._replace(generation, cause)
            self._end = end = make()
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)
        return end

    def of(self, generation: int) -> GrpcLinkEnd | None:
        """Return the link of this generation if it has arrived, otherwise None."""
        with self._changed:
            return self._end if generation == self._generation else None

    def take(self, generation: int, timeout: float | None = None) -> GrpcLinkEnd:
        """Wait for the link of this generation and return it.

        Ends earlier links, and a link of this generation that was already taken. Raises LinkClosed if this generation
        has ended, LinkTimeout after `timeout` seconds.
        """
        self.drop(generation, f"this member is at generation {generation}")
        with self._changed:
            if not self._changed.wait_for(lambda: self._generation > generation or self._end is not None, timeout):
                raise LinkTimeout(f"{self.peer} did not connect within {timeout:g} s")
            if self._generation > generation or self._end is None:
                raise LinkClosed(self._cause)
            self._is_taken = True
            return self._end

    def drop(self, generation: int, cause: str) -> None:
        """End links of earlier generations, and a link of this generation that was taken."""
        self._end_before(generation, cause, also_taken=True)

    def give_up(self, before: int, cause: str) -> None:
        """End links of generations before `before`. Their users, and callers waiting for one, get LinkClosed(cause)."""
        self._end_before(before, cause)

    def _end_before(self, generation: int, cause: str, also_taken: bool = False) -> None:
        with self._changed:
            is_over = generation > self._generation or (
                also_taken and generation == self._generation and self._is_taken
            )
            older = self._replace(generation, cause) if is_over else None
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def _replace(self, generation: int, cause: str) -> GrpcLinkEnd | None:
        """Make room for a link of this generation, and return the link that it replaces."""
        self._generation, self._cause = generation, cause
        older, self._end, self._is_taken = self._end, None, False
        return older


SERVICE = DESCRIPTOR.services_by_name["StageLink"]
PART_SECONDS = 0.5
"""Seconds that a listener may take to learn that a link is over."""
AGAIN_SECONDS = 0.1
"""Pause in seconds between two attempts if a listener breaks the stream at once."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Status codes of streams that end because their connection was cut."""


class Dialling:
    """One link to the listener at an address, over consecutive streams."""

    def __init__(
        self, address: str, end: GrpcLinkEnd, introduction: Introduction, generation: int, holder: int | None = None
    ) -> None:
        """`holder`: holder number of the neighbour, as in StageLinkDialer.dial."""
        self._address, self._end, self._introduction, self._generation = address, end, introduction, generation
        self._route = route_to(address)
        peer = introduction.peer if holder is None else holder_name(introduction.peer, holder)
        self._channel = make_channel(address, introduction.credentials.identity, peer, self._route)
        calls = calls_of(SERVICE, self._channel)
        self._open: grpc.StreamStreamMultiCallable[bytes, bytes] = calls["Open"]
        self._leave: grpc.UnaryUnaryMultiCallable[LinkFarewell, LinkLeft] = calls["Leave"]
        self._lock = threading.Lock()
        self._number = 0
        self._is_over = threading.Event()
        self._stream: LinkStream | None = None
        self._parting = threading.Thread(target=self._part, name="link-parting", daemon=True)
        end.when_over(self._end_all)

    def connect(self, timeout: float) -> None:
        """Connect within `timeout` seconds, and stay connected as long as the end is in use.

        Raises LinkTimeout if nobody answers, LinkClosed if the link is over or refused for its generation, PeerAtFault
        if the neighbour's hello is wrong, Refused if the neighbour refuses this member. The end then has to be aborted.
        """
        stream, frames = self._dial(time.monotonic() + timeout, timeout)
        follower = threading.Thread(target=self._follow, args=(stream, frames), name="link", daemon=True)
        follower.start()

    def wait_until_parted(self) -> None:
        """Wait until the listener knows that this end is over, for a bounded time."""
        if self._is_over.is_set():
            self._parting.join(PART_SECONDS)

    def _follow(self, stream: LinkStream, frames: Iterator[bytes]) -> None:
        """Receive, over as many streams as needed."""
        try:
            while True:
                self._end.read(stream, frames)
                if self._end.over is not None:
                    return
                stream, frames = self._dial(float("inf"), 0.0)
        except HeteroPPError as error:
            self._end.lost(str(error))

    def _dial(self, deadline: float, timeout: float) -> tuple[LinkStream, Iterator[bytes]]:
        """Return an attached stream and its received frames."""
        while True:
            answered = self._attempt(deadline, timeout)
            if answered is not None:
                return answered
            if time.monotonic() > deadline:
                raise LinkTimeout(f"{self._address} did not answer within {timeout:g} s{self._route.note}")
            self._is_over.wait(AGAIN_SECONDS)

    def _attempt(self, deadline: float, timeout: float) -> tuple[LinkStream, Iterator[bytes]] | None:
        """Return the same if the connection holds; None if it breaks before."""
        stream, call = self._call()
        try:
            left = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            hello, complaint = self._introduction.read(first_frame(call, max(left, 0.0), call.cancel))
            if complaint is not None:
                raise self._unwanted(complaint)
            self._end.attach(stream, self._number, hello.received)
            return stream, call
        except grpc.RpcError as error:
            stream.stop("could not connect")
            if self._end.over is not None:
                raise LinkClosed(self._end.over) from error
            if error.code() in _BROKEN:
                return None
            raise _why(error, self._address) from error
        except HeteroPPError as error:
            stream.stop("could not connect")
            call.cancel()
            if isinstance(error, MalformedMessage):
                raise self._end.accuse(str(error)) from error
            raise

    def _unwanted(self, complaint: Complaint) -> LinkClosed:
        """Return the error for a listener that says a wrong hello.

        The neighbour is accused, unless a process without a certificate may have taken over its address.
        """
        link, credentials = self._introduction.link, self._introduction.credentials
        reason = f"the listener at {self._address} is not the other end of {link}: {complaint.reason}"
        if complaint.kind is Kind.STRANGER and credentials.identity is None:
            return LinkClosed(reason)
        return self._end.accuse(reason)

    def _call(self) -> tuple[LinkStream, IncomingFrames]:
        """Begin a stream. Raises LinkClosed if the end is over."""
        with self._lock:
            if self._end.over is not None:
                raise LinkClosed(self._end.over)
            self._number += 1
            self._stream = stream = self._end.new_stream()
            requests = itertools.chain([self._hello().SerializeToString()], stream.frames())
            call = self._open(requests, metadata=self._introduction.metadata, wait_for_ready=True)
            stream.hang_up = call.cancel
            return stream, call

    def _hello(self) -> LinkHello:
        end = self._end
        return self._introduction.hello(self._generation, end.session, self._number, end.received, end.streams > 0)

    def _end_all(self) -> None:
        """Tell the listener that the end is over, unless it knows, and close the connection."""
        self._is_over.set()
        self._parting.start()

    def _part(self) -> None:
        if self._end.failure is not None and self._end.streams > 0:
            farewell = LinkFarewell(hello=self._hello(), cause=plain(self._end.failure))
            with suppress(grpc.RpcError):
                self._leave(farewell, metadata=self._introduction.metadata, timeout=PART_SECONDS)
        with self._lock:
            if self._stream is not None:
                self._stream.hang_up()
            self._channel.close()


def _why(error: grpc.RpcError, address: str) -> Exception:
    """Return why a listener refused a stream."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Refused(f"{address} refused: {details}")
    if code is grpc.StatusCode.ABORTED:
        return LinkClosed(f"the peer aborted: {details}")
    return LinkClosed(f"{address} refused: {details}")


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


CONNECT_TIMEOUT = 120.0
DIRECT_SECONDS = 10.0
"""Seconds for which a neighbour is dialled directly before the relay is used."""
CUT_OFF_SECONDS = 60.0
"""Seconds for which a link that is cut is dialled again, because the neighbour may live."""


class Neighbour:
    """A neighbour, with one link for each generation. In each generation another end may dial."""

    def __init__(
        self,
        spec: LinkSpec,
        credentials: Credentials,
        exchange: str,
        seed: int,
        lines: Lines,
        faults: Faults,
        on_refusal: OnRefusal,
    ) -> None:
        """`exchange`: HOST:PORT of the relay, if there is one."""
        own, patience = credentials.of_link(spec.name), CUT_OFF_SECONDS
        side = LinkSide(spec, own, credentials.name, seed, lines, patience, on_refusal=on_refusal)
        self.server = StageLinkServer(side)
        """Server that the neighbour dials, once it listens."""
        self.listens = ""
        """Address of this machine at which the server listens."""
        self._dialer = StageLinkDialer(side)
        self._spec, self._credentials, self._exchange, self._faults = spec, credentials, exchange, faults
        self._unreached = set[str]()
        self._to_relay: RelayedDialler | None = None
        self._from_relay: RelayedListener | None = None

    def dial(self, address: str, generation: int, holder: int | None = None) -> GrpcLinkEnd:
        """Dial the neighbour directly or through the relay. Arguments and errors as of StageLinkDialer.dial."""
        self.server.give_up(generation, f"this member is at generation {generation}")
        if self._from_relay is not None:  # two that wait to be found would find each other
            self._from_relay.close()
            self._from_relay = None
        if address != RELAYED and address not in self._unreached:
            is_relayed = self._may_be_relayed(address)
            routed = self._faults.route(self._spec.name, address)
            try:
                return self._dialer.dial(routed, generation, DIRECT_SECONDS if is_relayed else CONNECT_TIMEOUT, holder)
            except LinkTimeout as error:
                if not is_relayed:
                    raise
                self._unreached.add(address)
                print(f"{self._credentials.name}: {error}; connecting through the relay", file=sys.stderr, flush=True)
        if self._to_relay is None:
            self._to_relay = RelayedDialler(self._exchange, self._credentials, self._spec.name)
        return self._dialer.dial(self._to_relay.address, generation, CONNECT_TIMEOUT, holder)

    def be_found(self, generation: int) -> None:
        """Prepare for the neighbour, which is about to dial this member."""
        self._dialer.give_up(generation, f"this member is at generation {generation}")
        if self._to_relay is not None:
            self._to_relay.close()
            self._to_relay = None
        if self._from_relay is None and self._may_be_relayed(self.listens):
            self._from_relay = RelayedListener(self._exchange, self._credentials, self._spec.name, self.listens)

    def accept(self, generation: int) -> GrpcLinkEnd:
        """Wait for the neighbour. Raises as StageLinkServer.accept."""
        return self.server.accept(CONNECT_TIMEOUT, generation)

    def give_up(self, before: int, cause: str) -> None:
        """End the links of generations before this one."""
        self._dialer.give_up(before, cause)
        self.server.give_up(before, cause)

    def part(self) -> None:
        """Wait a bounded time until the neighbour knows that the link is over. Call it after the link has ended."""
        self._dialer.close()

    def close(self) -> None:
        """Relay nothing more."""
        for relayed in (self._to_relay, self._from_relay):
            if relayed is not None:
                relayed.close()

    def _may_be_relayed(self, address: str) -> bool:
        """Return whether an address may be out of reach: on another machine, in a run with a relay."""
        return self._credentials.identity is not None and not is_loopback(address)
