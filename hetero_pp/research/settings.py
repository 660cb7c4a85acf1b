"""Settings that only tables need: the `research` section of a row's run. Launched runs have none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field, PositiveInt

from hetero_pp.config.audit import LEAST_SEQUENCES, GauntletSettings, RecomputeSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import MagnitudeSettings, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Ratio, Settings
from hetero_pp.research.attacks import ATTACKS, Attack


class Every(NamedTuple):
    """Rounds between two measurements of each kind; None where nothing is measured. They do not affect training."""

    bias: int | None = None  # equation 5 of Het-PP
    similarity: int | None = None  # cosines of contributions
    volume: int | None = None  # size of contributions with each collective
    outer: int | None = None  # outer gradient: its norm, and cosines with a reference momentum


UNMEASURED = Every()


class PeerSettings(Settings):
    """Published boundary method in place of the subspace; `rank` and `bits` or `dtype` of the boundary set its size."""

    method: Literal["resbm", "mapl", "tah_quant"] = Field(
        description="published method that replaces the subspace (see hetero_pp.research.trainer.peers)"
    )
    four_bits: Ratio = Field(0.8, description="TAH-Quant: share of the tiles that use 4 bits; the others use 3")
    gradient_bits: int = Field(6, ge=2, le=8, description="TAH-Quant: bits per value of a gradient")


class AblationSettings(Settings):
    """Parts of a compressed replica, as the papers vary them."""

    adaptation: Literal["on", "stale", "discarded"] = Field(
        "on",
        description="treatment of the embedding after an outer round: `on` splits it again, `stale` "
        "keeps the first T_perp, `discarded` drops the part of T_S that left the "
        "subspace (replicas then differ between rounds)",
    )
    weight_projection: Literal[False, "w_p1", "both"] = Field(
        False,
        description="matrices that are projected onto the subspace after each step: `w_p1` "
        "(attention), or `both` W_p1 and W_p2 (feed-forward)",
    )
    modified_adamw: bool = Field(
        False, description="share second moments across the width, so that an update stays in the subspace"
    )
    grassmann_every: int | None = Field(None, ge=1, description="outer rounds between updates of U along the gradients")
    grassmann_step: float = Field(0.1, gt=0, description="size of an update of U: tangent of its largest angle")
    peer: PeerSettings | None = Field(None, description="published boundary in place of the subspace")


class ScoreSettings(GauntletSettings):
    """Scores of a row. Its contributions with a low agreement are excluded from the next round on."""

    evaluated: int = Field(2, ge=1, description="number of replicas drawn in each round")
    sequences: int = Field(LEAST_SEQUENCES, ge=2, description="sequences of assigned, and of other text")
    agreement: Ratio | None = Field(None, gt=0, lt=1, description="least agreement of signs; by default none")


class AttackSettings(Settings):
    """Hostile replicas, which are the last ones of the list, and what the others defend themselves with."""

    attack: str = Field("none", description="name of the attack (see hetero_pp.research.attacks)")
    hostile: int = Field(2, ge=1, description="number of hostile replicas; `attack: none` has none")
    bounds: MagnitudeSettings | None = Field(
        None, description="bounds of sizes, as `exchange.magnitudes`; `{}` turns them on"
    )
    signs: Ratio | None = Field(
        None, gt=0, lt=1, description="least agreement of signs, as `audit.gauntlet.agreement`; by default none"
    )
    scores: ScoreSettings | None = Field(None, description="scores, as `audit.gauntlet`; `{}` turns them on")
    validators: int = Field(3, ge=1, description="number of validators, of which the median counts; the first may lie")
    recomputes: RecomputeSettings | None = Field(
        None, description="recomputation, as `audit.recompute`; `{}` turns it on"
    )

    def hostile_of(self, replicas: Sequence[str]) -> Sequence[str]:
        """Return the hostile ones of the names of all replicas."""
        return () if self.attack == "none" else replicas[len(replicas) - self.hostile :]


class ResearchSettings(Settings):
    """Settings of a row beside those of a run."""

    missed: Ratio = Field(0.0, ge=0, lt=1, description="share of contributions that rounds exclude at random")
    deaths: Ratio = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a group loses a stage in a round. Its new holder begins after a number of inner "
        "steps that is drawn from 1 to H, from theta and the moments before the round",
    )
    undoes_deaths: bool = Field(
        False, description="a group that loses a stage misses the round, as if it had not trained; else it resumes"
    )
    averages_moments: bool = Field(
        False,
        description="average the moments of the inner AdamW in each round, too, which triples the bytes "
        "(DiLoCo, section 6.1)",
    )
    taking_part: dict[PositiveInt, PositiveInt] = Field(
        {},
        description="number of participating replicas by first round. The first replicas of the list "
        "participate and the others wait (DiLoCo, figure 7). Empty: all replicas in "
        "every round",
    )
    pretraining: int = Field(
        0,
        ge=0,
        description="rounds in which only the first replica trains, and theta is set to its "
        "parameters. The outer optimizer starts afterwards (DiLoCo, figure 3)",
    )
    warms_up_again: bool = Field(
        False,
        description="after `pretraining`, multiply the inner learning rate by a second linear warm-up of as many steps "
        "(DiLoCo, section 3.1)",
    )
    elects_signs: bool = Field(
        False,
        description="average in each coordinate only the contributions with the sign of their sum (the disjoint merge "
        "of TIES, which DiLoCo tried in section 6.1)",
    )
    clusters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="number of clusters of similar text windows to distribute over the replicas, like DiLoCo's "
        "non-i.i.d. shards. By default, windows are distributed at random",
    )
    weighs_examples: bool = Field(
        False,
        description="weight contributions by the sequences in their replica's shard (DiLoCo, section 6.1); "
        "needs `clusters`",
    )
    memory_drops: Ratio = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the largest momentum values in each chunk that a replica drops after a round (Sub-k of "
        "SparseLoCo, section 2.2)",
    )
    ablations: AblationSettings = Field(AblationSettings(), description="ablations of all groups of participants")
    attacks: AttackSettings | None = Field(None, description="hostile replicas and defences against them")

    @property
    def counts(self) -> Mapping[int, int | None]:
        """Number of participating replicas by first round, including pretraining; None: all.

        The first replicas of the list participate. Empty: all of them, in every round.
        """
        if self.pretraining == 0:
            return self.taking_part
        after = self.pretraining + 1
        said = [since for since in self.taking_part if since <= after]
        later = {since: count for since, count in self.taking_part.items() if since > after}
        return {1: 1, after: self.taking_part[max(said)] if said else None, **later}


class ResearchConfig(RunConfig):
    """Configuration of a row's run."""

    research: ResearchSettings = ResearchSettings()

    def check(self) -> None:
        """Raise ConfigError for faults across fields. Reads no files."""
        super().check()
        self._require_only_one_of()
        own, count = self.research, len(self.replicas)
        if own.taking_part and 1 not in own.taking_part:
            found = f"found `taking_part` from round {min(own.taking_part)} on, expected the number from round 1 on"
            raise ConfigError(("research", "taking_part"), found)
        for since, wanted in own.taking_part.items():
            if wanted > count:
                found = f"found {wanted}, expected at most the number of replicas, {count}"
                raise ConfigError(("research", "taking_part", since), found)
        if own.attacks is not None:
            if own.attacks.attack not in ATTACKS:
                found = f"found `{own.attacks.attack}`, expected one of {', '.join(ATTACKS)}"
                raise ConfigError(("research", "attacks", "attack"), found)
            if own.attacks.hostile >= count:
                found = f"found {own.attacks.hostile} of {count} replicas, expected an honest one at least"
                raise ConfigError(("research", "attacks", "hostile"), found)
        if self.outer.tokens is not None:
            found = f"found {self.outer.tokens:,}, expected `rounds`: rows of a table are compared after equal rounds"
            raise ConfigError(("outer", "tokens"), found)
        if own.clusters is not None and own.clusters < count:
            found = f"found {own.clusters}, expected at least one for each of {count} replicas"
            raise ConfigError(("research", "clusters"), found)
        for index, replica in enumerate(self.replicas):
            if replica.steps is not None:
                found = f"found {replica.steps}, expected none: in tables all replicas take the same steps"
                raise ConfigError(("replicas", index, "steps"), found)

    def _require_only_one_of(self) -> None:
        """Raise ConfigError for a key that is set although the run has something that excludes it."""
        own, outer, compression = self.research, self.outer, self.outer.compression
        boundaries = [one.boundary for one in self.replicas if isinstance(one, ParticipantsReplica)]
        ablations = own.ablations if boundaries else _NONE
        is_inside = any(one.embedding == "coefficients" for one in boundaries)
        is_sparse = compression.density < 1 or compression.value_bits < 32
        has = {
            "gradients": (outer.source == "gradient", "averaged gradients"),
            "overlap": (outer.overlap > 0, "`outer.overlap: 1`"),
            "streaming": (outer.is_streaming, outer.streaming),
            "counts": (len(own.counts) > 0, "`taking_part` or `pretraining`"),
            "missed": (own.missed > 0, "`research.missed`"),
            "deaths": (own.deaths > 0, "`research.deaths`"),
            "anchors": (any(one.anchors is not None for one in boundaries), "`boundary.anchors`"),
            "local": (outer.keep_local, "`outer.keep_local`"),
            "sparse": (is_sparse, "`density` below 1 or `value_bits` below 32"),
            "momentum": (compression.memory == "momentum", "`memory: momentum`"),
            "feedback": (compression.memory == "error_feedback", "`memory: error_feedback`"),
            "robust": (outer.is_robust, f"`outer.aggregation: {outer.aggregation}`"),
            "scratch": (own.pretraining == 0, "no `pretraining`"),
            "tokens": (outer.weights == "tokens", "`outer.weights: tokens`"),
            "stream": (self.data.streamed is not None, "a streamed corpus"),
            "equal": (own.clusters is None, "shards of equal size, without `research.clusters`"),
            "optimizer": (self.inner.optimizer != "adamw", "an `inner.optimizer` but `adamw`"),
            "modified": (ablations.modified_adamw, "`modified_adamw`"),
            "coefficients": (is_inside, "`boundary.embedding: coefficients`"),
        }
        exclusions = [
            ("missed", own.missed > 0, "gradients"),
            ("deaths", own.deaths > 0, "gradients overlap streaming counts missed local robust coefficients anchors"),
            ("averages_moments", own.averages_moments, "gradients overlap streaming counts missed optimizer"),
            ("averages_moments", own.averages_moments, "modified coefficients"),
            ("taking_part", len(own.taking_part) > 0, "gradients overlap streaming local"),
            ("pretraining", own.pretraining > 0, "gradients overlap streaming local sparse momentum"),
            ("warms_up_again", own.warms_up_again, "scratch"),
            ("elects_signs", own.elects_signs, "gradients robust"),
            ("attacks", own.attacks is not None, "gradients overlap streaming counts missed deaths local momentum"),
            ("clusters", own.clusters is not None, "stream"),
            ("weighs_examples", own.weighs_examples, "gradients tokens equal robust"),
            ("memory_drops", own.memory_drops > 0, "feedback"),
            ("ablations.modified_adamw", ablations.modified_adamw, "optimizer"),
            ("ablations.adaptation", ablations.adaptation == "discarded", "gradients overlap streaming"),
            ("ablations.peer", ablations.peer is not None, "counts streaming"),
            ("ablations.grassmann_every", ablations.grassmann_every is not None, "counts streaming"),
        ]
        for key, is_set, others in exclusions:
            for is_so, other in map(has.__getitem__, others.split() if is_set else ()):
                if is_so:
                    found = f"found this key with {other}, expected only one of them"
                    raise ConfigError(("research", *key.split(".")), found)


_NONE = AblationSettings()


def research_of(config: RunConfig) -> ResearchSettings:
    """Return the `research` section of a row's configuration; the defaults for that of an ordinary run."""
    return config.research if isinstance(config, ResearchConfig) else ResearchSettings()


def ablations_of(config: RunConfig, replica: ReplicaSettings) -> AblationSettings:
    """Return the ablations of a replica; the defaults unless it is a group of participants."""
    return research_of(config).ablations if isinstance(replica, ParticipantsReplica) else _NONE


def attack_of(config: RunConfig, replica: str) -> Attack | None:
    """Return what a replica does otherwise than an honest one; None if it is honest."""
    attacks = research_of(config).attacks
    names = [one.name for one in config.replicas]
    return ATTACKS[attacks.attack] if attacks is not None and replica in attacks.hostile_of(names) else None
