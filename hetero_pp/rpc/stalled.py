"""Ends streams that stand still, so that a peer which stops reading or sending does not keep their memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import grpc

STALL_SECONDS = 60.0
"""A stream is cut after so long without a frame. A frame of 1 MiB takes 0.4 s at 20 Mbit/s."""


def cut_when_stalled(
    frames: Iterable[bytes], context: grpc.ServicerContext, seconds: float = STALL_SECONDS
) -> Iterator[bytes]:
    """Yield the same frames, and cancel their call if none is taken, or none comes, for so many seconds."""
    moved = time.monotonic()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(max(0.0, moved + seconds - time.monotonic())):
            if time.monotonic() >= moved + seconds:
                context.cancel()
                return

    threading.Thread(target=watch, name="stalled", daemon=True).start()
    try:
        for frame in frames:
            moved = time.monotonic()
            yield frame
            moved = time.monotonic()
    finally:
        over.set()
