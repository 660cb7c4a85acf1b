"""Outer optimizer that a run's configuration selects."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.outer.gradient import GradientOptimizer
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer
from hetero_pp.pipeline.subspace import columns_of
from hetero_pp.run.spec import RunSpec


def round_optimizer(spec: RunSpec, basis: Tensor | None) -> RoundOptimizer:
    """Return the optimizer that computes the parameters after a round; `basis` [D, K'] is the run's."""
    config = spec.config
    if config.outer.source == "difference":
        return OuterOptimizer(config.outer, lambda round_: spec.at(round_).outer)
    ranks = {
        replica.name: replica.boundary.dimensions(spec.shape.width)
        for replica in spec.replicas_ever
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1
    }
    own = {rank: columns_of(basis, rank) for rank in set(ranks.values())}
    bases = {name: columns for name, rank in ranks.items() if (columns := own[rank]) is not None}

    def schedule(round_: int) -> LearningRates:
        return spec.rates_in(round_, round_ - 1, 1)

    return GradientOptimizer(config.outer, config.inner, spec.total_steps, spec.parameter_shapes, bases, schedule)
