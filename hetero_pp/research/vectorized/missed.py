"""Contributions that a round excludes at random, to measure the cost of late and lost contributions.

Source: DiLoCo (Douillard et al. 2023), Figure 8. There an excluded replica trains on from its own parameters, which is
`outer.keep_local`. Otherwise it takes the common parameters, and its contribution is restored to error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_pp.core.seeds import seed_of

_DRAWS = 2**63
"""Number of values of a seed."""


def missed_in(round_: int, replicas: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """Return the replicas that a round excludes, each independently with probability `share`.

    If all were excluded, the one with the largest draw is included. A replica excluded at a share is excluded at any
    larger one.
    """
    draws = {name: seed_of("missed", seed, round_, name) / _DRAWS for name in replicas}
    counted = {name for name, draw in draws.items() if draw >= share} or {max(draws, key=lambda name: draws[name])}
    return frozenset(draws) - counted
