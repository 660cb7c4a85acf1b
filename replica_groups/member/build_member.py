"""Builds the trainer of one member on its device: a whole replica with its engine, or one stage of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, StageSpec
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.shares import SharedBatches
from hetero_pp.data.sources import Source
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.run.batches import replica_batches
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import MemberSpec, RunSpec
from replica_groups.engines.build import build_engine, build_model
from replica_groups.engines.plain import PlainEngine
from replica_groups.engines.ranks import Ranks
from replica_groups.member.committed_state import tensors_sha256
from replica_groups.member.datacenter import DatacenterMember
from replica_groups.member.participants import StageMember
from replica_groups.member.training_member import TrainingMember
from stages.anchors import anchors_of, anchors_seed, first_expansion
from stages.boundary import boundary_of
from stages.stage import Stage
from stages.transcript import GroupPosition, Sketches, Transcript
from stages.worker import StageWorker, WorkerSettings


@dataclass(frozen=True)
class Start:
    """Tensors of the run checkpoint that a member needs."""

    parameters: Mapping[str, Tensor]
    """The whole parameters that the member trains or follows, by name."""
    basis: Tensor | None
    """U [D, K']; None if nothing in the run is compressed."""


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
) -> TrainingMember:
    """Build the trainer of a member on `ranks.device`, from the start of the run.

    `source` is set if the member reads the corpus.

    `folder` holds copies for `undo` (Moments).

    Raises ConfigError for a corpus that is too small, and for settings that only a row of a table has.
    """
    if beyond := sorted(spec.config.model_fields_set - RunConfig.model_fields.keys()):
        found = "found settings of a row of a table, expected none: only `hetero-pp reproduce` trains with them"
        raise ConfigError((beyond[0],), found)
    if isinstance(member.replica, DatacenterReplica):
        return _build_datacenter(spec, member, member.replica, start, source, ranks, folder)
    return _build_stage(spec, member, member.replica, start, ends, source, ranks.device, folder)


def _build_datacenter(
    spec: RunSpec,
    member: MemberSpec,
    replica: DatacenterReplica,
    start: Start,
    source: Source | None,
    ranks: Ranks,
    folder: Path | None,
) -> DatacenterMember:
    assert source is not None
    config = spec.config
    batches, validation = replica_batches(spec, member, source)
    engine = build_engine(replica, spec.shape, start.parameters, config.inner, spec.total_steps, ranks, folder)
    if isinstance(engine, PlainEngine):
        engine.whole.optimizer.defers = config.outer.source == "gradient"
    return DatacenterMember(replica.name, engine, batches, validation, config.states.undo)


def _build_stage(
    spec: RunSpec,
    member: MemberSpec,
    replica: ParticipantsReplica,
    start: Start,
    ends: LinkEnds,
    source: Source | None,
    device: torch.device,
    folder: Path | None,
) -> StageMember:
    assert member.stage is not None
    config = spec.config
    rows = replica.batch_size // replica.micro_batches
    batches: SharedBatches | None = None
    validation: list[Tensor] = []
    if member.stage.is_first:
        assert source is not None
        batches, validation = replica_batches(spec, member, source)
    stage = build_stage(spec, replica, member.stage, start, device)
    stage.optimizer.defers = config.outer.source == "gradient"
    worker = StageWorker(stage, worker_settings(config, replica), ends.upstream, ends.downstream)
    if (audit := config.audit.recompute) is not None:
        sketches = Sketches(stage.boundary.format, config.seed, replica.name) if audit.tolerance > 0 else None
        worker.transcript = Transcript(GroupPosition(spec.run, replica.members, member.stage.index), sketches)
    count = -(-config.data.validation_sequences // rows)
    return StageMember(replica.name, worker, batches, validation, count, config.states.undo, folder)


def fresh_sha256(spec: RunSpec, member: MemberSpec) -> bytes:
    """Return the digest of the tensors of a member's state before its first step: W of its anchors."""
    own, first = member.replica, dict[str, Tensor]()
    if isinstance(own, ParticipantsReplica) and member.stage is not None and not member.stage.is_first:
        rank = None if own.boundary.anchors is None else own.boundary.anchors.dimensions(spec.shape.width)
        if rank is not None:
            seed = anchors_seed(spec.config.seed, own.name, member.stage.index - 1)
            first["moments:anchors.values.expansion"] = first_expansion(rank, spec.shape.width, seed)
    return tensors_sha256(first, first.__getitem__)


def worker_settings(config: RunConfig, replica: ParticipantsReplica) -> WorkerSettings:
    """Return the settings of the workers of a group."""
    return WorkerSettings(
        micro_batches=replica.micro_batches,
        micro_batch_size=replica.batch_size // replica.micro_batches,
        sequence_length=config.data.sequence_length,
        extra_in_flight=replica.extra_in_flight,
        receive_timeout=RECEIVE_TIMEOUT,
        replica=replica.name,
        seed=config.seed,
        overlap=config.outer.overlap > 0,
    )


def build_stage(
    spec: RunSpec, replica: ParticipantsReplica, stage: StageSpec, start: Start, device: torch.device = CPU
) -> Stage:
    """Build the computation of one stage of a group on a device, from the start of the run."""
    settings, inner = replica.boundary, spec.config.inner
    basis = None if start.basis is None else start.basis.to(device)
    boundary = boundary_of(settings, spec.shape.width, basis)
    module = build_model(replica, spec.shape, start.parameters, device, stage)
    anchors = None
    if not stage.is_first:
        rounds, of = spec.config.outer.rounds, (spec.config.seed, replica.name, stage.index - 1)
        anchors = anchors_of(settings.anchors, spec.shape, inner, spec.total_steps, rounds, *of, device=device)
    return Stage(stage, module, boundary, inner, spec.total_steps, anchors, settings.embedding)
