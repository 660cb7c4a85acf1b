"""Trainers of a member on its device: a whole replica with its engine, or one stage of a group.

`TrainingMember` is the interface, `build_member` builds the one that a run's settings ask for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import BASIS
from hetero_pp.config.member_inputs import replica_batches, round_optimizer
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.tensor_files import save_object
from hetero_pp.data.batches import Share, SharedBatches, load_position
from hetero_pp.data.sources import Source
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Doing, Evaluation, InnerStep
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.simulator.costs import cost_of
from hetero_pp.store.faults import NO_FAULTS, Faults
from replica_groups.engines.build import build_engine, build_model
from replica_groups.engines.engine import Engine, LocalParameters, Moments, ParameterStore
from replica_groups.engines.plain import PlainEngine
from replica_groups.engines.ranks import Ranks
from replica_groups.engines.timed import TimedBoundary, TimedEngine, TimedPace, TimedStage
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.rehearsed import RehearsedRound
from replica_groups.member.session import MemberSession
from stages.anchors import anchors_of
from stages.boundary import boundary_of
from stages.stage import Stage
from stages.transcript import GroupPosition, Sketches, Transcript
from stages.worker import StageWorker, Timing, WorkerSettings


class TrainingMember(Protocol):
    """A whole replica, or one stage of a replica."""

    parameters: ParameterStore  # the trained parameters
    batches: SharedBatches | None  # training data; None if the member reads none

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
        return

    def remember(self, ahead: bool = False) -> None:
        """Copy at the start of a round what `undo` restores. The outer round keeps the synchronised parameters.

        `ahead`: the previous round is undecided, so its text may have to be read again.
        """

    def undo(self, outer: OuterRound) -> None:
        """Restore the remembered state and theta of the outer round, so that the round can be repeated bit for bit.

        May be called repeatedly. A step in progress is dropped at any point. Moments are restored only if the member
        keeps them (`states.undo`).
        """

    def suspend(self) -> tuple[int, bool]:
        """Drop the step in progress; return how many steps of the round are applied, and whether another one waits.

        The steps are those of the replica, also if an earlier holder of the slot trained them.
        """
        return 0, False

    def relink(self, ends: LinkEnds) -> None:
        """Use other links to the neighbouring stages, after `undo` or `suspend`, or between two inner loops."""
        return

    def resume(self, step: int, global_step: int, keeps: bool, is_same: bool) -> None:
        """Go on at a step of a round, after `relink`: with what `suspend` kept, or at the start of the round.

        A member that reads data skips the earlier steps. `is_same`: whether all members of the group have trained the
        round since its start.
        """
        return

    def start_round(self, outer: OuterRound) -> None:
        """Update what is derived from the synchronised parameters: the split of the token embedding."""
        return

    def evaluate(self, round_: int) -> Evaluation | None:
        """Return the synchronised parameters' loss in this replica's forward, and the tokens; None where unknown."""

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on and that is not in a run checkpoint."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, in a member that started from the run checkpoint of the same round."""

    def moments(self) -> dict[str, Tensor]:
        """Return what the next step depends on beside theta and the position in the data, as tensors in use."""

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load the result of `moments`. Raises ValueError, IndexError or KeyError for tensors of another member."""

    def message_digests(self) -> bytes:
        """Return the digests of the messages that it exchanged with other stages in this round; empty without any."""
        return b""

    def activity(self) -> tuple[int, bool]:
        """Return a number that changes with progress, and whether the member is busy.

        Safe to call from another thread.
        """

    def doing(self) -> Doing:
        """Return what the member does in its inner loop at this moment. Safe to call from another thread."""

    def timing(self) -> Timing:
        """Return the seconds of compute and of waiting for neighbours since the last call."""


# A datacenter replica as a member of a run: a whole replica, its data and its reports.


class DatacenterMember(TrainingMember):
    """Trains the whole model with an engine, on each of its ranks. It has no boundaries and no links to stages."""

    batches: SharedBatches

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

    def remember(self, ahead: bool = False) -> None:
        self.engine.remember(self._keeps_moments)
        self.batches.remember(ahead)

    def undo(self, outer: OuterRound) -> None:
        outer.restore()
        self.engine.undo()
        self.batches.undo()

    def evaluate(self, round_: int) -> Evaluation:
        tokens = sum(tokens[:, 1:].numel() for tokens in self.validation)
        return Evaluation(replica=self.name, round=round_, loss=self.engine.evaluate(self.validation), tokens=tokens)

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

    def activity(self) -> tuple[int, bool]:
        """Return the finished micro-batches; the engine never waits for another member."""
        return self.engine.done, True

    def doing(self) -> Doing:
        return Doing.COMPUTING

    def timing(self) -> Timing:
        seconds, self._compute_seconds = self._compute_seconds, 0.0
        return Timing(seconds)


# One stage of a participant group as a member of a run.


_STATE = "stage.pt"


class StageMember(TrainingMember):
    """One stage of a replica.

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
        self._read: tuple[int, Tensor] | None = None
        """Number and tokens of the step that was begun last, which is not read again if it is repeated."""

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
        if self.batches is not None and (self._read is None or self._read[0] != global_step):
            self._read = global_step, self.batches.train(global_step)
        tokens = None if self._read is None else self._read[1]
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
        self._read = None
        outer.restore()
        self._moments.restore()
        if (anchors := self.worker.stage.anchors) is not None:
            anchors.restore()
        if self.batches is not None:
            self.batches.undo()
        self.start_round(outer)

    def suspend(self) -> tuple[int, bool]:
        return self.worker.suspend()

    def resume(self, step: int, global_step: int, keeps: bool, is_same: bool) -> None:
        self.worker.resume(step, keeps, is_same)
        if not keeps and self.batches is not None:
            for earlier in range(global_step - step, global_step):
                self.batches.train(earlier)

    def relink(self, ends: LinkEnds) -> None:
        self.worker.relink(ends.upstream, ends.downstream)
        self.worker.transcript.enter(ends.generation, ends.signer, ends.holders)

    def evaluate(self, round_: int) -> Evaluation | None:
        self.worker.stage.enter_round(round_)
        outcome = self.worker.evaluate(round_, self.validation, self.validation_count)
        if outcome is None:
            return None
        tokens = outcome[1] * self.worker.settings.sequence_length
        return Evaluation(replica=self.replica, round=round_, loss=outcome[0], tokens=tokens)

    def save(self, folder: Path) -> None:
        save_object(self.worker.stage.moments(), folder / _STATE)
        if self.batches is not None:
            self.batches.save(folder)

    def load(self, folder: Path) -> None:
        self._read = None
        self.worker.stage.load_moments(torch.load(folder / _STATE, map_location="cpu", weights_only=True))
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
        if isinstance(self.worker.stage, TimedStage):
            timing.compute = self.worker.stage.computed()
        return timing


