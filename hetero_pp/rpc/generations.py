"""Successive links between two neighbours. Each has a generation, which ends all earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetero_pp.core.errors import LinkClosed, LinkTimeout, Refused
from hetero_pp.rpc.link_end import GrpcLinkEnd


class Generations:
    """The newest link to one neighbour. A link may arrive before this member reaches its generation, and then waits.

    Safe to use from several threads.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._changed = threading.Condition()
        self._generation = 0
        """Current generation. Links of earlier generations are ended."""
        self._cause = ""
        self._end: GrpcLinkEnd | None = None
        """Link of the current generation, once it has arrived."""
        self._is_taken = False

    def come(
        self,
        generation: int,
        make: Callable[[], GrpcLinkEnd],
        is_same: Callable[[GrpcLinkEnd], bool] = lambda end: False,
    ) -> GrpcLinkEnd:
        """Register a link of a generation, made by `make`, and abort a link of an earlier generation.

        If the generation already has a link, returns it if `is_same`. A disconnected one is aborted, because the
        neighbour has restarted. Raises LinkClosed if the generation has ended, Refused if the neighbour is already
        connected.
        """
        with self._changed:
            if generation < self._generation:
                raise LinkClosed(f"found generation {generation}, expected at least {self._generation}")
            present = self._end if generation == self._generation else None
            if present is not None and is_same(present):
                return present
            if present is not None and present.is_connected:
                raise Refused(f"{self.peer} is already connected")
            cause = (
                f"{self.peer} has restarted" if present is not None else f"{self.peer} is at generation {generation}"
            )
            older = self._replace(generation, cause)
            self._end = end = make()
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)
        return end

    def of(self, generation: int) -> GrpcLinkEnd | None:
        """Return the link of this generation if it has arrived, otherwise None."""
        with self._changed:
            return self._end if generation == self._generation else None

    def take(self, generation: int, timeout: float | None = None) -> GrpcLinkEnd:
        """Wait for the link of this generation and return it.

        Ends earlier links, and a link of this generation that was already taken. Raises LinkClosed if this generation
        has ended, LinkTimeout after `timeout` seconds.
        """
        self.drop(generation, f"this member is at generation {generation}")
        with self._changed:
            if not self._changed.wait_for(lambda: self._generation > generation or self._end is not None, timeout):
                raise LinkTimeout(f"{self.peer} did not connect within {timeout:g} s")
            if self._generation > generation or self._end is None:
                raise LinkClosed(self._cause)
            self._is_taken = True
            return self._end

    def drop(self, generation: int, cause: str) -> None:
        """End links of earlier generations, and a link of this generation that was taken."""
        self._end_before(generation, cause, also_taken=True)

    def give_up(self, before: int, cause: str) -> None:
        """End links of generations before `before`. Their users, and callers waiting for one, get LinkClosed(cause)."""
        self._end_before(before, cause)

    def _end_before(self, generation: int, cause: str, also_taken: bool = False) -> None:
        with self._changed:
            is_over = generation > self._generation or (
                also_taken and generation == self._generation and self._is_taken
            )
            older = self._replace(generation, cause) if is_over else None
            self._changed.notify_all()
        if older is not None:
            older.abort(cause)

    def _replace(self, generation: int, cause: str) -> GrpcLinkEnd | None:
        """Make room for a link of this generation, and return the link that it replaces."""
        self._generation, self._cause = generation, cause
        older, self._end, self._is_taken = self._end, None, False
        return older
