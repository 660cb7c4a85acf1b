"""Memory of a process that sends and receives many frames. Imports nothing slow: a launcher needs it first."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Let the allocator keep freed memory, for the whole process; return whether that is possible (glibc only).

    gRPC and Python allocate memory for every frame several times. By default glibc returns much of it to the system at
    once. Page faults then slow a link: .50 instead of .81 GB/s at 4 MiB, and no difference at 512 KiB (medians of
    five alternating runs). To be called when a program starts.

    All threads share one arena. Otherwise each of gRPC's threads keeps up to 64 MiB, of which `malloc_trim` returns
    nothing; and freed memory is used again by the thread that freed it only. A link is faster so, too.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    thresholds = mallopt(_M_MMAP_THRESHOLD, 32 << 20), mallopt(_M_TRIM_THRESHOLD, 256 << 20)
    return all([*thresholds, mallopt(_M_ARENA_MAX, 1)])


@contextmanager
def giving_freed_memory_back(every: float) -> Iterator[None]:
    """Return freed memory to the system at this interval, in seconds, while the block runs.

    For servers: thousands of refused connections would otherwise leave hundreds of megabytes.
    """
    is_over = threading.Event()

    def give_back() -> None:
        while not is_over.wait(every):
            give_freed_memory_back()

    threading.Thread(target=give_back, name="memory", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def give_freed_memory_back() -> None:
    """Return freed memory to the system now (glibc only): a process that does no more of what needed it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
