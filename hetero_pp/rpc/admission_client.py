"""Admission of a host to a run: client of the calls of `service Admission`, and measurements of a host's line."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import (
    HeteroPPError,
    LinkTimeout,
    MalformedMessage,
    Refused,
    RunFailed,
    RunOver,
    StoreError,
    TooMuch,
)
from hetero_pp.core.proxies import route_to
from hetero_pp.core.units import format_bits_per_second, format_seconds
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.channels import PROTOCOL_VERSION, answering, is_reached, make_channel, require_trust
from hetero_pp.rpc.identities import Identity
from hetero_pp.rpc.services import ADMISSION_SERVICE, IncomingFrames, calls_of

SECONDS = 30.0  # seconds within which an exchange that is there answers

_ERRORS: dict[grpc.StatusCode, type[HeteroPPError]] = {
    grpc.StatusCode.NOT_FOUND: RunOver,
    grpc.StatusCode.ABORTED: RunFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooMuch,
    grpc.StatusCode.INTERNAL: StoreError,
}
"""Error for each status code of an exchange that answers; Refused for all others."""


def enrol(
    address: str,
    identity: Identity,
    request: bytes,
    seconds: float | None = None,
    on_wait: Callable[[float, float], None] = lambda *_: None,
) -> pb.EnrolReply:
    """Exchange a ticket, and a request for a certificate of a key, for a slot and the certificate (`ask`).

    Raises Refused if there is no slot.
    """
    asked = pb.EnrolRequest(version=PROTOCOL_VERSION, request=request)
    reply: pb.EnrolReply = ask(address, identity, "Enrol", asked, seconds, on_wait)
    return reply


def ask(
    address: str,
    identity: Identity,
    call: str,
    request: Message | None = None,
    seconds: float | None = None,
    on_wait: Callable[[float, float], None] = lambda *_: None,
) -> Any:
    """Make a call of `service Admission`, by default without arguments, and return its reply.

    A host that renews its certificate or leaves does not wait for an exchange that is gone.

    Raises RunOver or RunFailed if the run has ended. Raises StoreError if a disk or a store fails there, TooMuch if the
    host may ask again later, Refused for all else. Raises LinkTimeout if the exchange does not answer within `seconds`
    (by default SECONDS). `on_wait` is called once if connecting takes long, with the seconds so far and in all.
    """
    seconds = SECONDS if seconds is None else seconds
    host = present_host(address, identity, seconds / 2)
    route = route_to(host)
    with closing(make_channel(host, identity, EXCHANGE, route)) as channel:
        if not is_reached(channel, seconds / 10):
            require_trust(host, identity, route)
            on_wait(seconds / 10, seconds)
        try:
            asks, waits = calls_of(ADMISSION_SERVICE, channel)[call], call not in ("Renew", "Give")
            return asks(request or pb.Nothing(), wait_for_ready=waits, timeout=seconds)
        except grpc.RpcError as error:
            code, asked = error.code(), f"the exchange at {address}"
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                why = f"{asked} did not answer within {format_seconds(seconds)}{route.note}"
                raise LinkTimeout(why) from None
            if code is grpc.StatusCode.UNAVAILABLE:
                raise LinkTimeout(f"{asked} does not answer{route.note}") from None
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise Refused(f"{asked} does not admit hosts by tickets") from None
            raise _ERRORS.get(code, Refused)(str(error.details())) from None


def present_host(addresses: str, identity: Identity, seconds: float = SECONDS) -> str:
    """Return the host of the exchange that answers within some seconds, else the first one."""
    return answering(addresses, identity, seconds) or addresses.partition(",")[0]


PROBE_BYTES = 1 << 20  # bytes in each direction: less than a second on a line of 10 Mbit/s
PROBE_SECONDS = 20.0  # seconds after which a measurement ends in any case
BUSY = "another line is being measured"  # Error for a caller while another line is measured

_FRAME_BYTES = 64 << 10
_FRAMES = PROBE_BYTES // _FRAME_BYTES
_BITS = 8.0


class Probe:
    """Measurement of one line, on the side that measures."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        """Wait for the first frame. Raises MalformedMessage for a wrong one."""
        self.up, self.down = 0.0, 0.0  # bits per second, from the caller and to it
        self._incoming = frames
        self._require(_FRAME_BYTES)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send once all of the caller's have come. Raises MalformedMessage for wrong ones."""
        begun = time.monotonic()
        for _ in range(_FRAMES - 1):
            self._require(_FRAME_BYTES)
        self.up = _BITS * (PROBE_BYTES - _FRAME_BYTES) / _since(begun)
        last, begun = secrets.token_bytes(_FRAME_BYTES), time.monotonic()
        yield from [bytes(_FRAME_BYTES)] * (_FRAMES - 1)
        yield last
        if self._require(_LAST_WORD) != last[-_LAST_WORD:]:
            raise MalformedMessage("found another end of the probe than was sent")
        self.down = _BITS * PROBE_BYTES / _since(begun)

    def _require(self, size: int) -> bytes:
        frame = next(self._incoming, b"")
        if len(frame) != size:
            raise MalformedMessage(f"found a frame of {len(frame)} bytes, expected {size}")
        return frame


