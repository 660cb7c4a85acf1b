"""Settings of audits: scores of contributions (Gauntlet), and recomputation of replicas' rounds."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from hetero_pp.core.settings import Ratio, Settings

OFF = "off"
FEWEST_REPLICAS = 3  # Replicas among which the others of one can outvote it. With fewer, defences are off by default.

_EVALUATED = 2, 1 / 4
"""Contributions that are tried in each round: at least so many, and at least this share of the replicas."""
LEAST_SEQUENCES, MOST_SEQUENCES = 8, 64
_SHARE_OF_COMPUTE = 1 / 20
"""Compute of the trials as a share of that of the replicas, from which the sequences follow between these bounds."""

TEXTS, PARAMETERS = 2, 2  # assigned and other text, each with the parameters before and after a contribution
FORWARDS_A_STEP = 3  # cost of a sequence in an inner step, in forward passes: the backward takes two


class AuditSizes(NamedTuple):
    """Sizes of the trials of one round."""

    evaluated: int
    sequences: int


class GauntletSettings(Settings):
    """Comparison of the contributions' signs, and scores by the loss before and after (Gauntlet, arXiv:2505.21684)."""

    evaluated: int | None = Field(
        None,
        ge=0,
        description="number of replicas drawn in each round whose contributions are tried; by default a quarter, and "
        "at least 2. With 0 only signs are compared, and nothing is scored",
    )
    sequences: int | None = Field(
        None,
        ge=2,
        description="sequences of assigned, and of other text, on which a contribution is tried; by default 8 to 64, "
        "for a twentieth of the replicas' compute",
    )
    step: Ratio = Field(0.2, gt=0, le=1, description="share of the outer learning rate with which it is tried")
    alpha: Ratio = Field(0.05, gt=0, le=1, description="weight of the newest round in the moving average")
    threshold: float = Field(0.1, description="moving average of the indicator below which a replica is excluded")
    grace: int = Field(10, ge=0, description="evaluations of a replica before the threshold applies to it")
    overlap: Ratio = Field(
        0.4,
        gt=0,
        le=1,
        description="overlap of two contributions above which one is a copy, from 0 for what is usual of a pair to 1 "
        "for equal ones",
    )
    agreement: Ratio | None = Field(
        0.1,
        gt=0,
        lt=1,
        description="agreement of a contribution's signs with those of the others below which the round leaves it out, "
        "and its replica is excluded, from 0 for chance to 1 for what is usual of a contribution; `null`: none is",
    )
    include: int | None = Field(
        None, ge=1, description="number of replicas with the best scores that a round includes; by default all"
    )
    excluded_rounds: int = Field(16, ge=1, description="number of rounds from which a replica is then excluded")

    def sizes(self, replicas: int, texts: int) -> AuditSizes:
        """Return the sizes for a round of so many replicas, which trained on so many sequences."""
        least, share = _EVALUATED
        wanted = max(least, math.ceil(share * replicas)) if self.evaluated is None else self.evaluated
        evaluated = min(replicas, wanted)
        affordable = _SHARE_OF_COMPUTE * FORWARDS_A_STEP * texts / (TEXTS * PARAMETERS * max(1, evaluated))
        derived = min(MOST_SEQUENCES, max(LEAST_SEQUENCES, int(affordable)))
        return AuditSizes(evaluated, derived if self.sequences is None else self.sequences)


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
        "exchange",
        description="who audits: a thread beside the exchange, or processes started by `hetero-pp audit validate`",
    )
    gauntlet: Annotated[
        GauntletSettings | Literal["off"] | None, BeforeValidator(lambda value: OFF if value is False else value)
    ] = Field(
        None,
        description="compare and score contributions. `{}` turns it on, `off` turns it off. By default it is on where "
        "other hosts may join and at least three replicas may take part, without what cannot work there",
    )
    recompute: RecomputeSettings | None = Field(None, description="compute rounds again; `{}` turns it on")

    @property
    def compares(self) -> GauntletSettings | None:
        """Settings of the comparison of contributions; None if there is none."""
        return self.gauntlet if isinstance(self.gauntlet, GauntletSettings) else None

    @property
    def scores(self) -> GauntletSettings | None:
        """The same if contributions are also tried."""
        return None if self.compares is None or self.compares.evaluated == 0 else self.compares

    @property
    def needs_validators(self) -> bool:
        """Whether anything is left to validators: the exchange compares signs itself."""
        return self.scores is not None or self.recompute is not None
