"""Compute that scoring costs, known before a run."""

from __future__ import annotations

from hetero_pp.config.audit import GauntletSettings

TEXTS, PARAMETERS = 2, 2
"""Assigned and other text, each with the parameters before and after a contribution."""
FORWARDS_A_STEP = 3
"""Cost of a sequence in an inner step, in forward passes: the backward takes two."""


def share_of_compute(settings: GauntletSettings, replicas: int, sequences: int) -> float:
    """Return the compute of one validator as a share of that of the replicas; so much of each replica's, on average.

    `sequences`: training sequences of all replicas in a round, as inner steps x the sum of the batch sizes.
    """
    tried = min(settings.evaluated, replicas) * settings.sequences * TEXTS * PARAMETERS
    return tried / (FORWARDS_A_STEP * sequences)
