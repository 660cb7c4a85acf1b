"""Ends a command at Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 with one line and exit code 130, whenever it arrives."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130  # exit code of an interrupted command

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that interrupt a command.

A terminal that is closed sends SIGHUP, which `nohup` ignores. Slurm sends SIGUSR1 some time before a job's limit:
`--signal=USR1@120`.
"""

_COMMANDS = "hetero_pp.program.commands."
_SECONDS_FOR_THE_END = 5.0
"""Seconds after an interrupt in which another one has no effect, because Ctrl-C is often pressed twice."""
_SECONDS_UNTIL_AGAIN = 0.1  # seconds after which an interrupt that was dropped is repeated


def leave_when_interrupted() -> None:
    """Exit at once on an interrupt until a command runs. No process or file needs to be cleaned up before that."""
    _install(_leave_with_a_line)


def keep_exit_code() -> None:
    """Ignore Ctrl-C, SIGHUP and SIGUSR1 while Python shuts down, so that the exit code stays. SIGTERM exits at once.

    Python resets handlers before its end, but signals that are ignored stay ignored.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for each of the signals. After an interrupt, none interrupts later code."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    interrupt = _Interrupt(hook)
    _install(interrupt)
    sys.unraisablehook = interrupt.on_dropped
    is_interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            is_ending = is_interrupted and handler is _leave_with_a_line
            signal.signal(number, (lambda *_: None) if is_ending else handler)


class _Interrupt:
    """Handles the signals while a command runs."""

    def __init__(self, hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
        """`hook` is told of other exceptions that Python drops."""
        self._hook = hook
        self._last = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            _leave_with_a_line(number, frame)
        now = time.monotonic()
        if now - self._last > _SECONDS_FOR_THE_END:
            self._last = now
            raise KeyboardInterrupt

    def on_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        """Interrupt again if Python dropped a KeyboardInterrupt that was raised in a destructor or a callback."""
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            self._last = float("-inf")
            # SIGTERM is always handled. It is sent later, because an exception in this function would be dropped too.
            threading.Timer(_SECONDS_UNTIL_AGAIN, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            self._hook(dropped)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a command is still importing its modules.

    An exception raised inside an import may be printed and dropped there, or become another one, because torch's and
    numpy's imports call Python from C.
    """
    inner = ""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_COMMANDS) and inner.startswith("<frozen importlib"):
            return True
        inner, frame = frame.f_code.co_filename, frame.f_back
    return False


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        # A signal that is ignored stays ignored: shells have background jobs ignore SIGINT, `nohup` SIGHUP.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave_with_a_line(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, b"hetero-pp: interrupted\n")
    _leave(number, frame)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
