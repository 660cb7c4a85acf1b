"""A datacenter replica as a member of a run: a whole replica, its data, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hetero_pp.data.batches import Batches
from hetero_pp.rpc.messages_pb2 import InnerStep
from replica_groups.outer_round import OuterRound
from replica_groups.whole import WholeReplica


class DatacenterMember:
    """Trains the whole model with plain PyTorch. Implements TrainingMember."""

    def __init__(self, whole: WholeReplica, batches: Batches, validation: Sequence[Tensor]) -> None:
        self.whole = whole
        self.batches = batches
        self.validation = validation
        self._compute_seconds = 0.0

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """See TrainingMember."""
        return self.whole.parameters

    def inner_step(self, round_: int, step: int, global_step: int) -> InnerStep:
        """See TrainingMember."""
        started = time.perf_counter()
        tokens = self.batches.train(global_step)
        loss, norm, rate = self.whole.inner_step(tokens, global_step)
        self._compute_seconds += time.perf_counter() - started
        return InnerStep(
            replica=self.whole.name,
            round=round_,
            step=step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=tokens[:, 1:].numel(),
        )

    def end_inner_loop(self, round_: int) -> None:
        """See TrainingMember. Every step is applied at once here."""

    def start_round(self, outer: OuterRound) -> None:
        """See TrainingMember."""
        self.whole.split_embedding()

    def evaluate(self, round_: int) -> tuple[float, int]:
        """See TrainingMember."""
        return self.whole.evaluate(self.validation), sum(tokens[:, 1:].numel() for tokens in self.validation)

    def timing(self) -> tuple[float, float]:
        """See TrainingMember."""
        seconds, self._compute_seconds = self._compute_seconds, 0.0
        return seconds, 0.0
