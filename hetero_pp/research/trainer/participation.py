"""Replicas of a row that take part in a round, the text that each of them reads, and the weights of contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from hetero_pp.config.member_inputs import replica_batches, validation_rows
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import Share, SharedBatches, StoreBatches
from hetero_pp.data.sources import Source
from hetero_pp.data.tokens import TokenStore
from hetero_pp.research.settings import research_of
from hetero_pp.research.trainer.clusters import Clusters, find_clusters

_DRAWS = 2**63  # number of values of a seed


def replicas_in(config: RunConfig, round_: int) -> Sequence[ReplicaSettings]:
    """Return the replicas that take part in a round."""
    counts = research_of(config).counts
    count = counts[max(since for since in counts if since <= max(round_, 1))] if counts else None
    return config.replicas[:count]


def sequences_in(config: RunConfig, rounds: int) -> int:
    """Return the sum over the first `rounds` rounds of the sequences that all replicas read in a step."""
    return sum(one.batch_size for round_ in range(1, rounds + 1) for one in replicas_in(config, round_))


def missed_in(round_: int, replicas: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """Return the replicas that a round excludes, each independently with probability `share` (DiLoCo, Figure 8).

    If all were excluded, the one with the largest draw is included. A replica excluded at a share is excluded at any
    larger one.
    """
    draws = {name: seed_of("missed", seed, round_, name) / _DRAWS for name in replicas}
    counted = {name for name, draw in draws.items() if draw >= share} or {max(draws, key=lambda name: draws[name])}
    return frozenset(draws) - counted


@dataclass(frozen=True)
class Death:
    """A stage that a group loses in a round, after so many inner steps."""

    step: int
    parameters: frozenset[str]  # those of the stage


def deaths_in(round_: int, spec: RunSpec) -> dict[str, Death]:
    """Return the groups that lose a stage in a round, each independently with probability `research.deaths`.

    The stage, and the number of steps from 1 to H, are equally likely. A group that loses a stage at a probability
    loses it at any larger one. If all replicas would lose one, the last group loses none.
    """
    share, seed, found = research_of(spec.config).deaths, spec.config.seed, dict[str, Death]()
    for replica in spec.config.replicas if share else ():
        stages = [one for one in spec.members.values() if one.replica.name == replica.name and one.stage is not None]
        of = seed, round_, replica.name
        if len(stages) > 1 and seed_of("death", *of) / _DRAWS < share and len(found) + 1 < len(spec.config.replicas):
            stage, step = stages[seed_of("stage", *of) % len(stages)], 1 + seed_of("step", *of) % spec.inner_steps
            found[replica.name] = Death(step, frozenset(stage.owned))
    return found


def share_of(spec: RunSpec, replica: str, round_: int) -> Share:
    """Return the part of the text that a replica reads in a round.

    If shards are clusters, the first replica reads all of the text while it trains alone (DiLoCo, section 3).
    """
    own = research_of(spec.config)
    if own.clusters is None:
        return spec.share_of(replica, round_)
    names = [one.name for one in spec.config.replicas]
    index, count, alone = names.index(replica), len(names), own.pretraining
    if round_ <= alone and index == 0:
        return Share(0, 1)
    return Share(index, count, (), alone + 1, (min(alone + 1, max(round_, 1)) - 1) * spec.inner_steps)


@dataclass(frozen=True, kw_only=True)
class ClusteredBatches(StoreBatches):
    """Batches of a shard that consists of the windows of a replica's own clusters. Such shards do not rotate."""

    clusters: Clusters

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_size < self.batch_size:
            raise ConfigError(
                ("research", "clusters"),
                f"found {self.shard_size} sequences in the clusters of replica {self.replica} of "
                f"{self.replicas}, expected at least {self.batch_size} for one batch; use fewer clusters, "
                "or more text",
            )

    @cached_property
    def _own(self) -> np.ndarray:
        return self.clusters.windows(self.replica, self.replicas)

    @property
    def shard_size(self) -> int:
        """Number of windows in the replica's clusters."""
        return len(self._own)

    def _windows_at(self, positions: np.ndarray, shard: int) -> np.ndarray:
        return self._own[positions]


def table_batches(spec: RunSpec, member: MemberSpec, source: Source) -> tuple[SharedBatches, list[Tensor]]:
    """Return what `replica_batches` does, from clusters if the row has them.

    Raises ConfigError if some share of the replica is too small, also a share that it reads later.
    """
    if research_of(spec.config).clusters is None:
        return replica_batches(spec, member, source)
    replica, alone = member.replica.name, research_of(spec.config).pretraining

    def batches_of(share: Share) -> ClusteredBatches:
        batches = _clustered(spec, source, share, member.replica.batch_size)
        if not spec.config.data.repeat:
            last = alone if share.replicas == 1 and alone else spec.config.rounds
            batches.require_one_epoch((last - share.round + 1) * spec.inner_steps)
        return batches

    batches_of(share_of(spec, replica, alone + 1))
    return SharedBatches(share_of(spec, replica, 1), batches_of), validation_rows(spec, member, source)


def _clustered(spec: RunSpec, source: Source, share: Share, size: int) -> ClusteredBatches:
    data, seed, count = spec.config.data, spec.config.seed, research_of(spec.config).clusters
    assert isinstance(source, TokenStore) and count is not None
    return ClusteredBatches(
        store=source,
        sequence_length=data.sequence_length,
        seed=share.seed(seed),
        replica=share.replica,
        replicas=share.replicas,
        batch_size=size,
        clusters=find_clusters(source, data.sequence_length, count, seed),
    )


class Weights:
    """Weights of contributions by replica: equal, by tokens, or by the sequences in a replica's shard of clusters."""

    def __init__(self, spec: RunSpec, source: Source) -> None:
        weight, research = spec.config.outer.weight, research_of(spec.config)
        tokens = spec.inner_steps * spec.config.data.sequence_length
        self._since = {1: {one.name: weight(tokens * one.batch_size) for one in spec.config.replicas}}
        for round_ in (1, research.pretraining + 1) if research.weighs_examples else ():
            shares = {one.name: share_of(spec, one.name, round_) for one in spec.config.replicas}
            self._since[round_] = {
                name: float(_clustered(spec, source, share, 1).shard_size) for name, share in shares.items()
            }

    def in_round(self, round_: int) -> dict[str, float]:
        """Return the weight of every replica in a round."""
        return self._since[max(since for since in self._since if since <= round_)]
