"""The interface of what a training loop trains: a whole replica, or one stage of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Doing, InnerStep
from hetero_pp.model.learning_rates import LearningRates
from replica_groups.engines.parameter_store import ParameterStore
from replica_groups.member.outer_round import OuterRound
from stages.activity import Timing


class TrainingMember(Protocol):
    """A whole replica, or one stage of a replica."""

    @property
    def parameters(self) -> ParameterStore:
        """The trained parameters."""

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""

    def take_share(self, share: Share, step: int) -> None:
        """Read this share of the text from step `step` on, the first step of a round."""

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
        """Run one inner step.

        Return loss, norm and learning rate where known, and whether it was announced as the last.

        `is_last`: whether this member, if it decides the length of a round, announces that no other step follows.
        """

    def end_inner_loop(self, round_: int) -> None:
        """Ensure that every step has been applied."""

    def remember(self, ahead: bool = False) -> None:
        """Copy at the start of a round what `undo` restores. The outer round keeps the synchronised parameters.

        `ahead`: the previous round is undecided, so its text may have to be read again.
        """

    def undo(self, outer: OuterRound) -> None:
        """Restore the remembered state and theta of the outer round, so that the round can be repeated bit for bit.

        May be called repeatedly. A step in progress is dropped at any point. Moments are restored only if the member
        keeps them (`states.undo`).
        """

    def relink(self, ends: LinkEnds) -> None:
        """Use other links to the neighbouring stages, after `undo` or between two inner loops."""

    def start_round(self, outer: OuterRound) -> None:
        """Update what is derived from the synchronised parameters: the split of the token embedding."""

    def evaluate(self, round_: int) -> tuple[float, int] | None:
        """Return the synchronised parameters' loss in this replica's forward, and the tokens; None where unknown."""

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on and that is not in a run checkpoint."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, in a member that started from the run checkpoint of the same round."""

    @property
    def batches(self) -> SharedBatches | None:
        """Training data; None if the member reads none."""

    def moments(self) -> dict[str, Tensor]:
        """Return what the next step depends on beside theta and the position in the data, as tensors in use."""

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load the result of `moments`. Raises ValueError, IndexError or KeyError for tensors of another member."""

    def message_digests(self) -> bytes:
        """Return the digests of the messages that it exchanged with other stages in this round; empty without any."""

    def activity(self) -> tuple[int, bool]:
        """Return a number that changes with progress, and whether the member is busy.

        Safe to call from another thread.
        """

    def doing(self) -> Doing:
        """Return what the member does in its inner loop at this moment. Safe to call from another thread."""

    def timing(self) -> Timing:
        """Return the seconds of compute and of waiting for neighbours since the last call."""
