"""Expected cost in loss of a compressed boundary, from tables, and the boundaries in order of that cost.

Two tables have the rise of the loss with bf16 coefficients at k/d:

- Het-PP Table 2: 512M parameters, 10B tokens.
- Our measurements at the `micro` scale: 0.34M parameters, 819k tokens, three seeds. Files:
  benchmarks/results/micro/het-pp/table2.json and beyond/rank_for_bits.json.

Low-bit coefficients were measured only by us. There, 4 bits at some rank lose as much as bf16 at a smaller rank. Both
tables are read at that *equivalent* k/d, so one number orders all boundaries. Between entries the rise is linear in
log(k/d). Without compression nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import log

import numpy as np

from hetero_pp.model.part_settings import BoundarySettings

PAPER = {
    1.0: {1 / 8: 2.84, 1 / 24: 2.89, 1 / 96: 2.96, 1 / 192: 3.03, 1 / 384: 3.04, 1 / 768: 3.07},
    0.5: {1 / 8: 2.82, 1 / 24: 2.88, 1 / 96: 2.94, 1 / 192: 2.97, 1 / 384: 2.99, 1 / 768: 3.00},
}
"""Het-PP Table 2: share of replicas that compress -> k/d -> loss."""
PAPER_UNCOMPRESSED = 2.73

MEASURED = {
    1.0: {1 / 4: 4.1731, 1 / 8: 4.3681, 1 / 16: 4.5821, 3 / 64: 4.6750, 1 / 32: 4.8754, 1 / 64: 5.4566},
    0.5: {1 / 8: 4.2590, 1 / 16: 4.4124, 3 / 64: 4.4655, 1 / 32: 4.5659, 1 / 64: 4.5716},
}
"""The same table, as `reproduce` measured it."""
MEASURED_UNCOMPRESSED = 3.9083

FOUR_BITS = {62 / 64: 3.9475, 30 / 64: 4.0907, 14 / 64: 4.2657, 6 / 64: 4.5124}
"""k/d -> measured loss with 4 bits per coefficient, all replicas compressed."""

_RANKS = [Fraction(3, 4), Fraction(3, 32), *(Fraction(1, n) for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192))]
_RANKS += [Fraction(1, 384), Fraction(1, 768)]


@dataclass(frozen=True)
class Rung:
    """Boundary, and the k/d of the bf16 boundary that loses as much."""

    boundary: BoundarySettings
    equivalent: float

    def __str__(self) -> str:
        rank = self.boundary.rank
        shown = Fraction(rank).limit_denominator(1024) if isinstance(rank, float) else rank
        return f"rank {shown} x {f'{self.boundary.bits} bits' if self.boundary.bits else self.boundary.dtype}"


@dataclass(frozen=True)
class Penalty:
    """Expected relative rise of the loss; `measured` is None outside the measured range."""

    paper: float
    measured: float | None


def ladder(own: BoundarySettings, width: int, few_bits: bool = True) -> Sequence[Rung]:
    """Return the boundaries within the measured range, least lossy first. Other settings are those of `own`.

    A boundary is left out if another loses less at no more bits.
    """
    found = [Rung(own.model_copy(update={"rank": "full", "bits": None, "dtype": "bf16"}), 1.0)]
    tables: dict[int | None, Mapping[float, float]] = {None: PAPER[1.0]} | ({4: FOUR_BITS} if few_bits else {})
    exact = {round(rank * width) / width: float(rank) for rank in reversed(_RANKS)}
    for bits, table in tables.items():
        for share, rank in exact.items():
            if min(table) * (1 - 1e-9) <= share < 1:
                boundary = own.model_copy(update={"rank": rank, "bits": bits, "dtype": "bf16"})
                found.append(Rung(boundary, equivalent_rank(share, bits)))
    sizes = [(rung.equivalent, bits_per_token(rung, width)) for rung in found]
    kept = [
        rung
        for rung, (equivalent, bits_) in zip(found, sizes, strict=True)
        if not any(other > equivalent and other_bits <= bits_ for other, other_bits in sizes)
    ]
    return sorted(kept, key=lambda rung: -rung.equivalent)


def rung_of(boundary: BoundarySettings, width: int) -> Rung:
    """Return the rung of any boundary. If its rank or bits were not measured, the nearest measured ones count."""
    rank, bits = (boundary.dimensions(width) or width) / width, None if boundary.bits is None else 4
    low, high = (min(PAPER[1.0]), 1.0) if bits is None else (min(FOUR_BITS), max(FOUR_BITS))
    return Rung(boundary, equivalent_rank(min(max(rank, low), high), bits))


def bits_per_token(rung: Rung, width: int) -> int:
    """Return the bits of a token on the wire. Low-bit coefficients come with a scale of one byte."""
    numbers = rung.boundary.dimensions(width) or width
    return 16 * numbers if rung.boundary.bits is None else rung.boundary.bits * numbers + 8


def equivalent_rank(rank: float, bits: int | None) -> float:
    """Return the k/d at which bf16 coefficients lose as much as these, with all replicas compressed (measured)."""
    if bits is None:
        return rank
    loss = _interpolated(FOUR_BITS, rank)
    assert loss is not None, f"4 bits at k/d {rank} were not measured"
    curve = sorted({1.0: MEASURED_UNCOMPRESSED, **MEASURED[1.0]}.items(), reverse=True)
    return float(np.exp(np.interp(loss, [y for _, y in curve], [log(x) for x, _ in curve])))


def penalty_of(equivalent: float, share: float) -> Penalty:
    """Return the expected rise of the loss if `share` of the replicas compresses; linear between the tables' shares."""

    def rise(table: Mapping[float, Mapping[float, float]], uncompressed: float) -> float | None:
        rises = {0.0: 0.0}
        for known, losses in table.items():
            loss = _interpolated({1.0: uncompressed, **losses}, equivalent)
            if loss is None:
                return None
            rises[known] = loss / uncompressed - 1
        return float(np.interp(share, sorted(rises), [rises[one] for one in sorted(rises)]))

    paper = rise(PAPER, PAPER_UNCOMPRESSED)
    assert paper is not None  # the ladder ends where the paper's table does
    return Penalty(paper, rise(MEASURED, MEASURED_UNCOMPRESSED))


def _interpolated(points: Mapping[float, float], rank: float) -> float | None:
    """Return the loss at a k/d, linear in log(k/d); None outside the table."""
    ranks = sorted(points)
    if not ranks[0] * (1 - 1e-9) <= rank <= ranks[-1]:
        return None
    return float(np.interp(log(rank), [log(one) for one in ranks], [points[one] for one in ranks]))
