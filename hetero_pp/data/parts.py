"""Which documents of a streamed corpus are whose: parts of shards, dealt to replicas.

A shard is a file of documents that can only be read from its start; a part is every `step`-th document of one from
`start` on. Whole shards are dealt out as far as they go evenly; of the few that are left, everyone gets a part of
each. So a shard is read by one replica where there are many shards, and by all where there are fewer than replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_pp.data.batches import permute
from hetero_pp.seeds import seed_of


class Part(NamedTuple):
    """Documents start, start + step, start + 2 step, ... of a shard, to be read in an epoch."""

    epoch: int
    shard: int
    start: int
    step: int

    def split(self, count: int) -> list[Part]:
        """`count` parts that hold each of its documents once."""
        return [self._replace(start=self.start + i * self.step, step=self.step * count) for i in range(count)]

    def holds(self, epoch: int, shard: int, document: int) -> bool:
        """Whether the document is one of its own."""
        offset = document - self.start
        return (epoch, shard) == (self.epoch, self.shard) and offset >= 0 and offset % self.step == 0


def deal(parts: Sequence[Part], replicas: int, replica: int) -> tuple[Part, ...]:
    """What a replica gets of the parts: one in `replicas` of them, and its share of each that cannot be dealt."""
    split = len(parts) % replicas
    return (*(part.split(replicas)[replica] for part in parts[:split]), *parts[split + replica :: replicas])


def epoch_of(shards: int, epoch: int, seed: int, held_out: int) -> list[Part]:
    """All shards in the order of an epoch, without the first `held_out` documents of shard 0."""
    order = permute(np.arange(shards), shards, seed_of(seed, "shards", epoch))
    return [Part(epoch, int(shard), held_out if shard == 0 else 0, 1) for shard in order]
