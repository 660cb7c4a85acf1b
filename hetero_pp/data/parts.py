"""Division of a streamed corpus among replicas: parts of shards.

A shard is a file of documents that can only be read from its start. A part is every `step`-th document of a shard,
beginning at `start`. Whole shards are dealt as long as each replica gets the same number. Each of the remaining shards
is split among all replicas. With many shards, one replica reads each; with fewer shards than replicas, all replicas
read each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import permute


class Part(NamedTuple):
    """Documents start, start + step, start + 2 step, ... of a shard, to be read in an epoch."""

    epoch: int
    shard: int
    start: int
    step: int

    def split(self, count: int) -> list[Part]:
        """Return `count` parts that together contain each document of this part once."""
        return [self._replace(start=self.start + i * self.step, step=self.step * count) for i in range(count)]

    def holds(self, epoch: int, shard: int, document: int) -> bool:
        """Return whether the part contains the document."""
        offset = document - self.start
        return (epoch, shard) == (self.epoch, self.shard) and offset >= 0 and offset % self.step == 0


def deal(parts: Sequence[Part], replicas: int, replica: int) -> tuple[Part, ...]:
    """Return the parts of one replica: every `replicas`-th part, and its share of each part that is left over."""
    split = len(parts) % replicas
    return (*(part.split(replicas)[replica] for part in parts[:split]), *parts[split + replica :: replicas])


def epoch_of(shards: int, epoch: int, seed: int, held_out: int) -> list[Part]:
    """Return all shards in the order of an epoch, without the first `held_out` documents of shard 0."""
    order = permute(np.arange(shards), shards, seed_of(seed, "shards", epoch))
    return [Part(epoch, int(shard), held_out if shard == 0 else 0, 1) for shard in order]
