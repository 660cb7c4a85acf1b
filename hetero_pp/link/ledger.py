"""Counts what one direction of a link carried, by round. Bytes are measured, never assumed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

FRAME_BYTES = 1 << 20
"""Tensors cross in raw frames of this size: one large gRPC message is six times slower."""

PREFIX_BYTES = 4
"""A message's first frame begins with the length of its header."""

_GRPC_PREFIX = 5
_HTTP2_FRAME_HEADER = 9
_HTTP2_FRAME_BYTES = 16384


def frame_sizes(header_bytes: int, payload_bytes: int) -> list[int]:
    """The frames that a message becomes: all but the last are full, the first begins with the header."""
    whole, last = divmod(PREFIX_BYTES + header_bytes + payload_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + [last] * (last > 0)


def raw_frames(n_bytes: int) -> list[int]:
    """The frames of bytes that have no header: contributions and snapshots."""
    whole, last = divmod(n_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + [last]


def wire_bytes(frames: Sequence[int]) -> int:
    """Bytes on the wire of frames of these sizes: with gRPC's prefix and HTTP/2's frame headers.

    TCP and IP headers (about 3 % at 1500-byte packets) are below what a process can see and are not counted.
    """
    total = 0
    for size in frames:
        body = size + _GRPC_PREFIX
        total += body + _HTTP2_FRAME_HEADER * -(-body // _HTTP2_FRAME_BYTES)
    return total


@dataclass(slots=True)
class Count:
    """What one direction carried in one round. `busy_seconds` is the time the shaped link was occupied."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    busy_seconds: float = 0.0


class Ledger:
    """Counts of one direction of one link, by round. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[int, Count] = defaultdict(Count)

    def add(self, round_: int, payload: int, wire: int, busy_seconds: float = 0.0) -> None:
        """Count one message of `payload` tensor bytes that took `wire` bytes."""
        with self._lock:
            count = self._rounds[round_]
            count.messages += 1
            count.payload_bytes += payload
            count.wire_bytes += wire
            count.busy_seconds += busy_seconds

    def of_round(self, round_: int) -> Count:
        """A copy of the counts of one round."""
        with self._lock:
            return replace(self._rounds.get(round_, Count()))
