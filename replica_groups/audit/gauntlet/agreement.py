"""Contributions that go another way than the others of their round, by the signs of the values that they keep."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from statistics import median, median_high

import torch

from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.apply_round import FetchBlob
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob
from replica_groups.audit.gauntlet.overlap import Contribution

_CHANCE = 0.5
_DEVIATIONS = 8.0
"""Least standard deviations by which the usual agreement exceeds chance. With fewer, nobody is judged."""

_FEWEST = 3
"""Contributions among which the others of one can be more than half."""

MOST_PLACES = 1 << 24
"""Places of a model that are compared. A larger model has every m-th compared, and all contributions decide which."""


class SignCheck:
    """Compares the contributions of a round before its record is written, so that harm is in no round."""

    def __init__(self, spec: RunSpec, least: float) -> None:
        """`least`: as `audit.gauntlet.agreement`."""
        self._spec, self._least = spec, least
        self._blocks = shapes_by_block(spec.parameter_shapes)

    def against(self, record: RoundRecord, fetch: FetchBlob) -> dict[str, float]:
        """Return the agreement of each contribution for which it is too low, by replica.

        Reads each blob once, and holds those of one block. Raises what `fetch` raises.
        """
        names = sorted(one.replica for one in record.contributions)
        if len(names) < _FEWEST:
            return {}
        sizes = [math.prod(shape) for shapes in self._blocks.values() for shape in shapes.values()]
        every = math.ceil(sum(sizes) / MOST_PLACES)
        digests = sorted(blob.sha256 for one in record.contributions for blob in one.blobs)
        drawn = int.from_bytes(hashlib.sha256(b"".join(digests)).digest()) % every
        comparison = _SignCounts(names, every, drawn)
        for block, shapes in self._blocks.items():
            blobs = [self._received(record.round, name, block, fetch(name, block)) for name in names]
            for tensor in shapes:
                comparison.add([blob.tensor(tensor) for blob in blobs])
        tokens = {one.replica: one.tokens for one in record.contributions}
        return too_low(comparison.agreements(), tokens, self._least)

    def _received(self, round_: int, name: str, block: str, data: bytes) -> ReceivedBlob:
        address = BlobAddress(self._spec.run, round_, name, block)
        return ReceivedBlob(data, address, self._blocks[block], self._spec.config.outer.compression)


def why(round_: int, agreement: float) -> str:
    """Return why a replica with this agreement is excluded."""
    what = f"its contribution to round {round_} goes another way than the others"
    return f"{what}: agreement {agreement:.2f}, where 0 is chance and 1 is usual"


def too_low(found: Mapping[str, float], tokens: Mapping[str, int], least: float) -> dict[str, float]:
    """Return the agreements below `least`, which is lower for replicas that trained on fewer tokens than most.

    The signal of a contribution grows with the root of its tokens, in proportion to its noise.
    """
    usual = median(tokens[name] for name in found) if found else 0
    share = {name: min(1.0, math.sqrt(tokens[name] / usual)) if usual else 1.0 for name in found}
    return {name: value for name, value in found.items() if value < least * share[name]}


def agreements(contributions: Mapping[str, Contribution]) -> dict[str, float]:
    """Return how far each contribution agrees with the others: 0 as by chance, 1 as usual, below 0 if against them.

    Two contributions agree in the share of the places that both keep in which their signs are equal. A contribution's
    agreement is the median over the others, and the usual one is the median over all. So fewer than half of the
    replicas cannot change the verdict on the rest, whatever the sizes of their values are. Empty if the round shares
    too few places to tell the usual agreement from chance.
    """
    names = sorted(contributions)
    comparison = _SignCounts(names)
    for tensor in contributions[names[0]] if len(names) >= _FEWEST else ():
        comparison.add([contributions[name][tensor] for name in names])
    return comparison.agreements()


class _SignCounts:
    """Numbers of places of every pair of contributions that both keep, and that have equal signs in both."""

    def __init__(self, names: Sequence[str], every: int = 1, first: int = 0) -> None:
        """The places `first`, `first + every` and so on of each tensor count."""
        self._names, self._every, self._first = names, every, first
        self._products = torch.zeros(len(names), len(names), dtype=torch.float64)
        self._shared = self._products.clone()

    def add(self, tensors: Sequence[DecodedTensor]) -> None:
        """Count the places of one tensor, of all contributions in the order of their names."""
        size = max((int(one.indices.max()) + 1 for one in tensors if len(one.indices)), default=0)
        count = len(range(self._first, size, self._every))
        signs = torch.zeros(len(tensors), count, device=tensors[0].values.device)
        for row, one in zip(signs, tensors, strict=True):
            counts = one.indices % self._every == self._first
            row[one.indices[counts] // self._every] = one.values[counts].sign().float()
        self._products += (signs @ signs.T).cpu()  # sums of up to 2^24 ones are exact
        signs.abs_()
        self._shared += (signs @ signs.T).cpu()

    def agreements(self) -> dict[str, float]:
        """Return as `agreements`."""
        count = len(self._names)
        if count < _FEWEST:
            return {}
        shares = torch.where(self._shared > 0, _CHANCE + 0.5 * self._products / self._shared, _CHANCE).tolist()
        places, others = self._shared.tolist(), [[at for at in range(count) if at != own] for own in range(count)]
        found = [median_high(shares[own][at] for at in others[own]) for own in range(count)]
        usual = median_high(found) - _CHANCE
        # Most pairs may have a hostile replica, so a median over pairs would let few silent ones end the check.
        shared = median_high(median_high(places[own][at] for at in others[own]) for own in range(count))
        if usual * math.sqrt(shared) < _DEVIATIONS * _CHANCE:  # a share of n places deviates by .5 / sqrt(n)
            return {}
        return {name: (share - _CHANCE) / usual for name, share in zip(self._names, found, strict=True)}
