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
SMOOTHING = 1e-6
"""Smallest distance of the geometric median from a contribution, relative to the median norm."""
_TINY = 1e-30
"""Smallest distance of all, so that contributions of zeros cause no division by zero."""
_AT_ONCE = 1 << 23
"""Values of all contributions together that are dense at the same time: 64 MiB in fp64."""
_EXACT_BITS, _LARGEST_BITS = 53, 24
"""Bits of the integers that fp64 and fp32 represent exactly."""
_ROUNDING = 1e-9
"""Of a share times a number of senders, so that 0.1 x 30 is 3."""

Table = Sequence[Sequence[float]]
"""Products <x_i, x_j> [R, R]."""


def robust_mean(
    shape: tuple[int, ...],
    weighted: Sequence[tuple[float, DecodedTensor]],
    settings: OuterSettings,
    rows: range | None = None,
) -> Tensor:
    """Return the robust mean of contributions to a tensor of this shape, or some rows of it, as a dense fp32 tensor.

    `weighted`: weights and contributions to the whole tensor, at least one. `settings.aggregation` names the mean. It
    needs about 250 MiB beside the contributions (12 bytes per value sent, twice) and the result.
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
    sent = [_scaled(one, share) for one, share in zip(sent, shares, strict=True)]
    if len(rows) < shape[0]:
        sent = [one.part(rows.start * stride, rows.stop * stride) for one in sent]
    mean = torch.zeros(len(rows), *shape[1:], device=sent[0].values.device)
    if kind == "trimmed_mean":
        _trim(mean.view(-1), sent, settings.trim)
    else:
        for one in sent:
            one.add_to(mean, 1.0)
    return mean


class RobustMean:
    """Holds contributions to one tensor until their robust mean is asked for. It has the interface of WeightedMean."""

    def __init__(self, shape: tuple[int, ...], settings: OuterSettings) -> None:
        self.weighted: list[tuple[float, DecodedTensor]] = []
        self._shape, self._settings = shape, settings

    def add(self, decoded: DecodedTensor, weight: float = 1.0) -> None:
        """Add one contribution."""
        self.weighted.append((weight, decoded))

    def finish(self) -> Tensor:
        """Return the mean."""
        return robust_mean(self._shape, self.weighted, self._settings)


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
    total = torch.zeros(len(sent), len(sent), dtype=torch.float64, device=sent[0].values.device)
    rounded = [DecodedTensor(one.indices, own) for one, own in zip(sent, integers, strict=True)]
    for _, values in _slices(rounded, size, 0.0):
        dense = values.double()
        total += dense @ dense.T
    table: list[list[float]] = total.tolist()
    return [
        [one * mine * theirs for one, theirs in zip(row, units, strict=True)]
        for row, mine in zip(table, units, strict=True)
    ]


def _integers(one: DecodedTensor, size: int) -> tuple[float, Tensor]:
    """Return (unit, integers [n]) of the rounded values; the sum of `size` products of two of them is below 2^53."""
    bits = min(_LARGEST_BITS, (_EXACT_BITS - size.bit_length()) // 2)
    peak = float(one.values.abs().max()) if len(one.values) else 0.0
    unit = math.ldexp(1.0, math.frexp(peak)[1] - bits)
    return unit, (one.values.double() / unit).round_().float()


def _slices(sent: Sequence[DecodedTensor], size: int, empty: float) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, dense values [R, n]) of consecutive coordinates; `empty` stands for values that are not sent."""
    length = max(1, _AT_ONCE // len(sent))
    ordered = sent if size <= length else [_in_order(one) for one in sent]
    for start in range(0, size, length):
        stop = min(start + length, size)
        dense = sent[0].values.new_full((len(sent), stop - start), empty)
        for row, one in zip(dense, ordered, strict=True):
            own = slice(None)
            if size > length:
                own = slice(*torch.searchsorted(one.indices, one.indices.new_tensor([start, stop])).tolist())
            row[one.indices[own] - start] = one.values[own]
        yield start, dense


def _in_order(one: DecodedTensor) -> DecodedTensor:
    order = one.indices.argsort()
    return DecodedTensor(one.indices[order], one.values[order])


def _scaled(one: DecodedTensor, share: float) -> DecodedTensor:
    """Return the values times a share, rounded once: in fp32 the share of a huge contribution could vanish."""
    return one if share == 1.0 else DecodedTensor(one.indices, (one.values.double() * share).float())


# ---- coordinates ----


def _trim(mean: Tensor, sent: Sequence[DecodedTensor], share: float) -> None:
    """Write the trimmed mean of contributions to `mean` [n].

    Of the s senders of a coordinate, the k = ceil(share s) lowest and the k highest values are left out, but one or two
    always stay. The mean of the others is multiplied by s / R: a value that is not sent counts as 0, as in the mean.
    """
    count = len(sent)
    left_out = [max(0, min(math.ceil(share * s - _ROUNDING), (s - 1) // 2)) for s in range(count + 1)]
    divisors = mean.new_tensor([count * (s - 2 * k) / s if s else 1.0 for s, k in enumerate(left_out)])
    trims = torch.tensor(left_out, device=mean.device)
    for start, values in _slices(sent, len(mean), math.inf):
        senders = (values != math.inf).sum(0)
        where = (trims[senders] > 0).nonzero().view(-1)
        ordered, last = values[:, where].sort(0).values, senders[where]
        first = trims[last]
        last = last - first
        values.masked_fill_(values == math.inf, 0.0)
        total, inner = torch.zeros_like(values[0]), torch.zeros_like(ordered[0])
        for rank, row in enumerate(values):
            total += row
            inner += ordered[rank].masked_fill((rank < first) | (rank >= last), 0.0)
        total[where] = inner
        mean[start : start + len(total)] = total / divisors[senders]
