"""Connects an end of a stage link to its listener, and connects again when a stream breaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import grpc

from hetero_pp.core.errors import HeteroPPError, LinkClosed, LinkTimeout, MalformedMessage, Refused
from hetero_pp.core.proxies import route_to
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, LinkFarewell, LinkHello, LinkLeft
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.certificates import holder_name
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.link_end import GrpcLinkEnd
from hetero_pp.rpc.link_hello import Complaint, Introduction, first_frame
from hetero_pp.rpc.link_stream import LinkStream
from hetero_pp.rpc.plain_text import plain
from hetero_pp.rpc.services import IncomingFrames, calls_of

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
