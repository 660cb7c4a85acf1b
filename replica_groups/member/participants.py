"""One stage of a participant group as a member of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.core.tensor_files import save_object
from hetero_pp.data.batches import load_position
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Doing, InnerStep
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.transformer import EMBEDDING
from replica_groups.engines.moments import Moments
from replica_groups.engines.parameter_store import LocalParameters
from replica_groups.member.outer_round import OuterRound
from stages.activity import Timing
from stages.worker import StageWorker

_STATE = "stage.pt"


class StageMember:
    """One stage of a replica. Implements TrainingMember.

    Only the first stage reads data. On other stages `batches` is None and `validation` is empty, but every stage knows
    the number of validation batches, `count`.
    """

    def __init__(
        self,
        replica: str,
        worker: StageWorker,
        batches: SharedBatches | None,
        validation: Sequence[Tensor],
        count: int,
        keeps_moments: bool = True,
        folder: Path | None = None,
    ) -> None:
        """`keeps_moments`: whether `undo` restores the optimizers' moments from the start of the round.

        `folder` holds their copies (Moments).
        """
        self.replica = replica
        self.worker = worker
        self.batches = batches
        self.validation = validation
        self.validation_count = count
        self.parameters = LocalParameters(worker.stage.parameters)
        self._moments, self._keeps_moments = Moments(worker.stage.optimizers, folder=folder), keeps_moments

    def follow(self, rates: LearningRates) -> None:
        self.worker.stage.follow(rates)

    def take_share(self, share: Share, step: int) -> None:
        if self.batches is not None:
            self.batches.take(share, step)

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
        """Run one inner step.

        The last stage reports the loss; the first reports gradient norm, learning rate and tokens.
        """
        report = InnerStep(replica=self.replica, round=round_, step=step)
        self.worker.stage.enter_round(round_)
        tokens = None if self.batches is None else self.batches.train(global_step)
        loss = self.worker.inner_step(round_, step, global_step, tokens, is_last)
        if self.worker.was_last:
            report.is_last = True
        if loss is not None:
            report.loss = loss
        if tokens is not None:
            report.gradient_norm = self.worker.gradient_norm
            report.learning_rate = self.worker.learning_rate
            report.tokens = tokens[:, 1:].numel()
        return report

    def end_inner_loop(self, round_: int) -> None:
        self.worker.flush(round_)

    def start_round(self, outer: OuterRound) -> None:
        if EMBEDDING in outer.theta:
            self.worker.stage.split_embedding(outer.theta[EMBEDDING])

    def remember(self, ahead: bool = False) -> None:
        self._moments.remember(self._keeps_moments)
        if self._keeps_moments and (anchors := self.worker.stage.anchors) is not None:
            anchors.remember()
        if self.batches is not None:
            self.batches.remember(ahead)

    def undo(self, outer: OuterRound) -> None:
        """Restore the start of the round. Call `relink` afterwards, because the old links are unusable."""
        self.worker.drop()
        outer.restore()
        self._moments.restore()
        if (anchors := self.worker.stage.anchors) is not None:
            anchors.restore()
        if self.batches is not None:
            self.batches.undo()
        self.start_round(outer)

    def relink(self, ends: LinkEnds) -> None:
        self.worker.relink(ends.upstream, ends.downstream)
        self.worker.transcript.enter(ends.generation, ends.signer, ends.holders)

    def evaluate(self, round_: int) -> tuple[float, int] | None:
        self.worker.stage.enter_round(round_)
        outcome = self.worker.evaluate(round_, self.validation, self.validation_count)
        return None if outcome is None else (outcome[0], outcome[1] * self.worker.settings.sequence_length)

    def save(self, folder: Path) -> None:
        save_object(self.worker.stage.state(), folder / _STATE)
        if self.batches is not None:
            self.batches.save(folder)

    def load(self, folder: Path) -> None:
        self.worker.stage.load(torch.load(folder / _STATE, map_location="cpu", weights_only=True))
        if self.batches is not None:
            load_position(self.batches, folder)

    def moments(self) -> dict[str, Tensor]:
        return self.worker.stage.moments()

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        self.worker.stage.load_moments(moments)

    def message_digests(self) -> bytes:
        return self.worker.transcript.to_bytes()

    def activity(self) -> tuple[int, bool]:
        return self.worker.activity.done, self.worker.is_computing

    def doing(self) -> Doing:
        return self.worker.activity.doing

    def timing(self) -> Timing:
        timing, self.worker.timing = self.worker.timing, Timing()
        return timing
