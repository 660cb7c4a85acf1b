"""A datacenter replica as a member of a run: a whole replica, its data and its reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hetero_pp.data.batches import load_position
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Doing, InnerStep
from hetero_pp.model.learning_rates import LearningRates
from replica_groups.engines.engine import Engine
from replica_groups.engines.plain import PlainEngine
from replica_groups.member.outer_round import OuterRound
from stages.activity import Timing


class DatacenterMember:
    """Trains the whole model with an engine, on each of its ranks. Implements TrainingMember."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        batches: SharedBatches,
        validation: Sequence[Tensor],
        keeps_moments: bool = True,
    ) -> None:
        """`keeps_moments`: whether `undo` restores the optimizer's moments from the start of the round."""
        self.name = name
        self.parameters = engine
        self.engine = engine
        self.batches = batches
        self.validation = validation
        self._keeps_moments = keeps_moments
        self._compute_seconds = 0.0

    def follow(self, rates: LearningRates) -> None:
        self.engine.follow(rates)

    def take_share(self, share: Share, step: int) -> None:
        self.batches.take(share, step)

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
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
        """Do nothing: each step is applied immediately."""

    def start_round(self, outer: OuterRound) -> None:
        """Do nothing: a datacenter replica has no boundaries."""

    def remember(self, ahead: bool = False) -> None:
        self.engine.remember(self._keeps_moments)
        self.batches.remember(ahead)

    def undo(self, outer: OuterRound) -> None:
        outer.restore()
        self.engine.undo()
        self.batches.undo()
        self.start_round(outer)

    def relink(self, ends: LinkEnds) -> None:
        """Do nothing: there are no links to stages."""

    def evaluate(self, round_: int) -> tuple[float, int]:
        return self.engine.evaluate(self.validation), sum(tokens[:, 1:].numel() for tokens in self.validation)

    def save(self, folder: Path) -> None:
        """Write the saved state. All ranks write the same data position."""
        self.engine.save(folder / "engine")
        self.batches.save(folder)

    def load(self, folder: Path) -> None:
        self.engine.load(folder / "engine")
        load_position(self.batches, folder)

    def moments(self) -> dict[str, Tensor]:
        assert isinstance(self.engine, PlainEngine), "only `engine: torch` is audited by recomputation"
        return self.engine.whole.optimizer.moments()

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        assert isinstance(self.engine, PlainEngine), "only `engine: torch` is audited by recomputation"
        self.engine.whole.optimizer.load_moments(moments)

    def message_digests(self) -> bytes:
        """Return nothing: there are no other stages."""
        return b""

    def activity(self) -> tuple[int, bool]:
        """Return the finished micro-batches; the engine never waits for another member."""
        return self.engine.done, True

    def doing(self) -> Doing:
        return Doing.COMPUTING

    def timing(self) -> Timing:
        seconds, self._compute_seconds = self._compute_seconds, 0.0
        return Timing(seconds)
