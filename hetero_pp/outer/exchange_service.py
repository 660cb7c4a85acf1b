"""What a member of a run asks of the exchange, over the network or in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress

FIRST_TOLD, MOST_BETWEEN = 10.0, 600.0
"""Seconds after which somebody who waits says so for the first time, and at most between two times."""


@dataclass(frozen=True)
class AvailableStates:
    """What a member could go on from: the rounds of which it has a sound state, and what is wrong with others."""

    rounds: frozenset[int] = frozenset()
    damaged: tuple[str, ...] = ()


NO_STATES = AvailableStates()


@dataclass(frozen=True)
class Assignment:
    """What a member has to do next."""

    round: int
    """To train, from theta after the round before; 0: the run is over."""
    epoch: int
    """How often its replica was formed: of its links, and of what it contributes."""
    downstream: str = ""
    """Where the stage after is to be dialled; empty: that dials, or there is none."""
    heals: bool = False
    """Whether it has to take theta from the log again: it holds other bits than the others."""
    is_first: bool = False
    """Whether this is the first round since the run began, or went on."""
    elapsed: float = 0.0
    """Seconds since the round opened."""
    upstream: str = ""
    """Where the stage before is to be dialled, likewise."""
    trained: int = 0
    """The round that all of the replica has trained beyond theta, each place of it; 0: there is none."""
    changed: int = 0
    """Changes.mark of those that the run has, of which the member may not have heard."""


@dataclass(frozen=True)
class Standing:
    """What the exchange thinks of a member."""

    is_over: bool = False
    """Its term: it has to join again."""
    suspended: int | None = None
    """The epoch that is over, if it has to return to the start of the round."""
    cause: str = ""


class ExchangeService(Protocol):
    """The exchange of contributions, as one member sees it.

    Every call may raise Refused (the request is wrong) or RunFailed (the run is over); every call after `join` also
    TermOver (somebody else may hold this member's place: it has to join again).
    """

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """Which run this is, for a member whose configuration is `configuration` (RunSpec.agreed).

        `tokens`: the digest of those that the member reads (TokenStore.digest); empty if it reads none, or a stream.

        Refused, with the keys that differ, if it is not of this run; and if others of it read other tokens.
        """

    def join(
        self, member: str, address: str, available: AvailableStates = NO_STATES, process: str | None = None
    ) -> int:
        """Take the place of this name: tell where the member listens for those beside it (empty: nowhere), and what
        it holds. Waits until the place is vacant. `process` names the caller, so that it may ask again.

        Returns for the how-manyeth time the place is held.
        """

    def last_round(self) -> int:
        """The last round that is decided, 0 if there is none. Waits until the run begins: until all have joined."""

    def changes(self) -> Changes:
        """Keys that were changed as the run went on. Waits as `last_round` does."""

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        """After which round the newest snapshot is, and its tensors' names. Waits as `last_round` does."""

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """Tensors of a snapshot, by default the newest: parameters by name, the basis, the outer momentum."""

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        """What to do next, for a member that holds theta after round `holds`, and listens at an address for the stage
        before; waits until all of its replica asks. `trained`: the last round whose training it has, though no record
        has it (it was trained ahead, or was not counted): of use to it only if all of its replica have that; 0: none.
        """

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        """Tell that the member is there, what it trains, and that it does something (another `progress`).

        `computes`: it is busy, and waits for nobody.
        """

    def broken(self, member: str, epoch: int, cause: str) -> None:
        """Tell that the member cannot reach a neighbour: a stage of its replica is missing, if it is not already."""

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """Hand in one blob of this member's replica for a round, of so many inner steps. May be repeated.

        Raises Suspended if the replica is formed anew.
        """

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """What was counted in a round; waits until it is closed. Names the member that waits, if it is one.

        Raises Suspended if its replica has to train the round again.
        """

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """One blob of a closed round."""

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Tell the hashes of the parameters held after a round."""

    def report(self, reports: Sequence[Report]) -> None:
        """Tell what happened."""
