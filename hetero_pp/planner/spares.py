"""Form groups of waiting machines, by the speed of their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hetero_pp.planner.grouping import Pool, group

TIME_LIMIT = 1.0
"""Longest search, in seconds; waiting machines need an answer meanwhile."""


class Line(Protocol):
    """Line of a waiting machine, in bits per second."""

    @property
    def up(self) -> float: ...

    @property
    def down(self) -> float: ...


def group_spares(lines: Sequence[Line], stages: int) -> list[list[int]]:
    """Return groups of `stages` machines, each in the order of its stages, fastest links first.

    All machines count as equal, because only their lines are known.
    """
    up, down = (np.array([getattr(line, way) for line in lines]) for way in ("up", "down"))
    seconds = np.broadcast_to(np.arange(stages + 1.0), (len(lines), stages, stages + 1))
    found = group(Pool(seconds, np.minimum(up[:, None], down[None, :]), balance=1.0), TIME_LIMIT)
    assert found is not None
    best = sorted(range(len(found.groups)), key=lambda one: -found.links[one])
    return [found.groups[one] for one in best]
