"""Memory that was freed: kept for frames that come soon, or given back to the system. With glibc only."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Have the allocator keep what is freed, for the whole process; returns whether it could (glibc only).

    gRPC and Python take fresh memory for every frame several times over. By default glibc hands much of it back to
    the system at once, and getting it again page by page slows a link: .50 instead of .81 GB/s at 4 MiB, and nothing
    at 512 KiB (medians of five alternating runs). For a program to call when it starts.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_M_MMAP_THRESHOLD, 32 << 20), mallopt(_M_TRIM_THRESHOLD, 256 << 20)])


@contextmanager
def giving_freed_memory_back(every: float) -> Iterator[None]:
    """Meanwhile nothing is kept that has been free for so many seconds.

    For who serves others: thousands of strangers who connect, and are turned away, else leave hundreds of megabytes.
    """
    is_over = threading.Event()
    if platform.libc_ver()[0] == "glibc":
        threading.Thread(target=_give_back, args=(every, is_over), name="memory", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _give_back(every: float, is_over: threading.Event) -> None:
    trim = ctypes.CDLL(None).malloc_trim
    while not is_over.wait(every):
        trim(0)