_LAST_WORD = 16  # last bytes of what was sent; repeating them proves that all of it arrived


def _since(begun: float) -> float:
    return max(time.monotonic() - begun, 1e-6)


def be_probed(address: str, identity: Identity) -> str:
    """Let the exchange at an address measure this host's line; return why it could not, empty if it could."""
    ends: SimpleQueue[bytes] = SimpleQueue()  # the end of what the exchange sent, or nothing after an error
    with closing(make_channel(present_host(address, identity), identity, EXCHANGE)) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = calls_of(ADMISSION_SERVICE, channel)["Probe"]
        answers = call(_said(ends), wait_for_ready=True, timeout=PROBE_SECONDS)
        try:
            for number, frame in enumerate(answers, start=1):
                if number == _FRAMES:
                    ends.put(frame[-_LAST_WORD:])
        except grpc.RpcError as error:
            is_ended = error.code() is grpc.StatusCode.CANCELLED
            return "the exchange stopped measuring this line" if is_ended else str(error.details())
        finally:
            ends.put(b"")
        return ""


def _said(ends: SimpleQueue[bytes]) -> Iterator[bytes]:
    yield from [bytes(_FRAME_BYTES)] * _FRAMES
    if last := ends.get():
        yield last


# ---- a host measures its own line ----

MEASURE_BYTES = 4 << 20  # most bytes in each direction of a measurement

MEASURE_SECONDS = 3.0
"""Seconds after which the exchange ends a measurement in one direction. The host that measures ends it earlier."""

_OWN_FRAME_BYTES = 32 << 10
_LEAST_FRAME_BYTES = 4 << 10  # a smaller frame counts as this many bytes, because each frame takes time of the exchange
_OWN_SECONDS = 0.7  # seconds for which a host measures each direction


@dataclass(frozen=True)
class Rate:
    """Measured bandwidth of one direction of a line."""

    bits_per_second: float
    is_limited: bool
    """Whether the line was the limit. Otherwise all bytes crossed before the time was over, and it may be faster."""

    def __str__(self) -> str:
        shown = format_bits_per_second(self.bits_per_second)
        return shown if self.is_limited else f"at least {shown}"


def answer_measurement(frames: Iterator[bytes]) -> Iterator[bytes]:
    """Acknowledge each frame of a caller with an empty one; if it sends none, yield frames to it.

    Raises MalformedMessage for more bytes than a measurement has.
    """
    received = 0
    for frame in frames:
        received += max(len(frame), _LEAST_FRAME_BYTES)
        if received > MEASURE_BYTES:
            raise MalformedMessage(f"found more than {MEASURE_BYTES} bytes in a measurement")
        yield b""
    if received == 0:
        yield from [bytes(_OWN_FRAME_BYTES)] * (MEASURE_BYTES // _OWN_FRAME_BYTES)


def measure(address: str, identity: Identity) -> tuple[Rate, Rate]:
    """Measure this host's line to and from the exchange at an address, for up to 1.5 seconds.

    Returns the rates of sending and receiving. Raises Refused if the exchange does not answer the calls.
    """
    frame = bytes(_OWN_FRAME_BYTES)
    with closing(make_channel(present_host(address, identity), identity, EXCHANGE)) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = calls_of(ADMISSION_SERVICE, channel)["Measure"]
        try:
            down = _rate(call(iter(()), wait_for_ready=True, timeout=MEASURE_SECONDS), len)
            sent = iter([frame] * (MEASURE_BYTES // _OWN_FRAME_BYTES))
            up = _rate(call(sent, wait_for_ready=True, timeout=MEASURE_SECONDS), lambda _: _OWN_FRAME_BYTES)
        except grpc.RpcError as error:
            raise Refused(str(error.details())) from None
    return up, down


def _rate(frames: IncomingFrames, size: Callable[[bytes], int]) -> Rate:
    """Return the rate of a stream of frames; `size` is the number of bytes that a frame stands for.

    The first frame starts the clock, so that neither the connection nor the distance counts.
    """
    total, begun, last, timer = 0, 0.0, 0.0, threading.Timer(2 * _OWN_SECONDS, frames.cancel)
    timer.start()
    try:
        for frame in frames:
            last = time.monotonic()
            total += size(frame) if begun else 0
            begun = begun or last
            if last - begun > _OWN_SECONDS:
                break
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.CANCELLED:
            raise
    finally:
        timer.cancel()
        frames.cancel()
    is_limited = total < MEASURE_BYTES - _OWN_FRAME_BYTES
    return Rate(_BITS * total / max(last - begun, 1e-6), is_limited)
