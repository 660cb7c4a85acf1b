"""Stops a member on a signal, only at points from which the state after its last round can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hetero_pp.errors import Stopped
from replica_groups.ranks import Ranks


class Stopping:
    """Raises Stopped in the main thread, which trains, after a signal has asked the member to stop.

    A signal may arrive at any instruction, even while parameters are half updated. Therefore the exception is raised
    only in blocks of `allowed` and in `check`. Elsewhere the signal is only noted.
    """

    def __init__(self, number: signal.Signals | None = None, leave: Callable[[], object] = lambda: None) -> None:
        """`number`: the signal, or None for none. `leave`: ends this process after the state is saved."""
        self.is_asked = False
        self.leave = leave
        self._number = number
        self._seconds: float | None = None
        """Seconds that the current block may still take after the signal; None outside of such blocks."""

    def listen(self) -> None:
        """Handle the signal from now on, in the main thread. Before this call, the signal ends the process."""
        if self._number is not None:
            signal.signal(self._number, self._hear)
            signal.signal(signal.SIGALRM, self._raise)

    @contextmanager
    def allowed(self, seconds: float = 0.0) -> Iterator[None]:
        """Raise Stopped in the block, `seconds` after the signal, at any instruction of the main thread."""
        if self._number is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._seconds = seconds
        try:
            if self.is_asked:
                self._raise_soon()
            yield
        finally:
            self._seconds = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, ranks: Ranks) -> None:
        """Raise Stopped on all ranks if any rank was asked to stop."""
        if self._number is not None and any(ranks.gather(float(self.is_asked))):
            raise Stopped

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self._seconds is not None:
            self._raise_soon()

    def _raise_soon(self) -> None:
        if not self._seconds:
            raise Stopped
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._seconds is not None:
            raise Stopped


NEVER_STOPPED = Stopping()
"""For members that are threads: their process ends them."""
