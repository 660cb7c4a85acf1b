"""Equation 5 of Het-PP, measured: how far compression moves the averaged pseudo-gradient from the unbiased one.

In some rounds the compressed replicas run twice, from the same weights and optimizer state and on the same data: with
and without compression. A replica's difference is B plus noise, as each replica has its own data. Equation 5 says that
the mean over all replicas is (1 - alpha) B on average. The norm of that mean would include the noise, most of all if
few replicas are compressed. Squared lengths are therefore means of products of two *different* replicas' vectors, in
which noise averages out. If only one replica is compressed, its second sample uses data that no replica trains on. The
second runs do not affect training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Batches
from hetero_pp.model.subspace_optimizer import SubspaceOptimizer
from hetero_pp.research.settings import research_of
from hetero_pp.research.vectorized.replica import TableReplica
from hetero_pp.run.spec import RunSpec
from replica_groups.engines.ranks import Ranks


class BiasMeter:
    """Measurement of one round: created before its inner steps, read after them and before its outer round."""

    def __init__(
        self, replicas: Sequence[TableReplica], batches: Sequence[Batches], steps: range, fresh: int, compressed: int
    ) -> None:
        """`compressed`: number of compressed replicas on all ranks. `fresh`: offset in steps to unused data."""
        self.replicas = replicas
        self.compressed = compressed
        self.unbiased: dict[int, Mapping[str, Tensor]] = {}
        """Parameters of each compressed replica, by index, if it took these steps without compression."""
        self.more: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = []
        """Parameters after the same steps on other data, with compression and without."""
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
        """Return || mean (Delta* - Delta) || / || mean Delta* || without noise.

        Delta = theta - parameters after the inner steps. The result is negative if the mean product of two differences
        is, which is the case half of the time for pure noise.
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
    """Mean product of two different vectors of a set; the vectors arrive part by part and from several ranks."""

    def __init__(self) -> None:
        self._of_sum = self._of_each = 0.0

    def add(self, like: Tensor, parts: Sequence[Tensor], ranks: Ranks) -> None:
        """Add the same part of each vector on this rank, with the shape of `like`."""
        total = torch.zeros_like(like)
        for part in parts:
            total += part
        ranks.sum(total)
        self._of_sum += total.double().square().sum().item()
        self._of_each += sum(ranks.gather(sum(part.double().square().sum().item() for part in parts)))

    def mean(self, count: int) -> float:
        """Return the mean over all pairs of `count` vectors; for one vector, its square."""
        return self._of_each if count == 1 else (self._of_sum - self._of_each) / (count * (count - 1))


def _after(twin: TableReplica, batches: Batches, steps: range, later: int) -> Mapping[str, Tensor]:
    """Return a replica's parameters after these steps, with the data of `later` steps later."""
    for step in steps:
        twin.inner_step(batches.train(step + later), step)
    return twin.parameters


def uncompressed_twin(replica: TableReplica) -> TableReplica:
    """Copy a compressed replica, with its weights and optimizer state, into one that trains without compression.

    An embedding that is kept in the subspace stays in it: then the bias is that of the boundaries alone.
    """
    twin = copy.deepcopy(replica)
    twin.boundary, twin.hops, twin.anchors, twin.peer = None, {}, (), None
    if not isinstance(twin.optimizer, SubspaceOptimizer) or twin.optimizer.trains == "free":
        twin.optimizer.perpendicular = None
    return twin


def require_rounds_together(spec: RunSpec) -> None:
    """Raise ConfigError unless all replicas start every round together, as measuring the bias needs."""
    told = "`bias_every` compares replicas that start a round together"
    if spec.config.outer.overlap:
        raise ConfigError(("outer", "overlap"), f"found 1, expected 0: {told}")
    if spec.config.outer.keep_local:
        raise ConfigError(("outer", "keep_local"), f"found true, expected false: {told}")
    if research_of(spec.config).counts:
        found = "found rounds with only some of the replicas, expected all: `bias_every` compares all"
        raise ConfigError(("research", "taking_part"), found)
