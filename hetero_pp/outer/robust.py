"""Means that a minority of hostile replicas moves only so far: trimmed mean, centred clipping, geometric median.

Each works on one tensor at a time. Sources:

    trimmed mean        Yin et al. 2018, definition 2, among the senders of each coordinate (`trim` says how)
    centred clipping    Karimireddy et al. 2021, algorithm 2, from v = 0, with a radius relative to the median distance
    geometric median    Pillutla et al. 2022 (RFA), the smoothed Weiszfeld algorithm, from v = 0

The last two are sums a_1 x_1 + ... + a_R x_R of the contributions. The shares a_i follow from the products <x_i, x_j>
alone, so all iterations work on a table [R, R]. The table is exact: values are rounded to integers, so small that each
partial sum of their products is an integer below 2^53. Sums over replicas are rounded once (math.fsum). So shares have
the same bits on every machine, in whatever order its libraries add. They are of whole tensors, whatever the rows that a
rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor

CLIPPINGS, WEISZFELD_STEPS = 8, 32
SMOOTHING = 1e-6  # smallest distance of the geometric median from a contribution, relative to the median norm
_TINY = 1e-30  # smallest distance of all, so that contributions of zeros cause no division by zero
_AT_ONCE = 1 << 21  # values of all contributions together that are dense at the same time: 16 MiB in fp64
_EXACT_BITS, _LARGEST_BITS = 53, 24  # bits of the integers that fp64 and fp32 represent exactly
_ROUNDING = 1e-9  # allowed error of a share times a number of senders, so that 0.1 x 30 is 3
Table = Sequence[Sequence[float]]  # products <x_i, x_j> [R, R]


def robust_mean(
    shape: tuple[int, ...],
    weighted: Sequence[tuple[float, DecodedTensor]],
    settings: OuterSettings,
    rows: range | None = None,
) -> Tensor:
    """Return the robust mean of contributions to a tensor of this shape, or some rows of it, as a dense fp32 tensor.

    `weighted`: weights and contributions to the whole tensor, at least one. `settings.aggregation` names the mean. The
    contributions are decoded at the same time, at 12 bytes per value sent. The mean needs at most as much again, 20
    bytes per value of the tensor, and 32 MiB.
    """
    size, stride = math.prod(shape), math.prod(shape[1:])
    rows = range(shape[0]) if rows is None else rows
    kind, sent = settings.aggregation, [one for _, one in weighted]
    if kind == "trimmed_mean":
        shares = clipped(norms_of(sent, size))
    elif kind == "centred_clipping":
        shares = clipping_shares(products_of(sent, size), settings.radius)
    else:
        shares = median_shares(products_of(sent, size), [weight for weight, _ in weighted])
    sent = [  # rounded once: in fp32 the share of a huge contribution could vanish
        one if share == 1.0 else DecodedTensor(one.indices, (one.values.double() * share).float())
        for one, share in zip(sent, shares, strict=True)
    ]
    if len(rows) < shape[0]:
        sent = [one.part(rows.start * stride, rows.stop * stride) for one in sent]
    mean = torch.zeros(len(rows), *shape[1:], dtype=torch.float32, device=sent[0].values.device)
    if kind == "trimmed_mean":
        _trim(mean.view(-1), sent, settings.trim)
    else:
        for one in sent:
            one.add_to(mean, 1.0)
    return mean


# ---- shares of whole contributions ----


def clipped(norms: Sequence[float]) -> list[float]:
    """Return the factors that reduce norms to at most their median."""
    return [min(1.0, _median(norms) / max(norm, _TINY)) for norm in norms]


def clipping_shares(products: Table, radius: float) -> list[float]:
    """Return a_i of clipping: v <- v + mean_i min(1, t / |x_i - v|) (x_i - v), t = radius x median |x_j - v|."""
    count = len(products)
    shares = [0.0] * count
    for _ in range(CLIPPINGS):
        distances = _distances(products, shares)
        within = [min(1.0, radius * _median(distances) / max(one, _TINY)) for one in distances]
        stays = 1.0 - math.fsum(within) / count
        shares = [share * stays + one / count for share, one in zip(shares, within, strict=True)]
    return shares


def median_shares(products: Table, weights: Sequence[float]) -> list[float]:
    """Return a_i of the geometric median: the v with the least sum_i w_i |x_i - v|, by Weiszfeld's fixed point."""
    nearest = max(SMOOTHING * _median([math.sqrt(row[index]) for index, row in enumerate(products)]), _TINY)
    shares = [0.0] * len(products)
    for _ in range(WEISZFELD_STEPS):
        near = [w / max(one, nearest) for w, one in zip(weights, _distances(products, shares), strict=True)]
        shares = [one / math.fsum(near) for one in near]
    return shares


def _distances(products: Table, shares: Sequence[float]) -> list[float]:
    """Return |x_i - v| for v = sum_j a_j x_j: the root of <x_i, x_i> - 2 <x_i, v> + <v, v>."""
    along = [math.fsum(share * one for share, one in zip(shares, row, strict=True)) for row in products]
    square = math.fsum(share * one for share, one in zip(shares, along, strict=True))
    return [math.sqrt(max(0.0, math.fsum((row[i], -2 * along[i], square)))) for i, row in enumerate(products)]


