"""Compute that scoring costs, known before a run."""

from __future__ import annotations

from hetero_pp.config.audit import FORWARDS_A_STEP, PARAMETERS, TEXTS, GauntletSettings


def share_of_compute(settings: GauntletSettings, replicas: int, sequences: int) -> float:
    """Return the compute of one validator as a share of that of the replicas; so much of each replica's, on average.

    `sequences`: training sequences of all replicas in a round, as inner steps x the sum of the batch sizes.
    """
    sizes = settings.sizes(replicas, sequences)
    tried = sizes.evaluated * sizes.sequences * TEXTS * PARAMETERS
    return tried / (FORWARDS_A_STEP * sequences)
