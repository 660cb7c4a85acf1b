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


class ExchangeService(Protocol):
    """The exchange of contributions, as one member sees it.

    Every call may raise Refused (the request is wrong) or RunFailed (another member failed, the run is over).
    """

    def agree(self, member: str, configuration: str) -> str:
        """Which run this is, for a member whose configuration is `configuration` (RunSpec.agreed).

        Refused, with the keys that differ, if it is not of this run.
        """

    def join(self, member: str, address: str, available: AvailableStates = NO_STATES) -> None:
        """Tell that this member is here, what it holds, and where it listens for the stage before (empty: nowhere)."""

    def last_round(self) -> int:
        """The round after which the run goes on: 0 if it begins. Waits until that is decided: until all have joined."""

    def changes(self) -> Changes:
        """Keys that were changed as the run went on. Waits as `last_round` does."""

    def locate(self, member: str) -> str:
        """The address of another member; waits until it has joined."""

    def snapshot(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of the newest snapshot: parameters by name, and the subspace's basis."""

    def deposit(self, member: str, address: BlobAddress, data: bytes) -> None:
        """Hand in one blob of this member's replica for the current round."""

    def record(self, round_: int) -> RoundRecord:
        """What was counted in a round; waits until it is closed."""

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """One blob of a closed round."""

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Tell the hashes of the parameters held after a round. Raises ReplicasDiffer if another holder's differ."""

    def report(self, reports: Sequence[Report]) -> None:
        """Tell what happened."""
