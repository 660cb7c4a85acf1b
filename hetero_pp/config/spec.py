"""Spec of a run: a configuration, and what follows from it alone: members, their parameters, links, the run's id."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch

from hetero_pp.config.changes import LAST, NO_CHANGES, REPLICAS, Changes
from hetero_pp.config.lines import (
    DIRECTIONS,
    EXCHANGE,
    Line,
    LinkSettings,
    LinkShape,
    LinkSpec,
    exchange_link_name,
    members_at,
    stage_link_name,
)
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.data.batches import Share
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import EMBEDDING, ModelShape, Transformer, block_of, build_part, parameters_of
from hetero_pp.outer.fragments import WHOLE, Fragments


@dataclass(frozen=True)
class Roster:
    """Participants of a run: replicas, their members, and the blocks that each member owns."""

    members: Mapping[str, str]  # member -> replica
    blocks: Mapping[str, frozenset[str]]  # member -> blocks that it contributes
    counts: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(link, direction) -> member that counts the bytes sent there"""
    follows: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """member -> blocks that it holds beside those that it contributes"""
    fragments: Fragments = WHOLE

    def holds(self, member: str) -> frozenset[str]:
        """Return the blocks for which a member reports hashes."""
        return self.blocks[member] | self.follows.get(member, frozenset())

    def contributes(self, member: str, round_: int) -> frozenset[str]:
        """Return the blocks that a member contributes to a round."""
        return self.fragments.among(self.blocks[member], round_)

    @property
    def replicas(self) -> list[str]:
        return sorted(set(self.members.values()))


@dataclass(frozen=True)
class MemberSpec:
    """One member that trains: its replica, and its stage (None for a whole replica)."""

    name: str
    replica: ReplicaSettings
    replica_index: int
    stage: StageSpec | None
    owned: tuple[str, ...]  # names of the parameters that it trains

    def setting(self, key: str) -> tuple[Any, tuple[str | int, ...]]:
        """Return the value that a key has for the member's machine, and the key's path in the YAML."""
        value, path = self.replica.setting(0 if self.stage is None else self.stage.index, key)
        return value, ("replicas", self.replica_index, *path)

    @property
    def reads_data(self) -> bool:
        """Whether the member reads the corpus: a whole replica does, and a group's first stage."""
        return self.stage is None or self.stage.is_first

    @property
    def follows_embedding(self) -> bool:
        """Whether the member keeps a synchronized copy of a token embedding that another member trains."""
        return (
            isinstance(self.replica, ParticipantsReplica)
            and self.replica.boundary.rank != "full"
            and EMBEDDING not in self.owned
        )


