"""How far something long is, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]
"""(what is done, the share of it that is done, from 0 to 1). Called often: whoever shows it leaves most of them out."""


def untold(what: str, share: float) -> None:
    """Where nobody wants to know."""


class NowAndThen:
    """Hands on what is told after `first` seconds, and then when as many have passed again as `later` makes of them."""

    def __init__(
        self, tell: OnProgress, first: float, later: Callable[[float], float], clock: Callable[[], float]
    ) -> None:
        self._tell, self._later, self._clock = tell, later, clock
        self._wait = first
        self._due = clock() + first

    def __call__(self, doing: str, share: float) -> None:
        """See OnProgress."""
        now = self._clock()
        if now >= self._due:
            self._tell(doing, share)
            self._wait = self._later(self._wait)
            self._due = now + self._wait
