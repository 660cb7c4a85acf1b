"""Scale and tick labels of a panel's horizontal axis; labels never overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hetero_pp.core.units import parse_any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGARITHMIC = 8
"""Ratio of the largest value to the smallest from which the axis is logarithmic."""
OF_A_LETTER = 0.02
"""Width of one letter as a share of the axis; labels also keep a gap of one letter."""


class AxisTick(NamedTuple):
    """Position and label of a value on the axis."""

    x: float
    name: str


def ticks_of(values: Sequence[str]) -> list[AxisTick]:
    """Return the position of each value as the user wrote it.

    Numbers, ratios and quantities are placed by size. If any value is none of these, all are placed in their order.
    """
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) < len(values):
        return [AxisTick(float(place), value) for place, value in enumerate(values)]
    return [AxisTick(number, value) for number, value in zip(known, values, strict=True)]


def lay_out(axes: Axes, places: Sequence[AxisTick]) -> None:
    """Scale the axis to the places, leave a margin at both ends, and label the places that have room."""
    known = sorted({place.x: place for place in places}.values())
    if not known:
        axes.set_xticks([])
        return
    low, high = known[0].x, known[-1].x
    is_logarithmic = low > 0 and high >= LOGARITHMIC * low
    if is_logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(low * (low / high) ** 0.06, high * (high / low) ** 0.06)
    else:
        room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
        axes.set_xlim(low - room, high + room)
    axes.minorticks_off()
    named = _with_room(known, is_logarithmic)
    axes.set_xticks([place.x for place in named], [place.name for place in named])


def _with_room(places: Sequence[AxisTick], is_logarithmic: bool) -> list[AxisTick]:
    """Return the places whose labels do not overlap: both ends first, then those with the shortest labels."""
    along = [math.log(place.x) if is_logarithmic else place.x for place in places]
    width = (along[-1] - along[0]) or 1.0
    lengths = [len(place.name) for place in places]
    chosen: list[int] = []
    ends = {0, len(places) - 1}
    for index in sorted(range(len(places)), key=lambda one: (one not in ends, lengths[one], one)):
        gaps = ((abs(along[index] - along[one]) / width, (lengths[index] + lengths[one]) / 2 + 1) for one in chosen)
        if all(gap >= OF_A_LETTER * letters for gap, letters in gaps):
            chosen.append(index)
    return [places[index] for index in sorted(chosen)]


def _number(value: str) -> float | None:
    try:
        return parse_any(value)
    except ValueError:
        return None
