"""What the contributions of a round come to on the wires, by how they are exchanged: measured, of the contributions.

With R replicas, contributions of m bytes, and sums of h of them of s_h bytes, each replica sends

    gather              m                                        to an exchange, a store, or a parameter server
    ring_all_gather     (R - 1) m                                its own and others' are passed on as they are
    ring_all_reduce     2 (R - 1) m / R                          of dense ones: parts of sums, then of what they came to
    sparse_ring         (s_1 + ... + s_R-1 + (R - 1) s_R) / R    the same of sparse ones, whose sums grow on their way

The first three are those of SparseLoCo's Figure 2; of the fourth its section 3 says that it could be: a position is
sent once, however many have it. Of the dense ring it is taken that a sum is as long as what it is of, as the papers
count it: of codes of few bits that would need a ring that codes each sum anew. In the sparse one a sum has no codes any
more: its values go as fp32, through the entropy coder that all of a contribution goes through. What is left out:
framing, and headers of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.positions import write_positions
from hetero_pp.pseudo_gradient.streams import Writer


@dataclass(frozen=True)
class Volume:
    """Bytes that a replica sends in a round, the mean over the replicas."""

    gather: float
    ring_all_gather: float
    ring_all_reduce: float | None
    """None where some values are not sent: their sums are not as long as they are."""
    sparse_ring: float


class RoundVolume:
    """Of one round, parameter by parameter."""

    def __init__(self) -> None:
        self._replicas = 0
        self._contributed = 0
        self._summed = 0
        self._is_dense = True

    def contribute(self, size: int) -> None:
        """Bytes of one replica's contribution, or of a part of it."""
        self._contributed += size

    def add(self, shape: Sequence[int], sent: Sequence[DecodedTensor]) -> None:
        """What each has sent of one parameter of this shape: passed on in a ring, and summed on its way."""
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
        """Of all that was added; None of nothing."""
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
    """Bytes of a sum [n], fp32, of sparse vectors that have values where `has` [n] is true."""
    where = has.nonzero().view(-1)
    if not len(where):
        return 0
    writer, size = Writer(), len(has)
    write_positions(writer, Group(0, 1, 0, size, 1, size, size), where[None])
    writer.put_stream(total[where].numpy().astype("<f4", copy=False).tobytes())
    return len(writer.take())
