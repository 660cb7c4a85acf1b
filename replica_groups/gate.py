"""Where the members of a run wait between rounds, if somebody says round by round how far they may train."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hetero_pp.errors import RunFailed

SECONDS_BETWEEN_SIGNALS = 1.0
"""A signal that comes between Python's last look for one and its sleep is seen when that ends: Ctrl-C would be lost."""


class Gate:
    """Lets members, each a thread of this process, into all rounds up to one; nobody is let in before `open`."""

    def __init__(self, members: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._open = 0
        self._here = dict.fromkeys(members, 0)
        """The round that each member was let into, or waits for; without those that have left."""
        self._cause: str | None = None

    def open(self, round_: int) -> None:
        """Let members into all rounds up to this one."""
        with self._changed:
            self._open = round_
            self._changed.notify_all()

    def enter(self, member: str, round_: int) -> bool:
        """Wait until this round is open; whether it was not. Raises RunFailed once the gate is shut, also in a round
        that was open.
        """
        with self._changed:
            self._here[member] = round_
            self._changed.notify_all()
            was_open = round_ <= self._open
            self._changed.wait_for(lambda: self._cause is not None or round_ <= self._open)
            if self._cause is not None:
                raise RunFailed(self._cause)
            return not was_open

    def leave(self, member: str) -> None:
        """This member trains no more."""
        with self._changed:
            del self._here[member]
            self._changed.notify_all()

    def shut(self, cause: str) -> None:
        """Let nobody in any more. The first cause stays."""
        with self._changed:
            self._cause = self._cause or cause
            self._changed.notify_all()

    def wait_for_members(self) -> None:
        """Until each has left or waits for a round that is not open, or the gate is shut."""

        def are_here() -> bool:
            return self._cause is not None or all(round_ > self._open for round_ in self._here.values())

        with self._changed:
            while not self._changed.wait_for(are_here, SECONDS_BETWEEN_SIGNALS):
                pass
