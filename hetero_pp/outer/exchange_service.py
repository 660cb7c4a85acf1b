"""Interface of the exchange to a member of a run, over the network or in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress

FIRST_TOLD, MOST_BETWEEN = 10.0, 600.0
"""Seconds before a waiting process reports it for the first time, and the longest time between two reports."""


@dataclass(frozen=True)
class AvailableStates:
    """Rounds that a member could resume from, because its state is sound, and the errors of its damaged states."""

    rounds: frozenset[int] = frozenset()
    damaged: tuple[str, ...] = ()


NO_STATES = AvailableStates()


@dataclass(frozen=True)
class Assignment:
    """Next task of a member."""

    round: int
    """Round to train, from theta after the previous round; 0: the run is over."""
    epoch: int
    """Generation (`epoch`) of the replica: number of times that it was formed. Links and contributions carry it."""
    downstream: str = ""
    """Address of the next stage, to dial; empty: that stage dials, or there is none."""
    heals: bool = False
    """Whether the member must recover: fetch theta from the log again, because its bits differ from the others'."""
    is_first: bool = False
    """Whether this is the first round since the run began or resumed."""
    elapsed: float = 0.0
    """Seconds since the round opened."""
    upstream: str = ""
    """Address of the previous stage, to dial; empty: that stage dials, or there is none."""
    trained: int = 0
    """Round beyond theta that every slot of the replica has trained; 0: none."""
    upstream_holder: int | None = None
    """Holder number of the previous stage (see Memberships); 0: no ticket; None: unknown, or there is no such stage."""
    downstream_holder: int | None = None
    """Holder number of the next stage, likewise."""
    changed: int = 0
    """Changes.mark of the run's changes, some of which the member may not know yet."""


class HeldBy(NamedTuple):
    """Holder of a slot (`place`)."""

    place: str
    holder: int
    """Number of the ticket's holder at this place; 0 without a ticket."""
    term: int
    """Incarnation of the member."""


@dataclass(frozen=True)
class Standing:
    """Status of a member, as the exchange sees it."""

    is_over: bool = False
    """Whether its incarnation (term) is over, so that it must join again."""
    suspended: int | None = None
    """Generation that is over, if the member must return to the start of the round."""
    cause: str = ""


class ExchangeService(Protocol):
    """The exchange of contributions, as one member sees it.

    Every call may raise Refused (the request is wrong) or RunFailed (the run is over). Every call after `join` may also
    raise TermOver: another process may hold this member's slot, so the member must join again.
    """

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """Return the name of the run, for a member whose configuration is `configuration` (RunSpec.agreed).

        `tokens`: the digest of the tokens that the member reads (TokenStore.digest); empty if it reads none, or a
        stream. Raises Refused, with the keys that differ, if the configuration is another run's, or if other members
        read other tokens.
        """

    def join(
        self, member: str, address: str, available: AvailableStates = NO_STATES, process: str | None = None
    ) -> int:
        """Take the slot of this name, and wait until it is vacant.

        `address`: where the member listens for neighbouring stages; empty: nowhere. `available`: the states that it
        holds. `process` names the caller, so that it may ask again. Returns the incarnation: how many times the slot
        was taken.
        """

    def last_round(self) -> int:
        """Return the last decided round, 0 if there is none. Waits until all members have joined and the run begins."""

    def changes(self) -> Changes:
        """Return the keys that were changed when the run resumed. Waits as `last_round` does."""

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        """Return the round of the newest snapshot, and its tensors' names. Waits as `last_round` does."""

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """Return tensors of a snapshot, by default the newest: parameters by name, the basis, the outer momentum."""

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        """Return a member's next task, once all members of its replica ask for one.

        `holds`: the round after which the member holds theta. `address`: where it listens for the previous stage.
        `trained`: the last round that it has trained but no record has, because it was trained ahead or excluded; 0:
        none. It is used only if all members of the replica have trained that round.
        """

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        """Send a heartbeat: the member is alive, what it trains, and its progress (another `progress` if it moved).

        `computes`: it is busy, and does not wait for another process.
        """

    def broken(self, member: str, epoch: int, cause: str, blames: str = "") -> None:
        """Report that the member cannot reach a neighbour; a stage of its replica counts as missing from then on.

        `blames`: the neighbour that sent a malformed message; empty if the link only broke.
        """

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """Deposit one blob of the replica's contribution to a round, after `steps` inner steps. May be repeated.

        Raises Suspended if the replica is formed anew.
        """

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """Return the record of the contributions included in a round; waits until the round is closed.

        `member` names the waiting member, if it is one. Raises Suspended if its replica must train the round again.
        """

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """Return one blob of a closed round."""

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Send the hashes of the parameters held after a round."""

    def report(self, reports: Sequence[Report]) -> None:
        """Send reports of events."""
