"""Hello of a stage link: the first frame of each direction, by which each end checks the other."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from hetero_pp.messages.messages_pb2 import LinkHello
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import shown_by
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.credentials import LinkCredentials

HELLO_BYTES_MAX = 4096
_TOKEN = "token"


class Complaint(NamedTuple):
    """Reason to refuse the other end of a link."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Introduction:
    """A member's name on one of its links, and the neighbour that it expects."""

    credentials: LinkCredentials
    link: str
    own: str
    peer: str

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

    def hello(self, generation: int, session: bytes, stream: int, received: int, goes_on: bool) -> LinkHello:
        """Return this member's hello for a stream, after `received` messages of the link."""
        return LinkHello(
            version=PROTOCOL_VERSION,
            token=self.credentials.token,
            link=self.link,
            sender=self.own,
            generation=generation,
            session=session,
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
        wanted = {"version": PROTOCOL_VERSION, "link": self.link, "sender": self.peer}
        for name, value in wanted.items():
            if getattr(hello, name) != value:
                return Complaint(Kind.UNEXPECTED, f"found {name} {getattr(hello, name)}, expected {value}")
        return None


def first_frame(frames: Iterator[bytes], timeout: float, cancel: Callable[[], object]) -> bytes:
    """Return the first frame of a stream. If it does not come in time, cancel the stream, which raises RpcError."""
    timer = threading.Timer(timeout, cancel)
    timer.daemon = True
    timer.start()
    try:
        return next(frames, b"")
    finally:
        timer.cancel()
