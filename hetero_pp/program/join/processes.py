"""Names a process of this host in a file, so that another command finds it, and not a later one of the same number."""

from __future__ import annotations

import os

import psutil

_SECONDS_APART = 1.0
"""By which two readings of the time at which one process was created may differ."""


def own_process() -> str:
    """This process, as `running_process` finds it."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def running_process(text: str) -> psutil.Process | None:
    """The process that `own_process` named; None if it has ended. Raises ValueError for another text."""
    number, created = text.split()
    try:
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < _SECONDS_APART else None
    except psutil.NoSuchProcess:
        return None
