"""Equation 5 of Het-PP, measured: how far compression turns the averaged pseudo-gradient from the unbiased one.

Some rounds are run twice by the compressed replicas, from the same weights and optimizer state and on the same data:
as they are, and without compression. The difference of a replica is B and noise, as each has data of its own; equation
5 says that the mean over all replicas is (1 - alpha) B on average. The norm of that mean would count the noise in, most
where few replicas are compressed. So squared lengths are means of products of two *different* replicas' vectors, of
which noise is no part on average. Where one replica is compressed, its second sample is of data that nobody trains on.
The second runs change nothing that training goes on from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_pp.data.batches import Batches
from replica_groups.ranks import Ranks
from replica_groups.whole import WholeReplica


class BiasMeter:
    """One round's measurement: made before its inner steps, asked after them and before its outer round."""

    def __init__(
        self, replicas: Sequence[WholeReplica], batches: Sequence[Batches], steps: range, fresh: int, compressed: int
    ) -> None:
        """`compressed`: how many replicas are, on all ranks. Data of a step and `fresh` more is nobody's."""
        self.replicas = replicas
        self.compressed = compressed
        self.unbiased: dict[int, Mapping[str, Tensor]] = {}
        """Parameters that a compressed replica would have had after these steps without compression, by its index."""
        self.more: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = []
        """The same on other data, with compression and without."""
        for index, replica in enumerate(replicas):
            if replica.boundary is None or replica.boundary.basis is None or not replica.hops:
                continue
            self.unbiased[index] = _after(uncompressed_twin(replica), batches[index], steps, 0)
            if compressed == 1:
                twins = copy.deepcopy(replica), uncompressed_twin(replica)
                biased, unbiased = (_after(twin, batches[index], steps, fresh) for twin in twins)
                self.more.append((biased, unbiased))

    @torch.no_grad()
    def share(self, theta: Mapping[str, Tensor], ranks: Ranks) -> float:
        """|| mean (Delta* - Delta) || / || mean Delta* || without noise.

        Delta = theta - parameters after the inner steps. Negative where the mean product of two differences is, as that
        of nothing but noise is half of the time.
        """
        count = int(sum(ranks.gather(len(self.replicas))))
        pairs = [
            (replica.parameters, self.unbiased[i]) for i, replica in enumerate(self.replicas) if i in self.unbiased
        ]
        samples = int(sum(ranks.gather(len(pairs) + len(self.more))))
        if samples == 0:
            return 0.0
        biases, wholes = Products(), Products()
        for name, start in theta.items():
            biases.add(start, [biased[name] - unbiased[name] for biased, unbiased in pairs + self.more], ranks)
            after = [self.unbiased.get(i, replica.parameters)[name] for i, replica in enumerate(self.replicas)]
            wholes.add(start, [start - parameter for parameter in after], ranks)
        bias = (self.compressed / count) ** 2 * biases.mean(samples)
        return math.copysign(math.sqrt(abs(bias) / wholes.mean(count)), bias)


class Products:
    """The mean product of two different ones of some vectors, which come part by part and from several ranks."""

    def __init__(self) -> None:
        self._of_sum = self._of_each = 0.0

    def add(self, like: Tensor, parts: Sequence[Tensor], ranks: Ranks) -> None:
        """The same part of each vector that is here, with the shape of `like`."""
        total = torch.zeros_like(like)
        for part in parts:
            total += part
        ranks.sum(total)
        self._of_sum += total.double().square().sum().item()
        self._of_each += sum(ranks.gather(sum(part.double().square().sum().item() for part in parts)))

    def mean(self, count: int) -> float:
        """Over all pairs of `count` vectors; of one, its square."""
        return self._of_each if count == 1 else (self._of_sum - self._of_each) / (count * (count - 1))


def _after(twin: WholeReplica, batches: Batches, steps: range, later: int) -> Mapping[str, Tensor]:
    """The parameters of a replica after these steps, on the data of as many steps later."""
    for step in steps:
        twin.inner_step(batches.train(step + later), step)
    return twin.parameters


def uncompressed_twin(replica: WholeReplica) -> WholeReplica:
    """A copy of a compressed replica, with its weights and optimizer state, that trains without compression.

    Its embedding has to be trained as it is (`free`), not by coefficients.
    """
    twin = copy.deepcopy(replica)
    twin.boundary, twin.hops, twin.anchors, twin.peer = None, {}, (), None
    twin.optimizer.perpendicular = None
    return twin
