"""Which of two neighbouring stages dials the other, and where."""

from __future__ import annotations

from typing import NamedTuple

from hetero_pp.links import RELAYED, is_loopback


class Listens(NamedTuple):
    """Where a stage says that it listens."""

    address: str = ""
    """HOST:PORT; empty or `relay`: nowhere."""
    is_reached: bool | None = None
    """Whether the exchange has reached it there; None where that is not known."""

    @property
    def hope(self) -> int:
        """To reach it: the more, the better."""
        if self.address in ("", RELAYED):
            return 0
        if is_loopback(self.address):  # who is on its machine reaches any other address of that, too
            return 1
        return {False: 2, None: 3, True: 4}[self.is_reached]


class Way(NamedTuple):
    """Of one stage link: what each end dials; one of them is empty, and its end is dialled."""

    before: str = ""
    after: str = ""


def way(before: Listens, after: Listens) -> Way:
    """Of the link between two stages: the one is dialled that is more likely to be reached, and else the stage after.

    Who is not reached by the exchange may still be reached by its neighbour, where the two are beside each other.
    """
    return Way(after=before.address) if before.hope > after.hope else Way(before=after.address)
