"""The links between two neighbours, one after the other: each has an epoch, and a newer one ends those before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from hetero_pp.errors import LinkClosed, LinkTimeout, Refused


class Replaceable(Protocol):
    """An end of a link that another one may take the place of."""

    @property
    def is_connected(self) -> bool:
        """Whether the neighbour is there."""

    def abort(self, cause: str) -> None:
        """See LinkEnd."""


End = TypeVar("End", bound=Replaceable)


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

    def come(self, epoch: int, make: Callable[[], End], is_same: Callable[[End], bool] = lambda end: False) -> End:
        """A link of this epoch is here, as `make` makes it; one of an older epoch is aborted.

        If there is one of that epoch already, it is given if it `is_same`; one that is cut off is aborted, as the
        neighbour has begun anew. Raises LinkClosed if the epoch is over, Refused if the neighbour is there.
        """
        with self._changed:
            if epoch < self._epoch:
                raise LinkClosed(f"found generation {epoch}, expected at least {self._epoch}")
            present = self._end if epoch == self._epoch else None
            if present is not None and is_same(present):
                return present
            if present is not None and present.is_connected:
                raise Refused(f"{self.peer} is already connected")
            cause = f"{self.peer} has restarted" if present is not None else f"{self.peer} is at generation {epoch}"
            older = self._replace(epoch, cause)
            self._end = end = make()
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)
        return end

    def of(self, epoch: int) -> End | None:
        """The link of this epoch, if it is here."""
        with self._changed:
            return self._end if epoch == self._epoch else None

    def take(self, epoch: int, timeout: float | None = None) -> End:
        """The link of this epoch, once it is here. All before it are over, one of this epoch that was taken too.

        Raises LinkClosed if this epoch is over too, LinkTimeout after `timeout` seconds.
        """
        self.drop(epoch, f"this member is at generation {epoch}")
        with self._changed:
            if not self._changed.wait_for(lambda: self._epoch > epoch or self._end is not None, timeout):
                raise LinkTimeout(f"{self.peer} did not connect within {timeout:g} s")
            if self._epoch > epoch or self._end is None:
                raise LinkClosed(self._cause)
            self._is_taken = True
            return self._end

    def drop(self, epoch: int, cause: str) -> None:
        """Links of epochs before this one are over, and one of this epoch that was taken."""
        with self._changed:
            is_over = epoch > self._epoch or (epoch == self._epoch and self._is_taken)
            older = self._replace(epoch, cause) if is_over else None
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over: whoever uses one, or waits for one, gets LinkClosed(cause)."""
        with self._changed:
            older = self._replace(before, cause) if before > self._epoch else None
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def _replace(self, epoch: int, cause: str) -> End | None:
        """Make room for a link of this epoch; the one that is over by that."""
        self._epoch, self._cause = epoch, cause
        older, self._end, self._is_taken = self._end, None, False
        return older
