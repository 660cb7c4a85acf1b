"""The axis below a panel: where values stand on it, and which of them it names so that no two names touch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hetero_pp.units import parse_any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGARITHMIC = 8
"""Values of which the largest is this many times the smallest stand on a logarithmic axis."""
OF_A_LETTER = 0.02
"""Width, as a share of the axis, of which a gap between two names has one, too."""


class Place(NamedTuple):
    """A value: where it stands, and what the axis calls it."""

    x: float
    name: str


def places_of(values: Sequence[str]) -> list[Place]:
    """Where values stand as the user said them: numbers, ratios and quantities by their size, others in their order."""
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) < len(values):
        return [Place(float(place), value) for place, value in enumerate(values)]
    return [Place(number, value) for number, value in zip(known, values, strict=True)]


def lay_out(axes: Axes, places: Sequence[Place]) -> None:
    """Scale the axis to the places, with room at its ends, and name those that have room for it."""
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


def _with_room(places: Sequence[Place], is_logarithmic: bool) -> list[Place]:
    """Those whose names do not touch: both ends, then the shortest names first."""
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
