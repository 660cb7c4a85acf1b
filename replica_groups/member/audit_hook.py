"""The interface of a member to audits. Without audits nothing happens; replica_groups/audit fills it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages import messages_pb2 as pb
from replica_groups.member.inner_loops import StepsTaken
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import TrainingMember


class MemberAudit:
    """A member's part in the audits of a run that has none."""

    undoes_uncounted = False  # whether a round that does not count the member leaves no trace in its state

    def begin(self, round_: int, committed: bytes) -> None:
        """Begin a round. `committed`: digest of the state that the exchange expects; empty: a fresh one."""

    def trains(self, round_: int) -> None:
        """Note that the inner steps of a round begin; with overlap, before the round before it is decided."""

    def contributes(self, round_: int, steps: int) -> None:
        """Note that the member is about to compress and send its contribution to a round."""

    def show(self, asked: pb.Asked) -> None:
        """Begin to send to the exchange what it asked for."""

    def wait(self, allowed_to_stop: AbstractContextManager[None]) -> None:
        """Wait until the exchange has what it asked for, within limits; a wait may end by Stopped."""


NOT_AUDITED = MemberAudit()

AuditedMember = Callable[[RunSpec, RunFolder, MemberSession, TrainingMember, OuterRound, StepsTaken], MemberAudit]
"""Returns the part of one member. It may note the contribution, and set the session's commitment, after compression."""
