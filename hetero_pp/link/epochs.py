"""The links between two neighbours, one after the other: each has an epoch, and a newer one ends those before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from hetero_pp.errors import LinkClosed, LinkTimeout, Refused


class Abortable(Protocol):
    """See LinkEnd."""

    def abort(self, cause: str) -> None: ...


End = TypeVar("End", bound=Abortable)


class Epochs(Generic[End]):
    """The newest link with one neighbour: it may come before this member is at its epoch, and then waits for that.

    Safe to use from several threads.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._changed = threading.Condition()
        self._epoch = 0
        """No link of an epoch before it is of use."""
        self._cause = ""
        self._end: End | None = None
        """The link of that epoch, once it is here."""
        self._is_taken = False

    def come(self, epoch: int, make: Callable[[], End]) -> End:
        """A link of this epoch is here, as `make` makes it; one of an older epoch is aborted.

        Raises LinkClosed if its epoch is over, Refused if there is one of that epoch already.
        """
        with self._changed:
            if epoch < self._epoch:
                raise LinkClosed(f"found epoch {epoch}, expected at least {self._epoch}")
            if epoch == self._epoch and self._end is not None:
                raise Refused(f"{self.peer} is already connected")
            cause = f"{self.peer} is at epoch {epoch}"
            older = self._advance(epoch, cause)
            self._end = end = make()
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)
        return end

    def take(self, epoch: int, timeout: float | None = None) -> End:
        """The link of this epoch, once it is here; all before it are over.

        Raises LinkClosed if this epoch is over too, LinkTimeout after `timeout` seconds.
        """
        self.give_up(epoch, f"this member is at epoch {epoch}")
        with self._changed:
            if not self._changed.wait_for(lambda: self._epoch > epoch or self._end is not None, timeout):
                raise LinkTimeout(f"{self.peer} did not connect within {timeout:g} s")
            if self._epoch > epoch:
                raise LinkClosed(self._cause)
            if self._is_taken or self._end is None:
                raise LinkClosed(f"the link with {self.peer} of epoch {epoch} was taken before")
            self._is_taken = True
            return self._end

    def leave(self, end: End) -> None:
        """This link came to nothing: another one of its epoch may come."""
        with self._changed:
            if self._end is end:
                self._end, self._is_taken = None, False

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over: whoever uses one, or waits for one, gets LinkClosed(cause)."""
        with self._changed:
            older = self._advance(before, cause)
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def _advance(self, epoch: int, cause: str) -> End | None:
        """Go to an epoch, if it is newer; the link that is over by that."""
        if epoch <= self._epoch:
            return None
        self._epoch, self._cause = epoch, cause
        older, self._end, self._is_taken = self._end, None, False
        return older