# Builds the trainer of one member on its device: a whole replica with its engine, or one stage of a group.


@dataclass(frozen=True)
class Start:
    """Tensors of the run checkpoint that a member needs."""

    parameters: Mapping[str, Tensor]  # the whole parameters that the member trains or follows, by name
    basis: Tensor | None  # U [D, K']; None if nothing in the run is compressed


def build_from_checkpoint(
    spec: RunSpec,
    member: MemberSpec,
    session: MemberSession,
    source: Source | None,
    folder: Path,
    tell: Callable[[str], None] | None,
) -> tuple[TrainingMember, OuterRound, int]:
    """Build the trainer and the outer round from the newest run checkpoint; return them and its round.

    `tell` is given how long it took to read the checkpoint. In a rehearsal nothing is read.
    """
    if spec.config.rehearsal is not None:
        trainer = build_member(spec, member, Start({}, None), LinkEnds(), None, session.ranks, faults=session.faults)
        return trainer, RehearsedRound(spec, member, session, cost_of(spec, member)), session.newest_checkpoint()[0]
    held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    began = time.monotonic()
    round_, tensors, momentum = session.newest_tensors(held, [] if spec.largest_rank is None else [BASIS])
    if tell is not None:
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*tensors.values(), *momentum.values()))
        tell(f"read {n_bytes:,} bytes of the run checkpoint after round {round_} in {time.monotonic() - began:.2f} s")
    start = Start({name: tensors[name] for name in held}, tensors.get(BASIS))
    trainer = build_member(spec, member, start, LinkEnds(), source, session.ranks, folder, session.faults)
    keeps_undo = member.stage is not None or spec.config.states.undo or spec.config.outer.keep_local
    optimizer = round_optimizer(spec, start.basis)
    own = start.parameters, spec.config.outer, optimizer, keeps_undo, folder, spec.fragments
    outer = OuterRound(session, trainer.parameters, *own)
    if round_ > 0:
        outer.reset(start.parameters, momentum, round_)
    return trainer, outer, round_


