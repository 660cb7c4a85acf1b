"""Equation 5 of Het-PP, measured: how far compression turns the averaged pseudo-gradient from the unbiased one.

Some rounds are run twice by the compressed replicas, from the same weights and optimizer state and on the same data:
as they are, and without compression. The mean over all replicas of the difference is the bias that the outer round
receives, (1 - alpha) B if equation 5 holds. The second run changes nothing that training goes on from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_pp.data.batches import Batches
from replica_groups.ranks import Ranks
from replica_groups.whole import WholeReplica


class BiasMeter:
    """One round's measurement: made before its inner steps, asked after them and before its outer round."""

    def __init__(self, replicas: Sequence[WholeReplica], batches: Sequence[Batches], steps: range) -> None:
        self.replicas = replicas
        self.unbiased: dict[int, Mapping[str, Tensor]] = {}
        """Parameters that a compressed replica would have had after these steps without compression, by its index."""
        for index, replica in enumerate(replicas):
            if replica.boundary is not None and replica.boundary.basis is not None and replica.hops:
                twin = uncompressed_twin(replica)
                for step in steps:
                    twin.inner_step(batches[index].train(step), step)
                self.unbiased[index] = twin.parameters

    @torch.no_grad()
    def share(self, theta: Mapping[str, Tensor], ranks: Ranks) -> float:
        """|| mean (Delta* - Delta) || / || mean Delta* ||, where Delta = theta - parameters after the inner steps."""
        bias = squared = 0.0
        for name, start in theta.items():
            unbiased, own = torch.zeros_like(start), torch.zeros_like(start)
            for index, replica in enumerate(self.replicas):
                own += start - replica.parameters[name]
                unbiased += start - self.unbiased.get(index, replica.parameters)[name]
            ranks.sum(own)
            ranks.sum(unbiased)
            bias += (unbiased - own).double().square().sum().item()
            squared += unbiased.double().square().sum().item()
        return (bias / squared) ** 0.5


def uncompressed_twin(replica: WholeReplica) -> WholeReplica:
    """A copy of a compressed replica, with its weights and optimizer state, that trains without compression.

    Its embedding has to be trained as it is (`free`), not by coefficients.
    """
    twin = copy.deepcopy(replica)
    twin.boundary, twin.hops, twin.anchors = None, {}, ()
    twin.optimizer.perpendicular = None
    return twin
