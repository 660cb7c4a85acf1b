"""A datacenter replica as a member of a run: a whole replica, its data, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hetero_pp.data.batches import load_position
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.learning_rates import LearningRates
from hetero_pp.link.ends import LinkEnds
from hetero_pp.messages.messages_pb2 import InnerStep
from replica_groups.engines.engine import Engine
from replica_groups.outer_round import OuterRound


class DatacenterMember:
    """Trains the whole model with an engine. Implements TrainingMember; on several ranks, on every one."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        batches: SharedBatches,
        validation: Sequence[Tensor],
        keeps_moments: bool = True,
    ) -> None:
        """`keeps_moments`: whether `undo` brings back the moments of the round's start, or leaves them as they are."""
        self.name = name
        self.parameters = engine
        self.engine = engine
        self.batches = batches
        self.validation = validation
        self._keeps_moments = keeps_moments
        self._compute_seconds = 0.0

    def follow(self, rates: LearningRates) -> None:
        """See TrainingMember."""
        self.engine.follow(rates)

    def take_share(self, share: Share, step: int) -> None:
        """See TrainingMember."""
        self.batches.take(share, step)

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
        """See TrainingMember."""
        started = time.perf_counter()
        tokens = self.batches.train(global_step)
        loss, norm, rate = self.engine.inner_step(tokens, global_step)
        self._compute_seconds += time.perf_counter() - started
        return InnerStep(
            replica=self.name,
            round=round_,
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=tokens[:, 1:].numel(),
            is_last=True if is_last else None,
        )

    def end_inner_loop(self, round_: int) -> None:
        """See TrainingMember. Every step is applied at once here."""

    def start_round(self, outer: OuterRound) -> None:
        """See TrainingMember. Nothing is compressed within a datacenter."""

    def remember(self, ahead: bool = False) -> None:
        """See TrainingMember."""
        self.engine.remember(self._keeps_moments)
        self.batches.remember(ahead)

    def undo(self, outer: OuterRound) -> None:
        """See TrainingMember."""
        outer.restore()
        self.engine.undo()
        self.batches.undo()
        self.start_round(outer)

    def relink(self, ends: LinkEnds) -> None:
        """See TrainingMember. It has no links to stages."""

    def evaluate(self, round_: int) -> tuple[float, int]:
        """See TrainingMember."""
        return self.engine.evaluate(self.validation), sum(tokens[:, 1:].numel() for tokens in self.validation)

    def save(self, folder: Path) -> None:
        """See TrainingMember. Ranks all write the same position."""
        self.engine.save(folder / "engine")
        self.batches.save(folder)

    def load(self, folder: Path) -> None:
        """See TrainingMember."""
        self.engine.load(folder / "engine")
        load_position(self.batches, folder)

    def activity(self) -> tuple[int, bool]:
        """See TrainingMember: a step is over or under way, and waits for nobody."""
        return 0, True

    def timing(self) -> tuple[float, float]:
        """See TrainingMember."""
        seconds, self._compute_seconds = self._compute_seconds, 0.0
        return seconds, 0.0
