"""Whose contributions a round is made without, drawn at random: what late and lost contributions cost.

Source: DiLoCo (Douillard et al. 2023), Figure 8. There a replica that is missed trains on from its own parameters,
which is `outer.keep_local`; without that it takes those of all, and what it has sent goes back into error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_pp.seeds import seed_of

_DRAWS = 2**63
"""How many values a seed has."""


def missed_in(round_: int, replicas: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """The replicas that a round does not count: each with probability `share`, whatever the others' draws are.

    If it were all of them, the one with the largest draw is counted. Who is missed at a share is missed at any larger.
    """
    draws = {name: seed_of("missed", seed, round_, name) / _DRAWS for name in replicas}
    counted = {name for name, draw in draws.items() if draw >= share} or {max(draws, key=lambda name: draws[name])}
    return frozenset(draws) - counted
