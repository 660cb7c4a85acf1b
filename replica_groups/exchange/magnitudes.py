"""Bound contributions: scale down, or leave out, those that are larger than a replica can honestly send.

A contribution is held against up to three measures, block by block, by its norm and its largest value:

1. what the configured inner steps can move parameters by at most (limits.py), which needs no history;
2. the median of its round, where three or more contribute, for as many steps and batches as large;
3. its replica's own contributions before, as far as the learning rates let these grow or shrink. Where only two
   contribute, its own lowest level counts as well, unless the other one is as large.

New replicas begin without moments and error feedback, so their contributions are small. If fewer than three of a round
were in each of the last three rounds, these few are held against their own lowest level instead of the median.

Where the first exists, nothing that one replica sends has another's contribution scaled. Honest runs of twelve methods
and mixes came to .80 of the first at most, and to 2.4 times the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median, median_low

from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import scale_of
from replica_groups.exchange.limits import ContributionLimits, Sizes
from replica_groups.rounds.rules import MOST_TIMES_THE_STEPS

RECENT_ROUNDS = 8
"""Number of rounds whose median is a replica's own level."""

REMEMBERED_ROUNDS = 64
"""Number of rounds among which a replica's lowest level is looked for, beside the run's first RECENT_ROUNDS."""

_LEAST_ROUNDS = 3
"""Number of a replica's own contributions that are enough for a level."""

_STEADY_ROUNDS = 3
"""Number of rounds in a row, just before, that included a steady replica."""

_LEAST_REPLICAS = 3
"""Smallest number of contributions whose median a single replica cannot set."""


def remembered_before(round_: int) -> list[int]:
    """Return the rounds of the records that `bound` reads for a round, in order."""
    recent = range(max(1, round_ - REMEMBERED_ROUNDS), round_)
    return [*range(1, min(RECENT_ROUNDS + 1, recent.start)), *recent]


def bound(
    record: RoundRecord,
    before: Iterable[RoundRecord],
    settings: MagnitudeSettings,
    trains_on: bool = False,
    limits: ContributionLimits | None = None,
) -> None:
    """Scale down or leave out contributions of a record that nobody has read yet.

    `before`: the records of `remembered_before`. With `trains_on`, a replica that was not counted sends several rounds'
    changes at once. Without `limits`, the smaller of two contributions bounds the larger until that has a history.
    With fewer than three, one without history is rejected only for exceeding the limits. If all would be rejected,
    none is.
    """
    by_level, is_crowd = {one.replica for one in record.contributions}, len(record.contributions) >= _LEAST_REPLICAS
    if is_crowd:  # the others are a measure, if enough of them are not new; the lowest level of long ago is not
        before = [past for past in before if past.round >= record.round - RECENT_ROUNDS]
        last = [past for past in before if past.round >= record.round - _STEADY_ROUNDS]
        steady = by_level.intersection(*({one.replica for one in past.contributions} for past in last))
        by_level = steady if len(last) >= _STEADY_ROUNDS and len(steady) < _LEAST_REPLICAS else set()
    *earlier, measured = _with_all_steps([*before, record]) if trains_on else [*before, record]
    if limits is not None:
        earlier = [_as_in(record.round, past, limits) for past in earlier]
    largest = {} if limits is None else limits.of(record.round)
    beyond = {one.replica: _beyond(one, largest) for one in measured.contributions}
    own, lower = _own(earlier), _lower_medians(measured)
    is_limited = not is_crowd and limits is not None
    excess = {
        one.replica: _excess(one, own.get(one.replica, []), lower(one), one.replica in by_level, is_limited)
        for one in measured.contributions
    }
    left_out = [replica for replica, ratio in excess.items() if ratio > settings.leave_out]
    if len(record.contributions) < _LEAST_REPLICAS:
        left_out = [replica for replica in left_out if len(own.get(replica, [])) >= _LEAST_ROUNDS]
    left_out = [one for one in excess if one in left_out or beyond[one] > settings.leave_out / settings.scale]
    if len(left_out) == len(record.contributions):
        left_out = []
    for replica in left_out:
        record.contributions.remove(next(one for one in record.contributions if one.replica == replica))
    record.left_out.extend(left_out)
    for one in record.contributions:
        if (too_large := max(excess[one.replica] / settings.scale, beyond[one.replica])) > 1:
            one.scale = 1 / too_large


