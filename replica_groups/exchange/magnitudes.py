"""Contributions far larger than those of others, or than the replica's own before: scaled down, or not counted.

Honest ones are alike: in sixteen rounds of the quickstart no block of a replica has a norm or a largest value above 1.5
times the other's, nor above 2.4 times the median of its own eight rounds before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median, median_low

from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import scale_of
from hetero_pp.topology import MagnitudeSettings

REMEMBERED_ROUNDS = 8
"""Of a replica's own contributions."""

_LEAST_ROUNDS = 3
"""Of which its own say something."""

_LEAST_REPLICAS = 3
"""Of which the median is not that of who wants it to be another."""

Sizes = Mapping[tuple[str, str], float]
"""(block, what of it) -> the norm of its values, or the largest"""


def bound(
    record: RoundRecord, before: Iterable[RoundRecord], settings: MagnitudeSettings, trains_on: bool = False
) -> None:
    """Scale down, or leave out, what is too large in a record that nobody has seen yet. `before`: the last records,
    by round. `trains_on`: who was not counted does, and sends all of its way once it is.

    Where fewer than three contribute the smaller is the measure of the larger, until each has a history of its own, and
    nothing is left out for that; nor is what would leave nothing to be counted.
    """
    *earlier, measured = _with_all_steps([*before, record]) if trains_on else [*before, record]
    excess = {one.replica: _excess(one, measured, earlier) for one in measured.contributions}
    left_out = [replica for replica, ratio in excess.items() if ratio > settings.leave_out]
    if len(record.contributions) < _LEAST_REPLICAS:
        left_out = [replica for replica in left_out if len(_own(replica, earlier)) >= _LEAST_ROUNDS]
    if len(left_out) == len(record.contributions):
        left_out = []
    for replica in left_out:
        record.contributions.remove(next(one for one in record.contributions if one.replica == replica))
    record.left_out.extend(left_out)
    for one in record.contributions:
        if excess[one.replica] > settings.scale:
            one.scale = settings.scale / excess[one.replica]


def _with_all_steps(records: Iterable[RoundRecord]) -> list[RoundRecord]:
    """Copies, with as many steps as a replica may have taken since the round that counted it before, or left it out."""
    found, last = [], dict[str, int]()
    for record in records:
        copy = RoundRecord()
        copy.CopyFrom(record)
        for one in copy.contributions:
            one.steps *= record.round - last.get(one.replica, record.round - 1)
        last |= dict.fromkeys([*(one.replica for one in copy.contributions), *copy.left_out], record.round)
        found.append(copy)
    return found


def _excess(one: ContributionEntry, record: RoundRecord, earlier: Iterable[RoundRecord]) -> float:
    """How many times as large as expected a contribution is, where it is largest against that."""
    own = [_sizes(past, one.steps) for past in _own(one.replica, earlier)]
    around = [_sizes(other, one.steps) for other in record.contributions]
    has_history = len(own) >= _LEAST_ROUNDS
    ratios = [0.0]
    for what, size in _sizes(one, one.steps).items():
        references = [median(sizes[what] for sizes in own)] if has_history else []
        if len(around) >= _LEAST_REPLICAS or not has_history:
            references.append(median_low([sizes[what] for sizes in around]))
        ratios += [size / reference for reference in references if reference > 0]
    return max(ratios)


def _own(replica: str, earlier: Iterable[RoundRecord]) -> list[ContributionEntry]:
    """What was counted of a replica as it was, as far as its size is known."""
    found = (one for record in earlier for one in record.contributions if one.replica == replica)
    return [one for one in found if scale_of(one) == 1 and any(blob.norm for blob in one.blobs)]


def _sizes(one: ContributionEntry, steps: int) -> Sizes:
    """Of more steps, than another took, more is expected: as if this one had taken as many."""
    factor = max(1.0, steps / max(1, one.steps))
    norms = {(blob.block, "norm"): factor * blob.norm for blob in one.blobs}
    return norms | {(blob.block, "peak"): factor * blob.peak for blob in one.blobs}