RECEIVE_TIMEOUT = 600.0
"""Seconds without data after which a neighbour is considered hung: far longer than any step on a slow link."""


def build_member(
    spec: RunSpec,
    member: MemberSpec,
    start: Start,
    ends: LinkEnds,
    source: Source | None,
    ranks: Ranks,
    folder: Path | None = None,
    faults: Faults = NO_FAULTS,
) -> TrainingMember:
    """Build the trainer of a member on `ranks.device`, from the start of the run.

    `source` is set if the member reads the corpus. A rehearsal's trainer waits instead of computing.

    `folder` holds copies for `undo` (Moments).

    Raises ConfigError for a corpus that is too small, and for settings that only a row of a table has.
    """
    if beyond := sorted(spec.config.model_fields_set - RunConfig.model_fields.keys()):
        found = "found settings of a row of a table, expected none: only `hetero-pp reproduce` trains with them"
        raise ConfigError((beyond[0],), found)
    config, replica = spec.config, member.replica
    pace, defers, keeps_moments = TimedPace(), config.outer.source == "gradient", config.states.undo
    batches: SharedBatches | None = None
    validation: list[Tensor] = []
    if member.stage is None or member.stage.is_first:
        batches, validation = replica_batches(spec, member, source)

    if isinstance(replica, DatacenterReplica):
        assert batches is not None
        engine: Engine
        if config.rehearsal is None:
            engine = build_engine(replica, spec.shape, start.parameters, config.inner, spec.total_steps, ranks, folder)
        else:
            engine = TimedEngine(cost_of(spec, member), replica.micro_batches, spec.shape.vocabulary, pace)
        if isinstance(engine, PlainEngine):
            engine.whole.optimizer.defers = defers
        return DatacenterMember(replica.name, engine, batches, validation, keeps_moments)

    assert member.stage is not None
    rows, length = replica.batch_size // replica.micro_batches, config.data.sequence_length
    if config.rehearsal is None:
        stage = build_stage(spec, replica, member.stage, start, ranks.device, ranks.devices)
    else:
        boundary = TimedBoundary(replica.boundary, spec.shape.width, rows, length)
        stage = TimedStage(member.stage, spec.shape, boundary, cost_of(spec, member), pace)
    stage.optimizer.defers = defers
    settings = WorkerSettings(
        micro_batches=replica.micro_batches,
        micro_batch_size=rows,
        sequence_length=length,
        extra_in_flight=replica.extra_in_flight,
        receive_timeout=RECEIVE_TIMEOUT,
        replica=replica.name,
        seed=config.seed,
        overlap=config.outer.overlap > 0,
    )
    worker = StageWorker(stage, settings, ends.upstream, ends.downstream)
    worker.faults = faults
    pace.waited = lambda: worker.timing.waited_previous + worker.timing.waited_next
    if (audit := config.audit.recompute) is not None:
        sketches = Sketches(stage.boundary.format, config.seed, replica.name) if audit.tolerance > 0 else None
        worker.transcript = Transcript(GroupPosition(spec.run, replica.members, member.stage.index), sketches)
    count = -(-config.data.validation_sequences // rows)
    return StageMember(replica.name, worker, batches, validation, count, keeps_moments, folder)


def build_stage(
    spec: RunSpec,
    replica: ParticipantsReplica,
    stage: StageSpec,
    start: Start,
    device: torch.device = CPU,
    devices: Sequence[torch.device] = (),
) -> Stage:
    """Build the computation of one stage of a group, from the start of the run: on a device.

    With several `devices`, of which that is the first, its layers lie on all of them.
    """
    settings, inner = replica.boundary, spec.config.inner
    basis = None if start.basis is None else start.basis.to(device)
    boundary = boundary_of(settings, spec.shape.width, basis)
    module = build_model(replica, spec.shape, start.parameters, device, stage, devices)
    anchors = None
    if not stage.is_first:
        rounds, of = spec.at(1).rounds, (spec.config.seed, replica.name, stage.index - 1)
        anchors = anchors_of(settings.anchors, spec.shape, inner, spec.total_steps, rounds, *of, device=device)
    return Stage(stage, module, boundary, inner, spec.total_steps, anchors, settings.embedding)
