"""Links between two stages over the network: bidirectional gRPC streams of raw frames (see link_end).

One stage serves and the other dials: the stage before, unless only that one can be dialled. Where neither can, both
dial the relay. A stage has one link to each neighbour in each generation of its group, and a new generation ends all
earlier ones. A link outlives its stream: the stage that dialled dials again, and both ends continue.
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

from hetero_pp.config.lines import RELAYED, is_loopback
from hetero_pp.core.errors import Forbidden, HeteroPPError, LinkClosed, LinkTimeout, MalformedMessage, Refused
from hetero_pp.core.proxies import route_to
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, LinkHello, Nothing
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.channels import make_channel, make_server
from hetero_pp.rpc.identities import Credentials, holder_name
from hetero_pp.rpc.limits import (
    AGAIN_SECONDS,
    CONNECT_TIMEOUT,
    DIRECT_SECONDS,
    HELLO_SECONDS,
    PART_SECONDS,
    TEXT_BYTES_MAX,
    plain,
)
from hetero_pp.rpc.link_end import (
    HELLO_BYTES_MAX,
    STOP_SECONDS,
    Complaint,
    GrpcLinkEnd,
    LinkSide,
    LinkStream,
    after,
)
from hetero_pp.rpc.relay import RelayedDialler, RelayedListener
from hetero_pp.rpc.services import IncomingFrames, calls_of, service_handler
from hetero_pp.store.faults import NO_FAULTS, Faults

SERVICE = DESCRIPTOR.services_by_name["StageLink"]


_SESSION_BYTES = 8
_MOST_OPEN = 6  # open calls of the neighbour: a link, remains of former ones, and one to come
_HOLDERS = 2
"""Holders of the neighbour's slot that may call at once: a former one may, until the exchange names the next."""
_SPARE = 2  # threads of a server that refuse strangers
_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Status codes of streams that end because their connection was cut."""


def _first_hello(
    side: LinkSide, frames: Iterator[bytes], timeout: float, cancel: Callable[[], object]
) -> tuple[LinkHello, Complaint | None]:
    """Read the first frame of a stream. If it does not come in time, cancel the stream, which raises RpcError."""
    timer = after(timeout, cancel)
    try:
        return side.read(next(frames, b""))
    finally:
        timer.cancel()


class ExpectedNeighbour(NamedTuple):
    """The neighbour that the exchange told this member of."""

    generation: int
    holder: int | None  # number of its ticket's holder; 0: no ticket; None: not known


NOBODY = ExpectedNeighbour(0, None)  # expectation before the first assignment: generations begin at 1


class StageLink:
    """A member's links to one neighbour, the newest generation of which is in use. Thread-safe.

    In each generation it dials the neighbour or is dialled. It refuses everybody else. A link of a newer generation
    than this member's waits until the member reaches it; the link in use is then over, as it is for the neighbour. One
    that listens must be closed, or the process cannot end.
    """

    def __init__(
        self,
        side: LinkSide,
        expected: ExpectedNeighbour | None = NOBODY,
        exchange: str = "",
        faults: Faults = NO_FAULTS,
    ) -> None:
        """`expected`: the neighbour that it accepts until `expect` is called; None: the neighbour in any generation.

        `exchange`: HOST:PORT of the relay, if there is one.
        """
        self.side = side
        self.refusals = 0
        self.listens = ""
        """Address of this machine at which it is served: by this object's server or that of the other neighbour."""
        self._expected, self._exchange, self._faults = expected, exchange, faults
        self._changed = threading.Condition()
        self._generation, self._cause = 0, ""  # current generation, and why the earlier ones are over
        self._end: GrpcLinkEnd | None = None  # link of the current generation, once it has arrived
        self._is_taken = False
        self._dialling: _Dialling | None = None
        self._server: grpc.Server | None = None
        self._unreached = set[str]()
        self._credentials = Credentials(side.member, identity=side.credentials.identity)  # those for the relay
        self._to_relay: RelayedDialler | None = None
        self._from_relay: RelayedListener | None = None

    def close(self, grace: float = STOP_SECONDS) -> None:
        """Stop listening and relaying, and cut the link after `grace` seconds. Call it after the link has ended."""
        if self._dialling is not None:
            self._dialling.wait_until_parted()
        if self._server is not None:
            self._server.stop(grace).wait()
        for relayed in (self._to_relay, self._from_relay):
            if relayed is not None:
                relayed.close()

    # ---- generations ----

    def come(
        self, generation: int, make: Callable[[], GrpcLinkEnd], is_same: Callable[[GrpcLinkEnd], bool] = lambda _: False
    ) -> GrpcLinkEnd:
        """Register a link of a generation, made by `make`, and abort a link of an earlier generation.

        If the generation already has a link, returns it if `is_same`. A disconnected one is aborted, because the
        neighbour has restarted. Raises LinkClosed if the generation has ended, Refused if the neighbour is already
        connected.
        """
        with self._changed:
            if generation < self._generation:
                raise LinkClosed(f"found generation {generation}, expected at least {self._generation}")
            present = self._of(generation)
            if present is not None and is_same(present):
                return present
            if present is not None and present.is_connected:
                raise Refused(f"{self.side.peer} is already connected")
            why = "has restarted" if present is not None else f"is at generation {generation}"
            cause = f"{self.side.peer} {why}"
            older = self._replace(generation, cause)
            self._end = end = make()
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)
        return end

    def accept(self, timeout: float | None = None, generation: int = 0) -> GrpcLinkEnd:
        """Return this member's end, once the neighbour is here; links of older generations, and one of this, are over.

        Raises LinkTimeout after `timeout` seconds, LinkClosed if this generation is over, for the neighbour or here.
        """
        self.give_up(generation, f"this member is at generation {generation}", also_taken=True)
        with self._changed:
            if not self._changed.wait_for(lambda: self._generation > generation or self._end is not None, timeout):
                raise LinkTimeout(f"{self.side.peer} did not connect within {timeout:g} s")
            if self._generation > generation or self._end is None:
                raise LinkClosed(self._cause)
            self._is_taken = True
            return self._end

    def give_up(self, before: int, cause: str, also_taken: bool = False) -> None:
        """End links of earlier generations. Their users, and callers waiting for one, get LinkClosed(cause).

        `also_taken`: end a link of generation `before`, too, if it was taken.
        """
        with self._changed:
            is_over = before > self._generation or (also_taken and before == self._generation and self._is_taken)
            older = self._replace(before, cause) if is_over else None
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def _of(self, generation: int) -> GrpcLinkEnd | None:
        """Return the link of this generation if it has arrived, otherwise None."""
        with self._changed:
            return self._end if generation == self._generation else None

    def _replace(self, generation: int, cause: str) -> GrpcLinkEnd | None:
        """Make room for a link of this generation, and return the link that it replaces."""
        self._generation, self._cause = generation, cause
        older, self._end, self._is_taken = self._end, None, False
        return older

    # ---- the neighbour is dialled ----

    def dial(self, address: str, generation: int, timeout: float, holder: int | None = None) -> GrpcLinkEnd:
        """Return this member's end of a new link; links of older generations, and one of this, are over.

        The neighbour may not be listening yet. With `holder`, only the neighbour with this holder number answers; with
        a certificate, no former holder does.

        Raises LinkTimeout if nobody answers within `timeout` seconds, LinkClosed if this generation is over, for the
        neighbour or here. Raises PeerAtFault if the neighbour's hello is wrong, Refused if it refuses this member.
        """
        self.give_up(generation, f"this member is at generation {generation}", also_taken=True)
        self.come(generation, lambda: self._make_end(secrets.token_bytes(_SESSION_BYTES)))
        end = self.accept(0.0, generation)
        try:
            self._dialling = _Dialling(address, end, self.side, generation, holder)
            self._dialling.connect(timeout)
        except BaseException:
            end.abort(f"could not connect to {address}")
            raise
        return end

    def reach(self, address: str, generation: int, holder: int | None = None) -> GrpcLinkEnd:
        """Dial the neighbour directly or through the relay. Arguments and errors as of `dial`."""
        if self._from_relay is not None:  # two that wait to be found would find each other
            self._from_relay.close()
            self._from_relay = None
        if address != RELAYED and address not in self._unreached:
            is_relayed = self._may_be_relayed(address)
            routed = self._faults.route(self.side.spec.name, address)
            try:
                return self.dial(routed, generation, DIRECT_SECONDS if is_relayed else CONNECT_TIMEOUT, holder)
            except LinkTimeout as error:
                if not is_relayed:
                    raise
                self._unreached.add(address)
                print(f"{self.side.member}: {error}; connecting through the relay", file=sys.stderr, flush=True)
        if self._to_relay is None:
            self._to_relay = RelayedDialler(self._exchange, self._credentials, self.side.spec.name)
        return self.dial(self._to_relay.address, generation, CONNECT_TIMEOUT, holder)

    def _may_be_relayed(self, address: str) -> bool:
        """Return whether an address may be out of reach: on another machine, in a run with a relay."""
        return self.side.credentials.identity is not None and not is_loopback(address)

    # ---- the neighbour dials ----

    def listen(self, address: str, *others: StageLink) -> int:
        """Listen on HOST:PORT, for the neighbours of other links, too; return the port.

        PORT 0 takes any free one. Raises OSError if it is busy.
        """
        authenticator = _NeighbourAuthenticator([self, *others])
        threads = _SPARE + _HOLDERS * _MOST_OPEN * (1 + len(others))
        handler = service_handler(SERVICE, authenticator, authenticator, _MOST_OPEN)
        self._server, port = make_server(address, [handler], threads, self.side.credentials.identity)
        return port

    def be_found(self, generation: int) -> None:
        """Prepare for the neighbour, which is about to dial this member."""
        self.give_up(generation, f"this member is at generation {generation}")
        if self._to_relay is not None:
            self._to_relay.close()
            self._to_relay = None
        if self._from_relay is None and self._may_be_relayed(self.listens):
            self._from_relay = RelayedListener(self._exchange, self._credentials, self.side.spec.name, self.listens)

    def expect(self, generation: int, holder: int | None) -> None:
        """Accept no generation after this one, and in this one only the neighbour with this holder number (None: any).

        Both are what the exchange told.
        """
        self._expected = ExpectedNeighbour(generation, holder)

    def waits_for(self, context: grpc.ServicerContext) -> str | None:
        """Return the neighbour if a call is its own, with its holder number if it has one; else None.

        Raises Forbidden for a former holder of the neighbour's slot, before anything of its call is read.
        """
        holder, expected = self.side.holder_of(context), self._expected
        if holder is None:
            return None
        name = f"{self.side.peer} (holder {holder})" if holder else self.side.peer
        if expected is not None and expected.holder is not None and holder < expected.holder:
            reason = f"found holder {holder} of {self.side.peer}, expected {expected.holder}"
            self.refuse(name, reason, Kind.FORBIDDEN)
            raise Forbidden(reason)
        return name

    def open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve the neighbour's call `Open`."""
        hello, complaint = _first_hello(self.side, requests, HELLO_SECONDS, context.cancel)
        if complaint is not None and self._accuse(complaint, context):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, complaint.reason)
        if complaint is not None:
            self._turn_away(hello, complaint, context)
        # A generation, or a holder, that the exchange has not told this member of.
        expected, holder = self._expected, self.side.holder_of(context)
        if expected is not None and hello.generation > expected.generation:  # the neighbour may just have been told
            why = f"found generation {hello.generation}, expected {expected.generation}"
            context.abort(grpc.StatusCode.UNAVAILABLE, why)  # it dials again
        if expected is not None and hello.generation == expected.generation and expected.holder not in (None, holder):
            reason = f"found holder {holder} of {self.side.peer}, expected {expected.holder}"
            self._turn_away(hello, Complaint(Kind.FORBIDDEN, reason), context)
        session, present = hello.session, self._of(hello.generation)
        if hello.goes_on and (present is None or present.session != session):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "found a link to be continued, expected a new one")
        try:
            end = self.come(
                hello.generation, lambda: self._make_end(session), lambda end: session != b"" and end.session == session
            )
        except LinkClosed as error:  # no stranger, only late
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Refused as error:
            self._turn_away(hello, Complaint(Kind.UNEXPECTED, str(error)), context)
        stream = end.new_stream()
        stream.hang_up = context.cancel
        try:
            received = end.attach(stream, hello.stream, hello.received)
        except LinkClosed as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except MalformedMessage as error:
            self._turn_away(hello, Complaint(Kind.MALFORMED, str(error)), context)
        name = f"link-{self.side.spec.name}"
        threading.Thread(target=end.read, args=(stream, requests), name=name, daemon=True).start()
        yield self.side.hello(hello.generation, end, hello.stream, received, hello.goes_on).SerializeToString()
        yield from stream.frames()
        failure = end.wait_until_delivered(stream)
        if failure is not None and context.is_active():
            context.abort(grpc.StatusCode.ABORTED, failure)

    def leave(self, request: LinkHello, context: grpc.ServicerContext) -> Nothing:
        """Serve the neighbour's call `Leave`."""
        complaint = self.side.judge(request)
        if complaint is not None:
            self._turn_away(request, complaint, context)
        end = self._of(request.generation)
        if end is not None and end.session == request.session:
            end.lost(f"the peer aborted: {request.cause}")
        return Nothing()

    def _accuse(self, complaint: Complaint, context: grpc.ServicerContext) -> bool:
        """Fail the awaited link because of a wrong hello, and return whether it was failed.

        Its user then gets PeerAtFault, so that the exchange hears which member sent the hello. A link that is connected
        goes on. Only a certificate shows that the hello is of the present neighbour.
        """
        expected, holder = self._expected, self.side.holder_of(context)
        if self.side.credentials.identity is None or expected is None or holder != expected.holder:
            return False
        end = self._of(expected.generation)
        if end is None:
            try:
                end = self.come(expected.generation, lambda: self._make_end(b""))
            except LinkClosed:
                return False
        if end.is_connected:
            return False
        end.accuse(complaint.reason)
        return True

    def _turn_away(self, hello: LinkHello, complaint: Complaint, context: grpc.ServicerContext) -> NoReturn:
        """Count a refusal, and end the call."""
        is_shown = self.side.credentials.identity is not None
        self.refuse(self.side.peer if is_shown else plain(hello.sender), complaint.reason, complaint.kind)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, complaint.reason)

    def _make_end(self, session: bytes) -> GrpcLinkEnd:
        return GrpcLinkEnd(self.side, session, self.refuse)

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a refusal."""
        with self._changed:
            self.refusals += 1
        self.side.on_refusal(sender, reason, kind)


class _NeighbourAuthenticator:
    """The server at one address for several neighbours: passes each call to the link of its caller."""

    def __init__(self, links: Sequence[StageLink]) -> None:
        self._links = links

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        for link in self._links:
            caller = link.waits_for(context)
            if caller is not None:
                return caller
        reason = "found another token than the link's"
        self.refuse(context.peer(), reason, Kind.STRANGER)
        raise Refused(reason)

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        self._links[0].refuse(sender, reason, kind)

    def request_bytes_max(self, call: str) -> int:
        return HELLO_BYTES_MAX + 2 * TEXT_BYTES_MAX

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        """Do nothing: what the neighbour sends on the link itself counts against it (`_accuse`)."""

    def Open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from self._of(context).open(requests, context)

    def Leave(self, request: LinkHello, context: grpc.ServicerContext) -> Nothing:
        return self._of(context).leave(request, context)

    def _of(self, context: grpc.ServicerContext) -> StageLink:
        """Return the link that waits for an admitted caller."""
        return next(link for link in self._links if link.side.holder_of(context) is not None)


class _Dialling:
    """One link to the listener at an address, over consecutive streams."""

    def __init__(self, address: str, end: GrpcLinkEnd, side: LinkSide, generation: int, holder: int | None) -> None:
        self._address, self._end, self._side, self._generation = address, end, side, generation
        self._route = route_to(address)
        peer = side.peer if holder is None else holder_name(side.peer, holder)
        self._channel = make_channel(address, side.credentials.identity, peer, self._route)
        self._calls = calls_of(SERVICE, self._channel)
        self._lock = threading.Lock()
        self._number = 0
        self._is_over = threading.Event()
        self._stream: LinkStream | None = None
        self._parting = threading.Thread(target=self._part, name="link-parting", daemon=True)

        def begin_to_part() -> None:
            self._parting.start()
            self._is_over.set()  # after the start: `wait_until_parted` joins the thread once this is set

        end.when_over(begin_to_part)

    def connect(self, timeout: float) -> None:
        """Connect within `timeout` seconds, and stay connected as long as the end is in use.

        Raises as StageLink.dial. The end then has to be aborted.
        """
        stream, frames = self._dial(time.monotonic() + timeout, timeout)

        def follow(stream: LinkStream, frames: Iterator[bytes]) -> None:
            """Receive, over as many streams as needed."""
            try:
                while True:
                    self._end.read(stream, frames)
                    if self._end.over is not None:
                        return
                    stream, frames = self._dial(float("inf"), 0.0)
            except HeteroPPError as error:
                self._end.lost(str(error))

        threading.Thread(target=follow, args=(stream, frames), name="link", daemon=True).start()

    def wait_until_parted(self) -> None:
        """Wait until the listener knows that this end is over, for a bounded time."""
        if self._is_over.is_set():
            self._parting.join(PART_SECONDS)

    def _dial(self, deadline: float, timeout: float) -> tuple[LinkStream, Iterator[bytes]]:
        """Return an attached stream and its received frames, once a connection holds."""
        while True:
            answered = self._attempt(deadline)
            if answered is not None:
                return answered
            if time.monotonic() > deadline:
                raise LinkTimeout(f"{self._address} did not answer within {timeout:g} s{self._route.note}")
            self._is_over.wait(AGAIN_SECONDS)

    def _attempt(self, deadline: float) -> tuple[LinkStream, Iterator[bytes]] | None:
        """Return the same, or None if the connection breaks before. Raises LinkClosed if the end is over."""
        with self._lock:
            if self._end.over is not None:
                raise LinkClosed(self._end.over)
            self._number += 1
            self._stream = stream = self._end.new_stream()
            requests = itertools.chain([self._hello().SerializeToString()], stream.frames())
            call: IncomingFrames = self._calls["Open"](requests, metadata=self._side.metadata, wait_for_ready=True)
            stream.hang_up = call.cancel
        try:
            left = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            hello, complaint = _first_hello(self._side, call, max(left, 0.0), call.cancel)
            if complaint is not None:
                where = f"the listener at {self._address} is not the other end of {self._side.spec.name}"
                reason = f"{where}: {complaint.reason}"
                # A process without a certificate may have taken over the neighbour's address.
                if complaint.kind is Kind.STRANGER and self._side.credentials.identity is None:
                    raise LinkClosed(reason)
                raise self._end.accuse(reason)
            self._end.attach(stream, self._number, hello.received)
            return stream, call
        except grpc.RpcError as error:
            stream.stop("could not connect")
            code, details = error.code(), error.details()
            if self._end.over is not None:
                raise LinkClosed(self._end.over) from error
            if code in _BROKEN:
                return None
            if code is grpc.StatusCode.PERMISSION_DENIED:
                raise Refused(f"{self._address} refused: {details}") from error
            is_aborted = code is grpc.StatusCode.ABORTED
            why = f"the peer aborted: {details}" if is_aborted else f"{self._address} refused: {details}"
            raise LinkClosed(why) from error
        except HeteroPPError as error:
            stream.stop("could not connect")
            call.cancel()
            if isinstance(error, MalformedMessage):
                raise self._end.accuse(str(error)) from error
            raise

    def _hello(self) -> LinkHello:
        end = self._end
        return self._side.hello(self._generation, end, self._number, end.received, end.streams > 0)

    def _part(self) -> None:
        """Tell the listener that the end is over, unless it knows, and close the connection."""
        if self._end.failure is not None and self._end.streams > 0:
            farewell = self._hello()
            farewell.cause = plain(self._end.failure)
            with suppress(grpc.RpcError):
                self._calls["Leave"](farewell, metadata=self._side.metadata, timeout=PART_SECONDS)
        with self._lock:
            if self._stream is not None:
                self._stream.hang_up()
            self._channel.close()
