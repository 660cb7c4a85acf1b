"""Overlap: a replica trains the next round while its contribution is on its way to the others.

It starts that round from the theta that it knows, minus a part of its own contribution, and its next contribution is
measured from there. So theta after a round includes the contributions of that round and of all before, as without
overlap. But each was made without knowing those of the round before. Source: eager updates (Kale et al. 2025), which
apply all of a replica's own share of the mean, and the others' of the round before in place of theirs. Here
contributions are sparse, and error feedback keeps the rest.
"""

from __future__ import annotations

from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor


def start_before_mean(theta: Tensor, sent: DecodedTensor, settings: OuterSettings) -> Tensor:
    """Return a replica's start of a round before the previous mean is known: theta - presumes * sent."""
    start = theta.clone()
    sent.add_to(start, -settings.presumes)
    return start
