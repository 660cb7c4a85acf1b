"""Gate at which members wait between rounds while a caller allows training round by round."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hetero_pp.core.errors import RunFailed

SECONDS_BETWEEN_SIGNALS = 1.0
"""Interval at which a waiting main thread wakes, so that a signal such as Ctrl-C is handled.

A signal that arrives between Python's last check and the start of the wait would otherwise be lost.
"""


class Gate:
    """Lets members, each a thread of this process, enter all rounds up to a limit.

    The limit is 0 until `open` is called.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._open = 0
        self._here = dict.fromkeys(members, 0)
        """Member -> round that it entered or waits for. Members that left are removed."""
        self._cause: str | None = None

    def open(self, round_: int) -> None:
        """Let members enter all rounds up to this one."""
        with self._changed:
            self._open = round_
            self._changed.notify_all()

    def enter(self, member: str, round_: int) -> bool:
        """Wait until this round is open; return whether the member had to wait.

        Raises RunFailed once the gate is shut, even for a round that was open.
        """
        with self._changed:
            if member in self._here:  # others do not wait for a member that has left
                self._here[member] = round_
            self._changed.notify_all()
            was_open = round_ <= self._open
            self._changed.wait_for(lambda: self._cause is not None or round_ <= self._open)
            if self._cause is not None:
                raise RunFailed(self._cause)
            return not was_open

    def leave(self, member: str) -> None:
        """Remove a member that has stopped training; do nothing if it has left."""
        with self._changed:
            self._here.pop(member, None)
            self._changed.notify_all()

    def shut(self, cause: str) -> None:
        """Let no member enter any more. The first cause is kept."""
        with self._changed:
            self._cause = self._cause or cause
            self._changed.notify_all()

    def wait_for_members(self) -> None:
        """Wait until each member has left or waits for a round that is not open, or until the gate is shut."""

        def are_here() -> bool:
            return self._cause is not None or all(round_ > self._open for round_ in self._here.values())

        with self._changed:
            while not self._changed.wait_for(are_here, SECONDS_BETWEEN_SIGNALS):
                pass
