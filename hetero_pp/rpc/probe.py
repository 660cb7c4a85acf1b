"""Measures a line's bandwidth in both directions, on the exchange's side: claims of a caller do not count."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from queue import SimpleQueue

import grpc

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import MalformedMessage
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.services import ADMISSION_SERVICE, calls_of

PROBE_BYTES = 1 << 20
"""Bytes in each direction: less than a second on a line of 10 Mbit/s."""

PROBE_SECONDS = 20.0
"""Seconds after which a measurement ends in any case."""

BUSY = "another line is being measured"
"""Error for a caller while another line is measured."""

_FRAME_BYTES = 64 << 10
_FRAMES = PROBE_BYTES // _FRAME_BYTES
_BITS = 8.0


class Probe:
    """Measurement of one line, on the side that measures."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        """Wait for the first frame. Raises MalformedMessage for a wrong one."""
        self.up, self.down = 0.0, 0.0
        """Bits per second, from the caller and to it."""
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


_LAST_WORD = 16
"""Last bytes of what was sent; repeating them proves that all of it arrived."""


def _since(begun: float) -> float:
    return max(time.monotonic() - begun, 1e-6)


def be_probed(address: str, identity: Identity) -> str:
    """Let the exchange at an address measure this host's line; return why it could not, empty if it could."""
    with closing(make_channel(address, identity, EXCHANGE)) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = calls_of(ADMISSION_SERVICE, channel)["Probe"]
        ends: SimpleQueue[bytes] = SimpleQueue()
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