@lru_cache(maxsize=256)
def _shapes_of(shape: ModelShape, stage: StageSpec | None) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter of a stage or of the whole model, by name. Cached for runs of one model."""
    with torch.device("meta"):
        module = Transformer(shape) if stage is None else build_part(shape, stage)
    return MappingProxyType({name: tuple(parameter.shape) for name, parameter in parameters_of(module).items()})


def _lines_of(config: RunConfig) -> Iterator[Line]:
    """Yield every line of a run: those of sites first, then those of other members in the order of the run."""
    kinds = {
        member: replica.setting(stage, "line")[0]
        for replica in config.replicas
        for stage, member in enumerate(replica.members)
    } | {EXCHANGE: config.exchange.line}
    every: dict[str, tuple[str | None, tuple[str, ...]]] = {
        name: (site.line, members_at(site.members, list(kinds))) for name, site in config.sites.items()
    }
    at_sites = {member for _, members in every.values() for member in members}
    every |= {member: (own, (member,)) for member, own in kinds.items() if member not in at_sites}
    for name, (kind, members) in every.items():
        if kind is not None:
            yield Line.model_construct(**dict(config.lines[kind]), name=name, kind=kind, members=members)


def _links_of(config: RunConfig, lines: Iterable[Line]) -> Iterator[LinkSpec]:
    """Yield every link of a run, with stage links first in each replica."""
    line_of = {member: line for line in lines for member in line.members}

    def link(name: str, source: str, target: str, kind: str | None) -> LinkSpec:
        settings = LinkSettings() if kind is None else config.links[kind]
        both = line_of.get(source), line_of.get(target)
        passed = [None, None] if both[0] == both[1] else both
        latency = sum(line.latency for line in passed if line is not None)
        jitter = sum(line.jitter for line in passed if line is not None)
        own = map(settings.shape, DIRECTIONS)
        forward, backward = (LinkShape(one.bandwidth, one.latency + latency, one.jitter + jitter) for one in own)
        return LinkSpec(name, source, target, forward, backward, *passed)

    for replica in config.replicas:
        if isinstance(replica, ParticipantsReplica):
            for hop in range(replica.stage_count - 1):
                kind = replica.link[hop] if isinstance(replica.link, list) else replica.link
                yield link(stage_link_name(replica.name, hop), replica.members[hop], replica.members[hop + 1], kind)
        for stage, member in enumerate(replica.members):
            yield link(exchange_link_name(member), member, EXCHANGE, replica.setting(stage, "uplink")[0])


class RunSpec:
    """Configuration and everything that follows from it alone, the same in every process."""

    def __init__(self, config: RunConfig, vocabulary: int | None, changes: Changes = NO_CHANGES) -> None:
        changes.require_changeable(config)
        current = changes.at(config, LAST).replicas
        self.config = config = changes.at(config, 1).model_copy(update={"replicas": current})
        """Settings that never change, and the current replicas. Others have the values of the start: ask `at`."""
        self.changes = changes
        self._since: dict[int, RunConfig] = {}
        """First round of a configuration -> the configuration; not one for each round, because runs may be long."""
        self.shape: ModelShape = config.model.resolve(vocabulary)
        self.total_steps: int | None = None
        """Inner steps of each replica; None if a round lasts a given time, or the run ends after a number of tokens."""
        if config.inner.steps is not None and self.latest.outer.tokens is None:
            self.total_steps = self.latest.rounds * config.inner.steps
        self.lines = {line.name: line for line in _lines_of(config)}
        self.links = {link.name: link for link in _links_of(config, self.lines.values())}
        self.members: dict[str, MemberSpec] = {}
        for index, replica in enumerate(config.replicas):
            stages: list[StageSpec | None] = [None]
            if isinstance(replica, ParticipantsReplica):
                ranges = enumerate(replica.layer_ranges(self.shape.layers))
                stages = [StageSpec(stage, replica.stage_count, layers) for stage, layers in ranges]
            for name, own in zip(replica.members, stages, strict=True):
                self.members[name] = MemberSpec(name, replica, index, own, tuple(_shapes_of(self.shape, own)))
        self.needed = {name: member for name, member in self.members.items() if not member.replica.optional}
        """Members that must join before the run begins."""

    @property
    def parameter_count(self) -> int:
        """Number of parameters of a replica."""
        return sum(math.prod(shape) for shape in self.parameter_shapes.values())

    @cached_property
    def agreed(self) -> str:
        """Settings that all hosts agree on, as JSON."""
        return json.dumps(meaning(self.at(1), NotPartOf.RUN), sort_keys=True)

    @cached_property
    def run(self) -> str:
        """Run id in contributions: the same on all hosts, regardless of where they keep their files."""
        return hashlib.sha256(self.agreed.encode()).hexdigest()[:32]

    @property
    def inner_steps(self) -> int:
        """H. Raises ConfigError if a round lasts a given time."""
        return self.config.inner.require_steps("the number of steps per round is not known in advance")

    def steps_of(self, replica: str) -> int | None:
        """Return the inner steps of a replica in each round, its own or H; None if a round lasts a given time."""
        return self._own_steps.get(replica, self.config.inner.steps)

    @cached_property
    def _own_steps(self) -> Mapping[str, int]:
        own = {one.name: one.steps for one in self.replicas_ever if one.steps is not None}
        given, rehearsed = self.config.inner.steps, self.config.rehearsal
        if given is None or rehearsed is None or rehearsed.steps is None:
            return own
        # A rehearsal has fewer steps a round. The replica takes the same share of them as in the run.
        return {name: max(1, round(steps * given / rehearsed.steps)) for name, steps in own.items()}

    @property
    def resumes(self) -> bool:
        """Whether a group that lost a stage resumes at the inner step; else it begins the round again."""
        outer = self.config.outer
        return not outer.overlap and not outer.keep_local and outer.source == "difference"

    def with_changes(self, changes: Changes) -> RunSpec:
        return RunSpec(self.config, self.shape.vocabulary, changes)

    @cached_property
    def _replicas_since(self) -> Mapping[int, Sequence[ReplicaSettings]]:
        """First round -> replicas that take part from then on."""
        return {since: self.at(since).replicas for since in self.changes.replicas_since}

    def share_of(self, replica: str, round_: int) -> Share:
        """Return the part of the text that a replica reads in a round.

        Before it takes part, this is the part that it will read from its start.
        """
        names = {since: [one.name for one in found] for since, found in self._replicas_since.items()}
        having = [since for since, found in names.items() if replica in found]
        since = max((one for one in having if one <= max(round_, 1)), default=min(having))
        index, count = names[since].index(replica), len(names[since])
        if (steps := self.steps_of(replica)) is None:
            return Share(index, count, (), since, None)
        # Optional replicas of the same batch size and steps share their text in turns: while they are present, they are
        # at the same step of shards of the same size. No replica then reads what another reads, and a few of them read
        # all that many would.
        replicas = self._replicas_since[since]
        size = (replicas[index].batch_size, steps)
        same = (number for number, one in enumerate(replicas) if (one.batch_size, self.steps_of(one.name)) == size)
        rotation = tuple(number for number in same if replicas[number].optional) if replicas[index].optional else ()
        return Share(index, count, rotation, since, (min(since, max(round_, 1)) - 1) * steps)

    @property
    def replicas_ever(self) -> Sequence[ReplicaSettings]:
        """All replicas that take part or did before, the current ones first."""
        before = (replica for since in sorted(self._replicas_since) for replica in self._replicas_since[since])
        by_name: dict[str, ReplicaSettings] = {}
        for replica in [*self.config.replicas, *before]:
            by_name.setdefault(replica.name, replica)
        return list(by_name.values())

    def replicas_in(self, round_: int) -> Sequence[ReplicaSettings]:
        """Return the replicas that take part in a round, if they are present."""
        return self._replicas_since[max(since for since in self._replicas_since if since <= max(round_, 1))]

    def awaited_in(self, round_: int) -> list[str]:
        """Return the names of the replicas that a round should include. Optional replicas are not missed."""
        return [replica.name for replica in self.replicas_in(round_) if not replica.optional]

    def at(self, round_: int) -> RunConfig:
        """Return the configuration of a round, with the replicas that take part in it."""
        since = self.changes.newest(round_)
        if since not in self._since:
            self._since[since] = self.changes.at(self.config, since)
        return self._since[since]

    @property
    def latest(self) -> RunConfig:
        """The configuration of the last round."""
        return self.at(LAST)

    def rates_in(
        self,
        round_: int,
        first: int,
        expected: int | None,
        steps: int | None = None,
        trained: tuple[int, int] = (0, 0),
    ) -> LearningRates:
        """Return the learning rates of a round whose first step has the number `first`.

        ByRounds explains `expected`. `steps` are the replica's in each round, by default H. Warm-up and cosine then
        cover the same rounds with its own steps. `trained` is a round whose record is known before this one, and its
        tokens, for a run that ends after a number of tokens. Before the first record, its rounds have as many tokens as
        the configuration says; if that is not known, the rate does not fall.
        """
        config = self.at(round_)
        own = steps or config.inner.steps
        if own is None or config.inner.steps is None or config.outer.tokens is not None:
            rounds = config.outer.rounds_at(*(trained if trained[0] else (1, config.tokens_of_a_round)))
            if own is None and trained[0] == 0 and config.outer.tokens is not None:
                rounds = math.inf
            return config.inner.rates_in(round_, rounds, first, expected if own is None else own)
        return config.inner.rates(own * config.rounds, own / config.inner.steps)

    @property
    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter of the whole model, by name."""
        return _shapes_of(self.shape, None)

    @property
    def optional_slots(self) -> dict[str, list[str]]:
        """Members of optional replicas, by replica, in the order of their stages."""
        found: dict[str, list[str]] = {}
        for name, member in self.members.items():
            if member.replica.optional:
                found.setdefault(member.replica.name, []).append(name)
        return found

    @property
    def unnamed_slots(self) -> frozenset[str]:
        """Slots for tickets that name none: stages of groups; all slots if the run has no group."""
        stages = frozenset(name for name, member in self.members.items() if member.stage is not None)
        return stages or frozenset(self.members)

    @cached_property
    def roster(self) -> Roster:
        """Members, blocks and links of the run, for the exchange."""
        counts: dict[tuple[str, str], str] = {}
        for link in self.links.values():  # the sender counts a direction's bytes; on links to the exchange, the member
            target = link.source if link.target == EXCHANGE else link.target
            counts |= {(link.name, "forward"): link.source, (link.name, "backward"): target}
        return Roster(
            {name: member.replica.name for name, member in self.members.items()},
            {name: frozenset(map(block_of, member.owned)) for name, member in self.members.items()},
            counts,
            {name: frozenset([block_of(EMBEDDING)]) for name, one in self.members.items() if one.follows_embedding},
            self.fragments,
        )

    @property
    def fragments(self) -> Fragments:
        """The fragments in which rounds synchronise the model."""
        return self.config.outer.fragments_of(self.shape.layers)

    @property
    def largest_rank(self) -> int | None:
        """Largest rank of all boundaries at the start of the run, and the number of columns of the basis.

        None if nothing is compressed.
        """
        ranks = [
            rank
            for replica in self.at(1).replicas
            if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1
            if (rank := replica.boundary.dimensions(self.shape.width)) is not None
        ]
        return max(ranks, default=None)


def require_known_basis(spec: RunSpec) -> None:
    """Raise ConfigError for a boundary whose rank exceeds the basis, which was made when the run began."""
    most = spec.largest_rank
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1:
            rank = replica.boundary.dimensions(spec.shape.width)
            if rank is not None and (most is None or rank > most):
                expected = (
                    ("`full`, because nothing was compressed") if most is None else f"at most {most}, the largest rank"
                )
                key = (REPLICAS, index, "boundary", "rank")
                raise ConfigError(key, f"found {rank}, expected {expected} at the start of the run")