def _median(values: Sequence[float]) -> float:
    """Return the lower median, which a hostile minority cannot raise above the largest honest value."""
    return sorted(values)[(len(values) - 1) // 2]


# ---- exact products ----


def norms_of(sent: Sequence[DecodedTensor], size: int) -> list[float]:
    """Return the norms of contributions to a tensor of `size` values."""
    norms = []
    for one in sent:
        unit, integers = _integers(one, size)
        norms.append(unit * math.sqrt(float(integers.double().square().sum())))
    return norms


def products_of(sent: Sequence[DecodedTensor], size: int) -> Table:
    """Return the products <x_i, x_j> [R, R] of contributions to a tensor of `size` values."""
    units, integers = zip(*(_integers(one, size) for one in sent), strict=True)
    count = len(sent)
    if have_equal_indices(sent):
        total = integers[0].new_zeros(count, count, dtype=torch.float64)
        for parts in zip(*(one.split(max(1, _AT_ONCE // count)) for one in integers), strict=True):
            rows = torch.stack(parts).double()
            total += rows @ rows.T
        sums: list[list[float]] = total.tolist()
    else:  # one is dense at a time, and the others look up their indices in it
        sums = [[0.0] * count for _ in sent]
        dense = integers[0].new_zeros(size, dtype=torch.float64)
        for i, mine in enumerate(sent):
            dense[mine.indices] = integers[i].double()
            for j, other in enumerate(sent[: i + 1]):
                sums[i][j] = sums[j][i] = float(dense.index_select(0, other.indices).dot(integers[j].double()))
            dense[mine.indices] = 0.0
    return [
        [one * mine * other for one, other in zip(row, units, strict=True)]
        for row, mine in zip(sums, units, strict=True)
    ]


def have_equal_indices(sent: Sequence[DecodedTensor]) -> bool:
    """Return whether all contributions have the same indices in the same order, as those that send all values."""
    return all(one.indices.equal(sent[0].indices) for one in sent)


def _integers(one: DecodedTensor, size: int) -> tuple[float, Tensor]:
    """Return (unit, integers [n]) of the rounded values; the sum of `size` products of two of them is below 2^53."""
    bits = min(_LARGEST_BITS, (_EXACT_BITS - size.bit_length()) // 2)
    peak = float(one.values.abs().max()) if len(one.values) else 0.0
    unit = math.ldexp(1.0, math.frexp(peak)[1] - bits)
    return unit, (one.values.double() / unit).round_().float()


# ---- coordinates ----


def _trim(mean: Tensor, sent: Sequence[DecodedTensor], share: float) -> None:
    """Add the trimmed mean of contributions to `mean` [n], which is 0.

    A coordinate with s senders loses its k = ceil(share s) lowest and its k highest values, but one or two always stay.
    The mean of the others is multiplied by s / R: a value that is not sent counts as 0, as in the mean.
    """
    count = len(sent)
    left_out = [max(0, min(math.ceil(share * s - _ROUNDING), (s - 1) // 2)) for s in range(count + 1)]
    trims, senders = torch.tensor(left_out, device=mean.device), torch.zeros_like(mean, dtype=torch.int16)
    for one in sent:
        one.add_to(mean, 1.0)
        senders[one.indices] += 1
    mean.div_(count)
    few = sum(k == 0 for k in left_out)
    for columns, values in _columns(sent, (senders >= few).nonzero().view(-1), len(mean)):
        last = senders[columns].long()
        first, divisors = trims[last], count * (last - 2 * trims[last]) / last
        last = last - first
        total = torch.zeros_like(values[0])
        for rank, row in enumerate(_sorted(list(values))):
            total += row.masked_fill_((rank < first) | (rank >= last), 0.0)
        mean[columns] = total / divisors


def _columns(sent: Sequence[DecodedTensor], where: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some of the coordinates `where`, which ascend, and their values [R, m]; inf if a value is not sent."""
    if not len(where):
        return
    length = max(1, _AT_ONCE // len(sent))
    if have_equal_indices(sent):
        for columns, *values in zip(
            sent[0].indices.split(length), *(one.values.split(length) for one in sent), strict=True
        ):
            yield columns, torch.stack(values)
        return
    slots = torch.full((size,), -1, dtype=torch.int32, device=where.device)
    slots[where] = torch.arange(len(where), dtype=torch.int32, device=where.device)
    sorts = [one.indices.sort() for one in sent]
    ordered = [DecodedTensor(indices, one.values[order]) for one, (indices, order) in zip(sent, sorts, strict=True)]
    for part, columns in enumerate(where.split(length)):
        bounds = torch.stack([columns[0], columns[-1] + 1])
        dense = sent[0].values.new_full((len(sent), len(columns)), math.inf)
        for row, one in zip(dense, ordered, strict=True):
            own = slice(*torch.searchsorted(one.indices, bounds).tolist())
            slot = slots[one.indices[own]].long() - part * length
            is_in = slot >= 0
            row[slot[is_in]] = one.values[own][is_in]
        yield columns, dense


def _sorted(rows: list[Tensor]) -> list[Tensor]:
    """Return rows [m] that ascend in each column, by Batcher's merge exchange: for few rows much faster than a sort."""
    count, width = len(rows), 1
    while width < count:
        distance = width
        while distance >= 1:
            for start in range(distance % width, count - distance, 2 * distance):
                for low in range(start, min(start + distance, count - distance)):
                    high = low + distance
                    if low // (2 * width) == high // (2 * width):
                        lower = torch.minimum(rows[low], rows[high])
                        rows[high], rows[low] = torch.maximum(rows[low], rows[high]), lower
            distance //= 2
        width *= 2
    return rows
