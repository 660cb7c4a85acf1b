"""Settings that only tables need: the `research` section of a row's run. Launched runs have none of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hetero_pp.config.settings import Ratio, Settings
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.run.config import RunConfig


class PeerSettings(Settings):
    """Published boundary method in place of the subspace; `rank` and `bits` or `dtype` of the boundary set its size."""

    method: Literal["resbm", "mapl", "tah_quant"] = Field(
        description="published method that replaces the subspace (see hetero_pp.research.peers)"
    )
    four_bits: Ratio = Field(0.8, description="TAH-Quant: share of the tiles that use 4 bits; the others use 3")
    gradient_bits: int = Field(6, ge=2, le=8, description="TAH-Quant: bits per value of a gradient")


class AblationSettings(Settings):
    """Parts of a compressed replica, as the papers vary them."""

    embedding: Literal["free", "coefficients", "projected"] = Field(
        "free",
        description="training of T_S: `free` (leaves the subspace until the next split), "
        "`coefficients` (C of T_S = C U^T), or `projected` (back onto the subspace after "
        "each step)",
    )
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


class ResearchSettings(Settings):
    """Settings of a row beside those of a run."""

    missed: Ratio = Field(0.0, ge=0, lt=1, description="share of contributions that rounds exclude at random")
    averages_moments: bool = Field(
        False,
        description="average the moments of the inner AdamW in each round, too, which triples the bytes "
        "(DiLoCo, section 6.1)",
    )
    ablations: AblationSettings = Field(AblationSettings(), description="ablations of all groups of participants")


class ResearchConfig(RunConfig):
    """Configuration of a row's run."""

    research: ResearchSettings = ResearchSettings()

    def check(self) -> None:
        """Raise ConfigError for faults across fields. Reads no files."""
        super().check()
        own, outer = self.research, self.outer
        ablations = own.ablations if any(isinstance(one, ParticipantsReplica) for one in self.replicas) else _NONE
        gradients, overlaps, counts = outer.source == "gradient", outer.overlap > 0, len(outer.counts) > 0
        moments = ("averages_moments",)
        together: list[tuple[tuple[str, ...], bool, str]] = [
            (("missed",), own.missed > 0 and gradients, "averaged gradients"),
            (moments, own.averages_moments and gradients, "averaged gradients"),
            (moments, own.averages_moments and overlaps, "`outer.overlap: 1`"),
            (moments, own.averages_moments and counts, "`outer.taking_part` or `outer.pretraining`"),
            (moments, own.averages_moments and own.missed > 0, "`research.missed`"),
            (moments, own.averages_moments and self.inner.optimizer != "adamw", "an `inner.optimizer` but `adamw`"),
            (moments, own.averages_moments and ablations.modified_adamw, "`modified_adamw`"),
            (moments, own.averages_moments and ablations.embedding == "coefficients", "`embedding: coefficients`"),
            (
                ("ablations", "modified_adamw"),
                ablations.modified_adamw and self.inner.optimizer != "adamw",
                "an `inner.optimizer` but `adamw`",
            ),
            (("ablations", "adaptation"), ablations.adaptation == "discarded" and overlaps, "`outer.overlap: 1`"),
            (
                ("ablations", "peer"),
                ablations.peer is not None and counts,
                "`outer.taking_part` or `outer.pretraining`",
            ),
            (
                ("ablations", "grassmann_every"),
                ablations.grassmann_every is not None and counts,
                "`outer.taking_part` or `outer.pretraining`",
            ),
        ]
        for key, is_so, other in together:
            if is_so:
                raise ConfigError(("research", *key), f"found this key with {other}, expected only one of them")


_NONE = AblationSettings()


def research_of(config: RunConfig) -> ResearchSettings:
    """Return the `research` section of a row's configuration; the defaults for that of an ordinary run."""
    return config.research if isinstance(config, ResearchConfig) else ResearchSettings()


def ablations_of(config: RunConfig, replica: ReplicaSettings) -> AblationSettings:
    """Return the ablations of a replica; the defaults unless it is a group of participants."""
    return research_of(config).ablations if isinstance(replica, ParticipantsReplica) else _NONE
