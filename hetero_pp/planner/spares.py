"""Which of those who wait form groups, by how fast their lines are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hetero_pp.planner.grouping import Pool, group

TIME_LIMIT = 1.0
"""Seconds: who waits is answered meanwhile."""


class Line(Protocol):
    """Of one that waits, in bits per second."""

    @property
    def up(self) -> float: ...

    @property
    def down(self) -> float: ...


def group_spares(lines: Sequence[Line], stages: int) -> list[list[int]]:
    """Groups of so many, each in the order of its stages, that with the fastest links first.

    Their machines count as equal: of who waits nothing is known but its line.
    """
    up, down = (np.array([getattr(line, way) for line in lines]) for way in ("up", "down"))
    seconds = np.broadcast_to(np.arange(stages + 1.0), (len(lines), stages, stages + 1))
    found = group(Pool(seconds, np.minimum(up[:, None], down[None, :]), balance=1.0), TIME_LIMIT)
    assert found is not None
    best = sorted(range(len(found.groups)), key=lambda one: -found.links[one])
    return [found.groups[one] for one in best]
