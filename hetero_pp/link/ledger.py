"""Counts the traffic of one direction of a link, by round. Bytes are measured, never assumed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

FRAME_BYTES = 1 << 20
"""Size of the raw frames of a payload. A single large gRPC message is six times slower."""

PREFIX_BYTES = 4
"""Bytes for the length of the header, at the start of a message's first frame."""

_GRPC_PREFIX = 5
_HTTP2_FRAME_HEADER = 9
_HTTP2_FRAME_BYTES = 16384


def frame_sizes(header_bytes: int, payload_bytes: int) -> list[int]:
    """Return the sizes of a message's frames. All but the last are full; the first begins with the header."""
    whole, last = divmod(PREFIX_BYTES + header_bytes + payload_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + [last] * (last > 0)


def raw_frames(n_bytes: int) -> list[int]:
    """Return the sizes of the frames of bytes without a header, such as contributions and run checkpoints."""
    whole, last = divmod(n_bytes, FRAME_BYTES)
    return [FRAME_BYTES] * whole + [last]


def wire_bytes(frames: Sequence[int]) -> int:
    """Return the bytes on the wire for frames of these sizes, with gRPC's prefix and HTTP/2's frame headers.

    TCP and IP headers (about 3 % at 1500-byte packets) are not included, because a process cannot see them.
    """
    total = 0
    for size in frames:
        body = size + _GRPC_PREFIX
        total += body + _HTTP2_FRAME_HEADER * -(-body // _HTTP2_FRAME_BYTES)
    return total


@dataclass(slots=True)
class Count:
    """Traffic of one direction in one round. `busy_seconds` is the time for which the shaped link was occupied."""

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
        """Return a copy of the counts of one round."""
        with self._lock:
            return replace(self._rounds.get(round_, Count()))
