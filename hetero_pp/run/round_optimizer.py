"""Outer optimizer that a run's configuration selects."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.outer.gradient import Compressed, GradientOptimizer
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer
from hetero_pp.pipeline.subspace import columns_of
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec


def require_own_steps(config: RunConfig) -> None:
    """Raise ConfigError if the outer optimizer cannot take the own steps of a replica."""
    for index, replica in enumerate(config.replicas if config.outer.source == "gradient" else ()):
        if isinstance(replica, ParticipantsReplica) and replica.boundary.embedding == "projected":
            key = ("replicas", index, "boundary", "embedding")
            wanted = f"expected `free` or `coefficients` with method {config.outer.method}"
            raise ConfigError(key, f"found `projected`, {wanted}: only the trainer of tables projects its steps")


def round_optimizer(spec: RunSpec, basis: Tensor | None) -> RoundOptimizer:
    """Return the optimizer that computes the parameters after a round; `basis` [D, K'] is the run's."""
    config = spec.config
    require_own_steps(config)
    if config.outer.source == "difference":
        return OuterOptimizer(config.outer, lambda round_: spec.at(round_).outer)
    groups = [one for one in spec.replicas_ever if isinstance(one, ParticipantsReplica) and one.stage_count > 1]
    ranks = {group.name: group.boundary.dimensions(spec.shape.width) for group in groups}
    bases = {rank: columns_of(basis, rank) for rank in set(ranks.values())}
    compressed = {
        group.name: Compressed(own, group.boundary.embedding)
        for group in groups
        if (own := bases[ranks[group.name]]) is not None
    }

    def schedule(round_: int) -> LearningRates:
        return spec.rates_in(round_, round_ - 1, 1)

    return GradientOptimizer(config.outer, config.inner, spec.total_steps, spec.parameter_shapes, compressed, schedule)
