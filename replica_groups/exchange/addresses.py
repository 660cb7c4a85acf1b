"""Addresses of stages, and which of two neighbouring stages dials the other."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from hetero_pp.config.links import RELAYED, is_loopback
from replica_groups.exchange.run_state import RunState


class Listens(NamedTuple):
    """Where a stage says that it listens."""

    address: str = ""
    """HOST:PORT; empty or `relay`: nowhere."""
    is_reached: bool | None = None
    """Whether the exchange has reached the stage there; None: not known."""

    @property
    def hope(self) -> int:
        """Likelihood that the stage is reached: higher is better."""
        if self.address in ("", RELAYED):
            return 0
        if is_loopback(self.address):  # a stage on the same machine also reaches its other addresses
            return 1
        return {False: 2, None: 3, True: 4}[self.is_reached]


def is_before_dialled(before: Listens, after: Listens) -> bool:
    """Return whether the stage before is dialled by the one after, because it is more likely to be reached.

    In doubt the stage after is dialled. A stage that the exchange does not reach may still be reached by a neighbour
    beside it.
    """
    return before.hope > after.hope


class Addresses:
    """Where the members of a run listen. Thread-safe, except `note`."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._addresses: dict[str, str] = {}
        self._dialled: dict[str, Listens] = {}
        """Result of dialling each member, which may not be where the member listens by the time it joins."""

    @property
    def known(self) -> Set[str]:
        """Members that have joined this exchange."""
        return self._addresses.keys()

    def note(self, member: str, address: str) -> None:
        """Note where a member listens. The caller holds the lock of the run's state."""
        self._addresses[member] = address

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        """Note whether a member was reached at an address; None: it was not dialled."""
        with self._state.changed:
            self._dialled[member] = Listens(address, is_reached)

    def of(self, member: str) -> str:
        """Return where the holder of a slot listens; empty if the slot is free or the holder does not listen."""
        return self._addresses.get(member, "") if self._state.coordinator.slot(member).held else ""

    def to_dial(self, member: str) -> tuple[str, str]:
        """Return where a stage dials the one before it and the one after.

        An address is empty if that neighbour dials, or does not exist.
        """
        before, after = self._state.beside(member)
        with self._state.changed:
            own = self._listens(member)
            up, down = (self._listens(one) if one else Listens() for one in (before, after))
            upstream = up.address if is_before_dialled(up, own) else ""
            return upstream, "" if is_before_dialled(own, down) else down.address

    def _listens(self, member: str) -> Listens:
        address, dialled = self.of(member), self._dialled.get(member)
        return dialled if dialled is not None and dialled.address == address else Listens(address)
