"""Builds one training member from the plan and runs it, whatever its links and its exchange are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.data.batches import Batches
from hetero_pp.data.sources import open_source
from hetero_pp.link.protocol import LinkEnd
from hetero_pp.model import EMBEDDING, Transformer, build_part, parameters_of
from hetero_pp.outer.exchange_port import ExchangePort
from hetero_pp.run.batches import replica_batches
from hetero_pp.run.round_optimizer import round_optimizer
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.snapshot import BASIS
from hetero_pp.topology import DatacenterReplica, ParticipantsReplica, StageSpec, exchange_link_name, stage_link_name
from replica_groups.datacenter import DatacenterMember
from replica_groups.engines.build import build_engine
from replica_groups.engines.plain import PlainEngine
from replica_groups.exchange.reporter import Reporter
from replica_groups.exchange.shaped import PacedExchange
from replica_groups.exchange.shared import SharedExchange
from replica_groups.member import LedgerView, TrainingMember, run_member
from replica_groups.outer_round import OuterRound
from replica_groups.participants import StageMember
from replica_groups.ranks import ALONE, Ranks
from replica_groups.saved_states import SavedStates
from stages.boundary import boundary_of
from stages.stage import Stage
from stages.worker import StageWorker, WorkerSettings

RECEIVE_TIMEOUT = 600.0
"""Seconds after which a neighbour that sends nothing counts as hanging: far beyond any step of a slow link."""


def train_member(
    spec: RunSpec,
    member: MemberSpec,
    exchange: ExchangePort,
    upstream: LinkEnd | None,
    downstream: LinkEnd | None,
    cache: Path,
    states: SavedStates,
    last_round: int = 0,
    ranks: Ranks = ALONE,
) -> None:
    """Train all rounds as one member of the run, or as one of the ranks that are a member together.

    Its links are open, and it has joined the exchange; of several ranks only the first uses it. It goes on after
    `last_round`, which is that of the exchange's snapshot.
    """
    config = spec.config
    link = PacedExchange(exchange, spec.links[exchange_link_name(member.name)], config.seed)
    paced: ExchangePort = link if ranks.world == 1 else SharedExchange(link if ranks.is_first else None, ranks)
    names = list(member.owned)
    if member.follows_embedding:
        names.append(EMBEDDING)
    if spec.largest_rank is not None:
        names.append(BASIS)
    tensors = paced.snapshot(names)
    basis = tensors.pop(BASIS, None)
    if isinstance(member.replica, DatacenterReplica):
        ranks = ranks if ranks.world > 1 else Ranks(device=device_of(member.replica))
        trainer: TrainingMember = _build_datacenter(spec, member, member.replica, tensors, cache, ranks)
    else:
        trainer = _build_stage(spec, member, member.replica, tensors, basis, upstream, downstream, cache)
    outer = OuterRound(
        spec.run,
        member.name,
        member.replica.name,
        trainer.held,
        tensors,
        paced,
        config.outer,
        round_optimizer(spec, basis),
        ranks,
    )
    del tensors  # a whole model
    reporter = Reporter(paced, member.name)
    ledgers = _ledgers(member, link, upstream, downstream)
    try:
        run_member(
            trainer,
            member.replica.name,
            outer,
            reporter,
            ledgers,
            config.outer.rounds,
            config.inner.steps,
            states,
            last_round,
        )
        over = reporter.new()
        over.finished.SetInParent()
        reporter.tell(over)
    finally:
        reporter.close()


def device_of(replica: DatacenterReplica) -> torch.device:
    """Where it trains: `auto` is a GPU where there is one."""
    if replica.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(replica.device)


def _build_datacenter(
    spec: RunSpec,
    member: MemberSpec,
    replica: DatacenterReplica,
    tensors: Mapping[str, Tensor],
    cache: Path,
    ranks: Ranks,
) -> DatacenterMember:
    config = spec.config
    batches, validation = replica_batches(spec, member, open_source(config.data, cache))
    engine = build_engine(
        replica.engine,
        spec.shape,
        tensors,
        config.inner,
        spec.total_steps,
        replica.micro_batches,
        replica.batch_size // replica.micro_batches,
        replica.torchtitan,
        replica.deepspeed,
        ranks,
    )
    if isinstance(engine, PlainEngine):
        engine.whole.optimizer.defers = config.outer.source == "gradient"
    return DatacenterMember(replica.name, engine, batches, validation)


def _build_stage(
    spec: RunSpec,
    member: MemberSpec,
    replica: ParticipantsReplica,
    tensors: Mapping[str, Tensor],
    basis: Tensor | None,
    upstream: LinkEnd | None,
    downstream: LinkEnd | None,
    cache: Path,
) -> StageMember:
    config, stage = spec.config, member.stage
    assert stage is not None
    rows = replica.batch_size // replica.micro_batches
    batches: Batches | None = None
    validation: list[Tensor] = []
    if stage.is_first:
        batches, validation = replica_batches(spec, member, open_source(config.data, cache))
    with torch.device("meta"):
        module = build_part(spec.shape, stage)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in parameters_of(module).items():
            parameter.copy_(tensors[name])
    worker = _build_worker(spec, replica, stage, module, basis, upstream, downstream)
    count = -(-config.data.validation_sequences // rows)
    return StageMember(replica.name, worker, batches, validation, count)


def _build_worker(
    spec: RunSpec,
    replica: ParticipantsReplica,
    stage_spec: StageSpec,
    module: Transformer,
    basis: Tensor | None,
    upstream: LinkEnd | None,
    downstream: LinkEnd | None,
) -> StageWorker:
    config = spec.config
    boundary = boundary_of(replica.boundary, spec.shape.width, basis)
    stage = Stage(stage_spec, module, boundary, config.inner, spec.total_steps, replica.boundary.ablations)
    stage.optimizer.defers = config.outer.source == "gradient"
    settings = WorkerSettings(
        micro_batches=replica.micro_batches,
        micro_batch_size=replica.batch_size // replica.micro_batches,
        sequence_length=config.data.sequence_length,
        extra_in_flight=replica.extra_in_flight,
        receive_timeout=RECEIVE_TIMEOUT,
        replica=replica.name,
        seed=config.seed,
    )
    return StageWorker(stage, settings, upstream, downstream)


def _ledgers(
    member: MemberSpec, paced: PacedExchange, upstream: LinkEnd | None, downstream: LinkEnd | None
) -> LedgerView:
    """Each direction of a stage link is counted by the end that sends it; both of the exchange's by the member."""
    link = exchange_link_name(member.name)
    yield link, "forward", paced.forward
    yield link, "backward", paced.backward
    if member.stage is not None and downstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index), "forward", downstream.ledger
    if member.stage is not None and upstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index - 1), "backward", upstream.ledger
