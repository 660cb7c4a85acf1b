"""`hetero-pp leave`: finds this host's `join` of a run and interrupts it, which frees the slot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.program.join.processes import own_process, running_process
from hetero_pp.program.report.output import announce

SECONDS = 30.0
"""Seconds to wait until an interrupted process has left."""
_SECONDS_BETWEEN_LOOKS = 0.02

_PROCESS = "joined-{slot}.pid"


@contextmanager
def leavable(folder: RunFolder, slot: str) -> Iterator[None]:
    """Let `leave` find this process while the block runs. Raises ConfigError if another process has the slot."""
    path = folder.path / _PROCESS.format(slot=slot)
    other = _process(path)
    if other is not None:
        raise ConfigError((), f"{slot} is already held by process {other.pid} on this host")
    write_whole(path, own_process().encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def leave(runs: Path, run: str, slot: str | None) -> None:
    """Interrupt the processes that joined a run on this host, for one slot or all.

    Raises ConfigError if there are none.
    """
    folder = run_folder(runs, run)
    found = [path for path in sorted(folder.path.glob(_PROCESS.format(slot=slot or "*"))) if _process(path)]
    if not found:
        of_slot = f" for {slot}" if slot else ""
        raise ConfigError((), f"{folder.path}: found no `hetero-pp join` of this run on this host{of_slot}")
    for path in found:
        process = _process(path)
        if process is not None:
            process.terminate()
            # Not for the end of the process: the interpreter takes seconds to end after its slot is free.
            until = time.monotonic() + SECONDS
            while _process(path) is not None and time.monotonic() < until:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            if _process(path) is not None:
                late = f"has not ended within {SECONDS:g} s; it may still save its state"
                announce(f"{run}: process {process.pid} {late}")
                continue
        announce(f"{run}: {path.stem.removeprefix('joined-')} has left")


def _process(path: Path) -> psutil.Process | None:
    """Return the process that wrote a file; None if it has ended, even if its id is in use again."""
    try:
        return running_process(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
