"""A datacenter replica: the whole model in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_pp.data.batches import Batches
from hetero_pp.inner import InnerOptimizer, InnerSettings, parameters_of
from hetero_pp.model import Transformer, next_token_loss
from hetero_pp.rpc.messages_pb2 import InnerStep
from replica_groups.outer_round import OuterRound


class DatacenterMember:
    """Trains the whole model with plain PyTorch. Implements TrainingMember."""

    def __init__(
        self,
        name: str,
        module: Transformer,
        batches: Batches,
        validation: Sequence[Tensor],
        micro_batches: int,
        inner: InnerSettings,
        total_steps: int,
    ) -> None:
        self.name = name
        self.module = module
        self.batches = batches
        self.validation = validation
        self.micro_batches = micro_batches
        self.parameters = parameters_of(module)
        self.optimizer = InnerOptimizer(self.parameters, inner, total_steps)
        self._compute_seconds = 0.0

    def inner_step(self, round_: int, step: int, global_step: int) -> InnerStep:
        """See TrainingMember."""
        started = time.perf_counter()
        tokens = self.batches.train(global_step)
        loss = 0.0
        for micro_batch in tokens.chunk(self.micro_batches):
            part = next_token_loss(self.module(micro_batch[:, :-1]), micro_batch[:, 1:]) / self.micro_batches
            part.backward()
            loss += part.item()
        norm = self.optimizer.gradient_norm()
        rate = self.optimizer.step(global_step, norm)
        self._compute_seconds += time.perf_counter() - started
        return InnerStep(
            replica=self.name,
            round=round_,
            step=step,
            loss=loss,
            gradient_norm=norm.item(),
            learning_rate=rate,
            tokens=tokens[:, 1:].numel(),
        )

    def end_inner_loop(self, round_: int) -> None:
        """See TrainingMember. Every step is applied at once here."""

    def start_round(self, outer: OuterRound) -> None:
        """See TrainingMember. Without a boundary there is no split."""

    @torch.no_grad()
    def evaluate(self, round_: int) -> tuple[float, int]:
        """See TrainingMember."""
        total, rows, count = 0.0, 0, 0
        for tokens in self.validation:
            total += next_token_loss(self.module(tokens[:, :-1]), tokens[:, 1:]).item() * len(tokens)
            rows += len(tokens)
            count += tokens[:, 1:].numel()
        return total / rows, count

    def timing(self) -> tuple[float, float]:
        """See TrainingMember."""
        seconds, self._compute_seconds = self._compute_seconds, 0.0
        return seconds, 0.0
