"""Settings of audits: scores of contributions (Gauntlet), and recomputation of replicas' rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hetero_pp.config.settings import Ratio, Settings


class GauntletSettings(Settings):
    """Scores of contributions by the loss before and after each is applied (Gauntlet, arXiv:2505.21684)."""

    evaluated: int = Field(2, ge=1, description="number of replicas drawn in each round whose contributions are tried")
    sequences: int = Field(
        8, ge=2, description="sequences of assigned, and of other text, on which a contribution is tried"
    )
    step: Ratio = Field(0.2, gt=0, le=1, description="share of the outer learning rate with which it is tried")
    alpha: Ratio = Field(0.05, gt=0, le=1, description="weight of the newest round in the moving average")
    threshold: float = Field(0.1, description="moving average of the indicator below which a replica is excluded")
    grace: int = Field(10, ge=0, description="evaluations of a replica before the threshold applies to it")
    overlap: Ratio = Field(
        0.4,
        gt=0,
        le=1,
        description="overlap of two contributions above which the later is a copy, from 0 for what is usual of a pair "
        "to 1 for equal ones",
    )
    agreement: Ratio | None = Field(
        None,
        gt=0,
        lt=1,
        description="agreement of a contribution's signs with those of the others below which its replica is excluded, "
        "from 0 for chance to 1 for what is usual of a contribution; by default none is",
    )
    include: int | None = Field(
        None, ge=1, description="number of replicas with the best scores that a round includes; by default all"
    )
    excluded_rounds: int = Field(16, ge=1, description="number of rounds from which a replica is then excluded")


class RecomputeSettings(Settings):
    """Recomputation of replicas' rounds, compared with what they contributed."""

    share: Ratio = Field(0.02, gt=0, le=1, description="share of the replicas' rounds that are computed again")
    tolerance: float = Field(
        0.0,
        ge=0,
        description="largest relative difference of a block between a contribution and its recomputation; 0: the same "
        "bits, for machines of the same kind",
    )


class AuditSettings(Settings):
    """Audits of contributions. Without hostile members they change no bit of a run."""

    by: Literal["exchange", "validators"] = Field(
        "exchange", description="who audits: a thread beside the exchange, or processes started by `hetero-pp validate`"
    )
    gauntlet: GauntletSettings | None = Field(None, description="score contributions; `{}` turns it on")
    recompute: RecomputeSettings | None = Field(None, description="compute rounds again; `{}` turns it on")
