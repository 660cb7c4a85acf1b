"""Builds a member of a rehearsal: what the training loop takes for a trainer and for an outer round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.data.shares import SharedBatches
from hetero_pp.run.simulate_section import MeasuredCost
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.costs import cost_of
from replica_groups.member.rehearsed_round import RehearsedRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import DatacenterMember, StageMember, TrainingMember, worker_settings
from replica_groups.rehearsal.emulated import EmulatedBoundary, EmulatedEngine, EmulatedPace, EmulatedStage
from stages.activity import Timing
from stages.worker import StageWorker


def build_rehearsed(spec: RunSpec, member: MemberSpec, session: MemberSession) -> tuple[TrainingMember, RehearsedRound]:
    """Return the trainer and the outer round of a member.

    Raises ConfigError for unknown hardware.
    """
    cost = cost_of(spec, member)
    trainer: TrainingMember
    if isinstance(member.replica, ParticipantsReplica):
        trainer = _stage(spec, member, member.replica, cost)
    else:
        micro_batches, vocabulary = member.replica.micro_batches, spec.shape.vocabulary
        engine, tokens = EmulatedEngine(cost, micro_batches, vocabulary, EmulatedPace()), _tokens(spec, member)
        trainer = DatacenterMember(
            member.name, engine, _batches(spec, member, tokens), _validation(spec, member, tokens)
        )
    return trainer, RehearsedRound(spec, member, session, cost, EmulatedPace())


class RehearsedStageMember(StageMember):
    """A stage whose reported compute is the emulated one."""

    def __init__(self, worker: StageWorker, pace: EmulatedPace, *args: Any) -> None:
        super().__init__(worker.settings.replica, worker, *args)
        self._pace, self._reported = pace, 0.0

    def timing(self) -> Timing:
        timing = super().timing()
        timing.compute, self._reported = self._pace.computed - self._reported, self._pace.computed
        return timing


def _stage(spec: RunSpec, member: MemberSpec, replica: ParticipantsReplica, cost: MeasuredCost) -> StageMember:
    assert member.stage is not None
    settings, pace = worker_settings(spec.config, replica), EmulatedPace()
    rows, length = settings.micro_batch_size, settings.sequence_length
    boundary = EmulatedBoundary(replica.boundary, spec.shape.width, rows, length)
    worker = StageWorker(EmulatedStage(member.stage, spec.shape, boundary, cost, pace), settings, None, None)
    pace.waited = lambda: worker.timing.waited_previous + worker.timing.waited_next
    batches, validation = None, list[Tensor]()
    if member.stage.is_first:
        tokens = _tokens(spec, member)
        batches, validation = _batches(spec, member, tokens), _validation(spec, member, tokens)
    count = -(-spec.config.data.validation_sequences // rows)
    return RehearsedStageMember(worker, pace, batches, validation, count)


class _SameBatch:
    """One batch that is read again and again. Implements Batches."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def train(self, step: int) -> Tensor:
        return self._tokens

    def read_ahead(self, steps: range) -> None:
        """Do nothing: it is here."""

    def state(self) -> Any:
        return {}

    def load(self, state: Any) -> None:
        """Do nothing: every position reads the same."""


def _tokens(spec: RunSpec, member: MemberSpec) -> Tensor:
    """Return random token ids [batch, L + 1]."""
    size = (member.replica.batch_size, spec.config.data.sequence_length + 1)
    return torch.randint(spec.shape.vocabulary, size, generator=torch.Generator().manual_seed(0))


def _batches(spec: RunSpec, member: MemberSpec, tokens: Tensor) -> SharedBatches:
    return SharedBatches(spec.share_of(member.replica.name, 1), lambda share: _SameBatch(tokens))


def _validation(spec: RunSpec, member: MemberSpec, tokens: Tensor) -> list[Tensor]:
    """Return batches with the shapes of the validation rows."""
    rows, sequences = member.replica.batch_size // member.replica.micro_batches, spec.config.data.validation_sequences
    return [tokens[: min(rows, sequences - first)] for first in range(0, sequences, rows)]
