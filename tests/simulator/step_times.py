"""Times of some inner steps of groups, from time 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero_pp.simulator.pipeline import Array, GroupClock, Groups, OnSpan


@dataclass
class StepTimes:
    """Times of some inner steps that began at time 0."""

    ends: Array
    """Time when each stage completed its last optimizer step, [S, G]."""
    steps: list[Array]
    """Times when the first stage completed each optimizer step, [G] each."""


def time_steps(
    groups: Groups, steps: int, random: np.random.Generator | None = None, on_span: OnSpan | None = None
) -> StepTimes:
    """Time `steps` inner steps and the flush.

    `random` draws jitter (none without it); `on_span` receives every span.
    """
    clock = GroupClock(groups, random, on_span)
    ends = clock.inner_loop(steps)
    return StepTimes(clock.free, ends)
