"""Finds processes that have not ended in time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that still run after so many seconds.

    One that only waits for its exit code to be read has ended.
    """
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _runs(process)]
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
        left = [process for process in left if _runs(process)]
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
