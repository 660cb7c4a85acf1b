"""Ratings by OpenSkill's Plackett-Luce model, an optional package that only this file imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetero_pp.core.errors import ConfigError

BETA, TAU = 7.0, 0.1
"""Spread of a performance around a rating, and growth of a rating's uncertainty in a match: Gauntlet's values."""


class Rating(NamedTuple):
    """Normal distribution of a replica's strength."""

    mu: float = 25.0
    sigma: float = 25 / 3

    @property
    def ordinal(self) -> float:
        """Strength that the replica has almost certainly: 0 for a new one."""
        return self.mu - 3 * self.sigma


NEW = Rating()
"""Rating before the first match."""


def require_openskill() -> None:
    """Raise ConfigError if the package is not installed."""
    try:
        import openskill.models  # noqa: F401
    except ImportError:
        key, extra = ("audit", "gauntlet"), "needs an optional package: pip install 'hetero-pp[audit]'"
        raise ConfigError(key, f"scoring contributions {extra}") from None


def rated(ratings: Mapping[str, Rating], order: Sequence[str]) -> dict[str, Rating]:
    """Return the ratings of some replicas after a match, of which `order` is the result, from the worst to the best.

    There are no draws: in a match with several, the model raises the replica just below them.
    """
    from openskill.models import PlackettLuce

    model = PlackettLuce(beta=BETA, tau=TAU)
    players = [[model.create_rating([ratings[name].mu, ratings[name].sigma])] for name in order]
    found = model.rate(players, scores=list(range(len(order))))
    return {name: Rating(one.mu, one.sigma) for name, (one,) in zip(order, found, strict=True)}
