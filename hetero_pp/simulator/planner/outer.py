"""Choose H and the density of pseudo-gradients so that the outer round takes at most a given share of the time.

The slowest uplink decides. Both values hold for the whole run. Candidates are the values of the YAML, and those beyond
them that the papers tested. Among the candidates whose outer round is fast enough, the nearest to the YAML is taken.
The distance is the factor by which H grows times the factor by which the density falls.

If a round lasts a given time, that time takes the place of H and may be multiplied. No table here has the loss that
either value costs: the papers tune the density for each H.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.prediction import Prediction, predict

TESTED_STEPS = (15, 30, 50, 100, 250)
"""Values of H in SparseLoCo figure 1 and table 8."""
TIMES_AS_LONG = (2, 4, 8)
"""Factors for rounds of a given time. No paper reports on such rounds."""
TESTED_DENSITIES = (1 / 16, 1 / 32, 1 / 64, 1 / 128)
"""Densities in SparseLoCo tables 1 and 5, and Het-PP section 3."""


@dataclass(frozen=True)
class OuterChoice:
    """H and density, and the time that the outer round then adds to a round with free links between stages."""

    length: float
    """H, or seconds of a round."""
    density: float
    free_seconds: float
    """Seconds of a round whose links cost nothing."""
    exchange_seconds: float
    """Seconds that the links to the exchange add."""
    slowest: str
    """Member that spends the longest time on its link to the exchange."""

    @property
    def share(self) -> float:
        """Return the share of a round that communication with the exchange takes."""
        return self.exchange_seconds / (self.free_seconds + self.exchange_seconds)

    def departure(self, config: RunConfig) -> float:
        """Return the distance from the YAML's values, in factors of two."""
        return log2(self.length / length_of(config)) + log2(config.outer.compression.density / self.density)


def choose_outer(config: RunConfig, vocabulary: int | None, allowed: float) -> tuple[OuterChoice, OuterChoice]:
    """Return the chosen values and the YAML's own.

    The choice is the nearest whose share is at most `allowed`, or the one with the smallest share if there is none.
    """
    found = list(_choices(config, vocabulary))
    own = found[0]
    good = [one for one in found if one.share <= allowed]
    if good:
        return min(good, key=lambda one: one.departure(config)), own
    return min(found, key=lambda one: one.share), own


def with_outer(config: RunConfig, length: float, density: float) -> RunConfig:
    """Return the configuration with another round length and density.

    `rounds` changes so that the run stays about as long.
    """
    own = length_of(config)
    total = config.outer.rounds * own
    compression = config.outer.compression.model_copy(update={"density": density})
    rounds = config.outer.rounds if length == own else ceil(total / length)
    changed = {"steps": int(length)} if config.inner.steps is not None else {"seconds": length}
    return config.model_copy(
        update={
            "inner": config.inner.model_copy(update=changed),
            "outer": config.outer.model_copy(update={"rounds": rounds, "compression": compression}),
        }
    )


def length_of(config: RunConfig) -> float:
    """Return H, or the seconds of a round."""
    return config.inner.steps if config.inner.steps is not None else config.inner.seconds or 0.0


def _choices(config: RunConfig, vocabulary: int | None) -> Iterator[OuterChoice]:
    """Yield the candidates, the YAML's own first.

    Each density is predicted once: more steps lengthen the round only by their own time.
    """
    own, compression = length_of(config), config.outer.compression
    candidates = TESTED_STEPS if config.inner.steps is not None else [times * own for times in TIMES_AS_LONG]
    may_change = config.outer.method in ("sparseloco", "sparseloco_paper") and config.outer.source == "difference"
    densities = [one for one in TESTED_DENSITIES if one < compression.density] if may_change else []
    longer = [one for one in candidates if one > own] if config.outer.source == "difference" else []
    most = max(own, config.outer.rounds * own)
    for density in (compression.density, *densities):
        found = predict(RunSpec(with_outer(config, own, density), vocabulary), stage_links=False)
        free = found.utilization["relative"] * found.round_seconds
        unit = found.step_seconds if config.inner.steps is not None else 1.0
        for length in (own, *(one for one in longer if one <= most)):
            seconds = free + (length - own) * unit
            yield OuterChoice(length, density, seconds, max(0.0, found.round_seconds - free), _slowest(found))


def _slowest(prediction: Prediction) -> str:
    stages = [stage for replica in prediction.replicas for stage in replica.stages]
    return max(stages, key=lambda stage: stage.sent_seconds + stage.received_seconds).member
