"""Compares a replica's contribution with what its round gives when it is computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hetero_pp.messages.messages_pb2 import ContributionEntry
from hetero_pp.model.transformer import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, decode_blob
from replica_groups.audit.recompute.replica import RecomputedRound


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison."""

    difference: float
    """Largest relative difference of a block; 0: equal bits."""
    cause: str = ""
    """Names the difference in one line; empty if there is none."""
    member: str = ""
    """Member that committed to something else, if that is known."""

    @property
    def is_equal(self) -> bool:
        return not self.cause


def compare(
    entry: ContributionEntry, differences: Mapping[str, float], again: RecomputedRound, tolerance: float
) -> Comparison:
    """Return the outcome for a contribution whose blocks have these relative differences."""
    block, largest = max(differences.items(), key=lambda one: one[1], default=("", 0.0))
    for one in entry.commitments:
        if one.text and one.text != again.text.get(one.member):
            return Comparison(largest, f"{one.member} trained on another text than its own", one.member)
    if largest > tolerance:
        allowed = f"expected at most {tolerance:.3g}" if tolerance else "expected none"
        return Comparison(largest, f"`{block}` differs by {largest:.3g} of its norm from its round, {allowed}")
    for one in entry.commitments if largest == tolerance == 0 else ():
        if one.after != again.after[one.member]:
            return Comparison(largest, f"{one.member} committed to another state than its round ends with", one.member)
    return Comparison(largest)


def difference(address: BlobAddress, shapes: Shapes, settings: CompressionSettings, told: bytes, again: bytes) -> float:
    """Return ||told - again|| / ||again|| over the decoded values of a block; 0 for equal bytes.

    Raises MalformedContribution.
    """
    if told == again:
        return 0.0
    first, second = (decode_blob(data, address, shapes, settings) for data in (told, again))
    apart = sum(_apart(first[name], second[name], math.prod(shapes[name])) for name in shapes)
    norm = sum(float(one.values.double().square().sum()) for one in second.values())
    return math.sqrt(apart / norm) if norm else math.inf if apart else 0.0


def _apart(first: DecodedTensor, second: DecodedTensor, size: int) -> float:
    """Return the squared distance of two sparse tensors of `size` values."""
    total = torch.zeros(size, dtype=torch.float64)
    total[first.indices] += first.values.double()
    total[second.indices] -= second.values.double()
    return float(total.square().sum())
