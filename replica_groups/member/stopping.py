"""Stops a member on a signal, only at points from which the state after its last round can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from hetero_pp.core.errors import Stopped
from replica_groups.engines.ranks import Ranks

SECONDS_TO_AGREE = 2.0
"""Seconds for which a stopping member waits for the record of its round, if it does not know whether it is closed.

The other members may have the record already.
"""
SECONDS_TO_FETCH = 10.0
"""Seconds for which a stopping member waits for one contribution of its round, of which it has the record.

The other members may have applied the round. The exchange may be gone.
"""
SECONDS_TO_LEAVE = 2.0
"""Seconds for which a member with nothing left to save continues after it was asked to stop.

Its last reports may reach the exchange. The exchange may be gone.
"""
_SECONDS_UNTIL_AGAIN = 0.5
"""Seconds after which a signal is sent again that had no effect.

Python drops exceptions that are raised in destructors and in some callbacks. An unlimited wait of the main thread may
sleep through a signal that arrives as it begins.
"""


class Stopping:
    """Raises Stopped in the main thread, which trains, after a signal has asked the member to stop.

    A signal may arrive at any instruction, even while parameters are half updated. Therefore the exception is raised
    only in blocks of `allowed` and in `check`. Elsewhere the signal is only noted.
    """

    def __init__(self, number: signal.Signals | None = None, leave: Callable[[], object] = lambda: None) -> None:
        """`number`: the signal, or None for none. `leave`: ends this process after the state is saved."""
        self.is_asked = False
        self.closed: int | None = None
        """The last round that the exchange has closed before it was asked to close no more; None if unknown."""
        self.leave = leave
        self._number = number
        self._is_allowed = False
        self._is_through = False  # whether nothing is left to save
        self._round: int | None = None  # the round whose record follows the current block; None if none does
        self._seconds = 0.0
        """Seconds for which the current block goes on if it is not known whether its round is closed."""

    def listen(self) -> None:
        """Handle the signal from now on, in the main thread. Before this call, the signal ends the process."""
        if self._number is not None:
            signal.signal(self._number, self._hear)
            signal.signal(signal.SIGALRM, self._raise)

    def ask(self, closed: int | None) -> None:
        """Have the main thread stop; see `closed`. For another thread to call."""
        self.closed = closed
        if self._number is not None:
            os.kill(os.getpid(), self._number)
            if not self.is_asked:  # the main thread has not handled it yet: ask again until it has

                def ask_again(number: signal.Signals = self._number) -> None:
                    time.sleep(_SECONDS_UNTIL_AGAIN)
                    while not self.is_asked:
                        os.kill(os.getpid(), number)
                        time.sleep(_SECONDS_UNTIL_AGAIN)

                threading.Thread(target=ask_again, name="stopping", daemon=True).start()

    @contextlib.contextmanager
    def allowed(self, round_: int | None = None, seconds: float | None = None) -> Iterator[None]:
        """Raise Stopped in the block after the signal, at any instruction of the main thread.

        If the record of `round_` follows the block, and that round is closed, the block is not ended: other members
        have the record. If it is not known whether the round is closed, the block is ended after `seconds`, by default
        SECONDS_TO_AGREE.
        """
        if self._number is None or self._is_through or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_allowed, self._round = True, round_
        self._seconds = SECONDS_TO_AGREE if seconds is None else seconds
        try:
            if self.is_asked:
                self._raise_soon()
            yield
        finally:
            self._is_allowed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self, ranks: Ranks, round_: int | None = None) -> None:
        """Raise Stopped on all ranks if one of them was asked to stop, and `round_` is not closed; see `allowed`."""
        if self._number is None:
            return
        is_closed = round_ is not None and self.closed is not None and self.closed >= round_
        if any(ranks.gather(float(self.is_asked and not is_closed))):
            raise Stopped

    def end(self) -> None:
        """End this process within SECONDS_TO_LEAVE of a request from now on, because nothing is left to save.

        Later steps may wait for an exchange that is gone. A request that came before counts from now.
        """
        self._is_through = self._number is not None
        if self.is_asked:
            self._leave_soon()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if self._is_through:
            self._leave_soon()
        elif self._is_allowed:
            self._raise_soon(frame)

    def _raise_soon(self, frame: FrameType | None = None) -> None:
        if self._round is None or (self.closed is not None and self.closed < self._round):
            signal.setitimer(signal.ITIMER_REAL, _SECONDS_UNTIL_AGAIN, _SECONDS_UNTIL_AGAIN)
            self._raise_in(frame)
        elif self.closed is None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds, _SECONDS_UNTIL_AGAIN)

    def _leave_soon(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_LEAVE, _SECONDS_UNTIL_AGAIN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._is_through:
            self.leave()
        elif self._is_allowed:
            self._raise_in(frame)

    def _raise_in(self, frame: FrameType | None) -> None:
        """Raise Stopped unless the frame enters or leaves a block, which would stay allowed for ever.

        The timer then raises it a moment later.
        """
        if frame is None or not (frame.f_globals is vars(contextlib) or frame.f_code is _ALLOWED):
            raise Stopped


_ALLOWED = Stopping.allowed.__wrapped__.__code__  # type: ignore[attr-defined]


NEVER_STOPPED = Stopping()  # for members that are threads: their process ends them