def _with_all_steps(records: Iterable[RoundRecord]) -> list[RoundRecord]:
    """Return copies with the steps that a replica may have taken since it was last counted or left out."""
    found, last = [], dict[str, int]()
    for record in records:
        copy = _copy(record)
        for one in copy.contributions:
            rounds = min(record.round - last.get(one.replica, record.round - 1), RECENT_ROUNDS)
            one.steps, one.tokens = rounds * one.steps, rounds * one.tokens
        last |= dict.fromkeys([*(one.replica for one in copy.contributions), *copy.left_out], record.round)
        found.append(copy)
    return found


def _as_in(round_: int, past: RoundRecord, limits: ContributionLimits) -> RoundRecord:
    """Return a record with the sizes that its contributions would have with the learning rates of another round."""
    copy = _copy(past)
    before = limits.accumulated(past.round)
    growth = limits.accumulated(round_) / before if before > 0 else 1.0
    for one in copy.contributions:
        for blob in one.blobs:
            blob.norm, blob.peak = growth * blob.norm, growth * blob.peak
    return copy


def _copy(record: RoundRecord) -> RoundRecord:
    copy = RoundRecord()
    copy.CopyFrom(record)
    return copy


def _beyond(one: ContributionEntry, largest: Sizes) -> float:
    """Return how many times as large as the configuration allows a contribution is; 0 where it says nothing."""
    return max((size / largest[what] for what, size in _sizes(one).items() if largest.get(what, 0.0) > 0), default=0.0)


def _excess(
    one: ContributionEntry, earlier: Sequence[ContributionEntry], lower: Sizes, by_level: bool, is_limited: bool
) -> float:
    """Return how many times as large as others, or its own before, a contribution is, where that is most.

    `earlier`: its replica's own. `lower`: the lower medians of the round's. `by_level`: its own lowest level replaces
    these, once it has one. `is_limited`: it needs neither, because the configuration limits it.
    """
    own = [_sizes(past, one) for past in earlier]
    has_history, ratios = len(own) >= _LEAST_ROUNDS, [0.0]
    for what, size in _sizes(one).items():
        references = [median(sizes[what] for sizes in own[-RECENT_ROUNDS:])] if has_history else []
        if has_history and by_level:
            references.append(max(_lowest_level([sizes[what] for sizes in own]), lower[what]))
        elif not is_limited:
            references.append(lower[what])
        ratios += [size / reference for reference in references if reference > 0]
    return max(ratios)


def _lowest_level(sizes: Sequence[float]) -> float:
    """Return the lowest median of RECENT_ROUNDS contributions in a row."""
    starts = range(0, max(1, len(sizes) - RECENT_ROUNDS + 1), RECENT_ROUNDS // 2)
    return min(median(sizes[start : start + RECENT_ROUNDS]) for start in starts)


def _lower_medians(record: RoundRecord) -> Callable[[ContributionEntry], Sizes]:
    """Return the lower medians of a round's sizes, as they would be with the steps and the batch of a contribution.

    Contributions with the same steps and tokens share them: to compare each with each would take longest in large runs.
    """
    known: dict[tuple[int, int], Sizes] = {}

    def lower(like: ContributionEntry) -> Sizes:
        key = like.steps, like.tokens
        if key not in known:
            around = [_sizes(other, like) for other in record.contributions]
            known[key] = {what: median_low([sizes[what] for sizes in around]) for what in around[0]}
        return known[key]

    return lower


def _own(earlier: Iterable[RoundRecord]) -> dict[str, list[ContributionEntry]]:
    """Return the earlier contributions of each replica, oldest first: those that were included unscaled, with sizes."""
    found: dict[str, list[ContributionEntry]] = {}
    for record in earlier:
        for one in record.contributions:
            if scale_of(one) == 1 and any(blob.norm for blob in one.blobs):
                found.setdefault(one.replica, []).append(one)
    return found


def _sizes(one: ContributionEntry, like: ContributionEntry | None = None) -> Sizes:
    """Return the sizes of a contribution, as they would be at most with the steps and the batch of another.

    Changes grow with the number of steps, and with the root of a step's tokens, as gradients have less noise then.
    """
    factor = 1.0
    if like is not None:
        factor = min(max(1.0, like.steps / max(1, one.steps)), MOST_TIMES_THE_STEPS)
        own, other = one.tokens / max(1, one.steps), like.tokens / max(1, like.steps)
        factor *= math.sqrt(max(1.0, other / own)) if own > 0 else 1.0
    norms = {(blob.block, "norm"): factor * blob.norm for blob in one.blobs}
    return norms | {(blob.block, "peak"): factor * blob.peak for blob in one.blobs}
