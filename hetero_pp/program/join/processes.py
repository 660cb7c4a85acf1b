"""Identifies a process of this host in a file, so that a later process with the same id is not mistaken for it."""

from __future__ import annotations

import os

import psutil

_SECONDS_APART = 1.0
"""Seconds by which two readings of a process's creation time may differ."""


def own_process() -> str:
    """Return an identification of this process for `running_process`."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def running_process(text: str) -> psutil.Process | None:
    """Return the process that `own_process` identified; None if it has ended. Raises ValueError for any other text."""
    number, created = text.split()
    try:
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < _SECONDS_APART else None
    except psutil.NoSuchProcess:
        return None
