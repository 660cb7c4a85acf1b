"""One round late: a replica trains the next round while what it has sent is on its way to the others.

It starts that round from theta as far as it knows it, less a part of its own contribution, and what it comes to is
measured from there. So theta after a round has the contributions of that round and all before, as without overlap, but
each was made without those of the round before. Source: eager updates (Kale et al. 2025), where the whole of a
replica's own share of the mean is presumed, and the others' of the round before in place of theirs; here what is sent
is sparse, and error feedback keeps the rest.
"""

from __future__ import annotations

from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor


def start_before_mean(theta: Tensor, sent: DecodedTensor, settings: OuterSettings) -> Tensor:
    """Where a replica starts a round before it knows what the one before came to: theta - presumes * what it sent."""
    start = theta.clone()
    sent.add_to(start, -settings.presumes)
    return start
