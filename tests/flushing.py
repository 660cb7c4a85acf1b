"""No flushes to the disk in tests and in the processes that they fork.

A test ends processes, not the machine, and what a process has written outlives it without a flush. A small run flushes
hundreds of files, and each flush waits for milliseconds. Tests of flushes replace `os.fsync` themselves.
"""

from __future__ import annotations

import os
from typing import Any


def keep_in_memory(fd: Any) -> None:
    """Do all that `os.fsync` does but the flush. Raises OSError if the file is not open."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


os.fsync = keep_in_memory
