"""Bytes that the contributions of a round take on the wires with each collective, measured from the contributions.

With R replicas, contributions of m bytes, and sums of h contributions of s_h bytes, each replica sends

    gather              m                                        to an exchange, a store, or a parameter server
    ring_all_gather     (R - 1) m                                contributions are forwarded unchanged
    ring_all_reduce     2 (R - 1) m / R                          dense: parts of the sums, then of the result
    sparse_ring         (s_1 + ... + s_R-1 + (R - 1) s_R) / R    sparse: the same, but sums grow on their way

The first three are those of SparseLoCo's Figure 2. Its section 3 proposes the fourth: a position is sent once, however
many replicas have it. The dense ring assumes, as the papers do, that a sum is as long as its terms. With codes of few
bits, the ring would have to encode each sum anew. In the sparse ring, sums have no codes: their values are fp32 and
pass through the entropy coder of contributions. Framing and the headers of sums are not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.selection import Group
from hetero_pp.pseudo_gradient.streams import Writer, write_positions


@dataclass(frozen=True)
class Volume:
    """Bytes that a replica sends in a round; mean over the replicas."""

    gather: float
    ring_all_gather: float
    ring_all_reduce: float | None  # None if some values are not sent, because their sums are then longer
    sparse_ring: float


class RoundVolume:
    """Volume of one round, accumulated parameter by parameter."""

    def __init__(self) -> None:
        self._replicas = 0
        self._contributed = 0
        self._summed = 0
        self._is_dense = True

    def contribute(self, size: int) -> None:
        """Add the bytes of one replica's contribution, or of a part of it."""
        self._contributed += size

    def add(self, shape: Sequence[int], sent: Sequence[DecodedTensor]) -> None:
        """Add every replica's contribution of a parameter of this shape, and the bytes of its sums in a ring."""
        self._replicas = count = len(sent)
        size = math.prod(shape)
        self._is_dense &= all(len(one.indices) == size for one in sent)
        bounds = [size * part // count for part in range(count + 1)]
        for part, (start, stop) in enumerate(pairwise(bounds)):
            total = torch.zeros(stop - start)
            has = torch.zeros(stop - start, dtype=torch.bool)
            for hop in range(1, count + 1):
                own = sent[(part + hop) % count].part(start, stop)
                own.add_to(total, 1.0)
                has[own.indices] = True
                times = count - 1 if hop == count else 1
                self._summed += times * bytes_of_sum(total, has)

    def volume(self) -> Volume | None:
        """Return the volume of everything that was added; None if nothing was."""
        if self._replicas == 0:
            return None
        others, mean = self._replicas - 1, self._contributed / self._replicas
        return Volume(
            gather=mean,
            ring_all_gather=others * mean,
            ring_all_reduce=2 * others * mean / self._replicas if self._is_dense else None,
            sparse_ring=self._summed / self._replicas,
        )


def bytes_of_sum(total: Tensor, has: Tensor) -> int:
    """Return the bytes of a sum [n], fp32, of sparse vectors that have values where `has` [n] is true."""
    where = has.nonzero().view(-1)
    if not len(where):
        return 0
    writer, size = Writer(), len(has)
    write_positions(writer, Group(0, 1, 0, size, 1, size, size), where[None])
    writer.put_stream(total[where].numpy().astype("<f4", copy=False).tobytes())
    return len(writer.take())
