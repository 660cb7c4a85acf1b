"""Ratings by OpenSkill's Plackett-Luce model, an optional package that only this file imports."""

from __future__ import annotations

from collections.abc import Mapping
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


def rated(ratings: Mapping[str, Rating], scores: Mapping[str, float]) -> dict[str, Rating]:
    """Return the ratings of the replicas in `scores` after a match; larger scores are better, equal ones are draws."""
    from openskill.models import PlackettLuce

    model, names = PlackettLuce(beta=BETA, tau=TAU), sorted(scores)
    players = [[model.create_rating([ratings[name].mu, ratings[name].sigma])] for name in names]
    found = model.rate(players, scores=[scores[name] for name in names])
    return {name: Rating(one.mu, one.sigma) for name, (one,) in zip(names, found, strict=True)}
