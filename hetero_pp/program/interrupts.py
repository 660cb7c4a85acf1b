"""Ends a command when Ctrl-C, SIGTERM or SIGUSR1 comes: one line and exit code 130, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Slurm sends SIGUSR1 some time before a job's limit: `--signal=USR1@120`."""

_COMMANDS = "hetero_pp.program.cli"
_SECONDS_FOR_THE_END = 5.0
"""Within this time after an interrupt another one changes nothing: the end is under way. Ctrl-C is often hit twice."""


def leave_when_interrupted() -> None:
    """From now on, until a command runs, end the program at once: no process and no file has to be cleaned up."""
    _install(_leave_with_a_line)


def keep_exit_code() -> None:
    """The command is over, and Python shuts down: no Ctrl-C changes the exit code any more. SIGTERM ends it at once.

    Python itself would reset other handlers before its end; signals that are ignored stay ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for each of the signals; no signal interrupts what follows an interrupt."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _install(_Interrupt())
    is_interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, _wait if is_interrupted and handler is _leave_with_a_line else handler)


class _Interrupt:
    """Handles the signals while a command runs."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            _leave_with_a_line(number, frame)
        now = time.monotonic()
        if now - self._last > _SECONDS_FOR_THE_END:
            self._last = now
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a command still imports what it needs.

    An exception raised inside an import may be printed and dropped there, or become another one: torch's and numpy's
    imports call Python from C.
    """
    inner = ""
    while frame is not None:
        if frame.f_globals.get("__name__") == _COMMANDS and inner.startswith("<frozen importlib"):
            return True
        inner, frame = frame.f_code.co_filename, frame.f_back
    return False


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        # Shells have their background jobs ignore SIGINT, and so may the user: that stays.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave_with_a_line(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, b"hetero-pp: interrupted\n")
    _leave(number, frame)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _wait(number: int, frame: FrameType | None) -> None:
    """The end is under way."""
