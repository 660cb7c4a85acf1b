"""The whole YAML: every part's own section, composed once, and what only the whole can check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field

from hetero_pp.data.settings import DataSettings
from hetero_pp.errors import ConfigError
from hetero_pp.inner import InnerSettings
from hetero_pp.model import EMBEDDING, ModelSettings, ModelShape, Transformer, block_of, build_part, parameters_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.planning.settings import PlanSettings, check_participants
from hetero_pp.settings import Settings
from hetero_pp.simulator.settings import SimulateSettings
from hetero_pp.topology import (
    DatacenterReplica,
    ExchangeSettings,
    LinkPlan,
    LinkSettings,
    ParticipantsReplica,
    ReplicaSettings,
    StagePlan,
    check_topology,
    link_plans,
)
from replica_groups.exchange import Roster


class SnapshotSettings(Settings):
    """When the synced model is saved."""

    every: int = Field(10, ge=1, description="rounds between snapshots; the last round always has one")


class RunConfig(Settings):
    """One training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's folder under runs/")
    seed: int = Field(0, ge=0)
    threads: int = Field(1, ge=1, description="threads of each process; results depend on it in the last bits")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    inner: InnerSettings = InnerSettings()
    outer: OuterSettings
    links: dict[str, LinkSettings] = Field(default_factory=dict, description="kinds of links by name")
    replicas: list[ReplicaSettings] = Field([], description="at least one, unless `plan` has participants to group")
    exchange: ExchangeSettings = ExchangeSettings()
    snapshots: SnapshotSettings = SnapshotSettings()
    simulate: SimulateSettings = SimulateSettings()
    plan: PlanSettings = PlanSettings()

    def check(self) -> None:
        """Raise ConfigError for what no single field can see. Reads no files."""
        values = self.model.resolve(self.model.vocabulary or 256)
        if not self.replicas and not self.plan.participants:
            raise ConfigError(("replicas",), "found nothing, expected at least one replica")
        check_topology(self.replicas, self.links, values.width, values.layers)
        check_participants(self.plan, self.links, values.layers)

    def require_grouped(self) -> None:
        """Raise ConfigError if some participants belong to no replica yet: there is nothing to run."""
        if self.plan.participants:
            raise ConfigError(
                ("plan", "participants"),
                f"found {len(self.plan.participants)} participants that are not grouped yet, expected none: "
                "`hetero-pp plan --write FILE` groups them",
            )

    def with_absolute_paths(self) -> RunConfig:
        """The same, with paths that mean the same from any folder."""
        return self.model_copy(
            update={"data": self.data.with_absolute_paths(), "model": self.model.with_absolute_paths()}
        )


@dataclass(frozen=True)
class MemberPlan:
    """One member that trains: which replica, and which stage of it (None: the whole)."""

    name: str
    replica: ReplicaSettings
    replica_index: int
    stage: StagePlan | None
    owned: tuple[str, ...]
    """Names of the parameters that it trains."""

    @property
    def reads_data(self) -> bool:
        """Whether it needs the corpus: a whole replica does, and a group's first stage."""
        return self.stage is None or self.stage.is_first

    @property
    def follows_embedding(self) -> bool:
        """Whether it keeps a synced copy of a token embedding that another member trains."""
        return (
            isinstance(self.replica, ParticipantsReplica)
            and self.replica.boundary.rank != "full"
            and EMBEDDING not in self.owned
        )


@lru_cache(maxsize=256)
def _shapes_of(shape: ModelShape, stage: StagePlan | None) -> Mapping[str, tuple[int, ...]]:
    """Shape of every parameter of a stage, or of the whole model, by name. Many plans of one model ask for the same."""
    with torch.device("meta"):
        module = Transformer(shape) if stage is None else build_part(shape, stage)
    return MappingProxyType({name: tuple(parameter.shape) for name, parameter in parameters_of(module).items()})


def meaning(config: RunConfig) -> dict[str, Any]:
    """What all hosts of a run have to agree on: not where each keeps its files, listens, or how it computes."""
    found = config.model_dump(mode="json")
    for name in ("exchange", "simulate", "plan", "threads"):
        found.pop(name)
    for name in ("corpus", "tokenizer"):
        found["data"].pop(name)
    found["model"].pop("weights")
    found["outer"]["compression"].pop("accelerator")
    for replica in found["replicas"]:
        for name in ("hardware", "accelerators", "device", "ranks", "nodes", "rendezvous"):
            replica.pop(name, None)
        for stage in replica["stages"] if isinstance(replica.get("stages"), list) else ():
            stage.pop("listen")
    return found


class RunPlan:
    """A configuration and all that follows from it alone, the same in every process."""

    def __init__(self, config: RunConfig, vocabulary: int | None) -> None:
        self.config = config
        self.shape: ModelShape = config.model.resolve(vocabulary)
        self.run = hashlib.sha256(json.dumps(meaning(config), sort_keys=True).encode()).hexdigest()[:32]
        """Names the run in its contributions: the same on all hosts, wherever they keep their files."""
        self.total_steps = config.outer.rounds * config.inner.steps
        self.links: dict[str, LinkPlan] = {plan.name: plan for plan in link_plans(config.replicas, config.links)}
        self.members: dict[str, MemberPlan] = {
            member.name: member
            for index, replica in enumerate(config.replicas)
            for member in self._members_of(replica, index)
        }

    def _members_of(self, replica: ReplicaSettings, index: int) -> list[MemberPlan]:
        if isinstance(replica, DatacenterReplica):
            return [MemberPlan(replica.name, replica, index, None, self._owned_by(None))]
        stages = [
            StagePlan(stage, replica.stage_count, layers)
            for stage, layers in enumerate(replica.layer_ranges(self.shape.layers))
        ]
        return [
            MemberPlan(name, replica, index, stage, self._owned_by(stage))
            for name, stage in zip(replica.members, stages, strict=True)
        ]

    def _owned_by(self, stage: StagePlan | None) -> tuple[str, ...]:
        return tuple(_shapes_of(self.shape, stage))

    @property
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter of the whole model, by name."""
        return _shapes_of(self.shape, None)

    @cached_property
    def roster(self) -> Roster:
        """Who takes part, for the exchange."""
        return Roster(
            {name: member.replica.name for name, member in self.members.items()},
            {name: frozenset(map(block_of, member.owned)) for name, member in self.members.items()},
        )

    @property
    def largest_rank(self) -> int | None:
        """Of all boundaries: the basis has as many columns. None if nothing is compressed."""
        ranks = [
            rank
            for replica in self.config.replicas
            if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1
            if (rank := replica.boundary.dimensions(self.shape.width)) is not None
        ]
        return max(ranks, default=None)
