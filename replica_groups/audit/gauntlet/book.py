"""Scores of all replicas of a run, round after round (Gauntlet, arXiv:2505.21684), and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.messages.messages_pb2 import Losses, Score
from replica_groups.audit.gauntlet.ratings import Rating, rated

RECENT_ROUNDS = 16
"""Rounds for which a replica that is away still counts as a rival."""


@dataclass(frozen=True)
class RoundFacts:
    """What was seen of a round without trying any contribution."""

    round: int
    included: frozenset[str]
    """Replicas whose contributions are in the round's mean."""
    missed: frozenset[str]
    """Replicas that took part and whose contributions are not in the mean, as they came late or were refused."""
    synchronisation: Mapping[str, float]
    """1 for a replica that started from the right parameters, 0 for another; 1 by default."""
    copies: Mapping[str, str]
    """Original by copy."""


@dataclass(frozen=True)
class _Entry:
    """What is known of one replica."""

    rating: Rating = Rating()
    average: float = 0.0
    """Moving average of the indicator."""
    gain: float = 0.0
    """Moving average of the score."""
    evaluations: int = 0
    """Since it was last excluded."""
    present: int = 0
    contributed: int = 0
    last: int = 0
    """Last round in which it was present."""
    synchronisation: float = 1.0
    pending: float | None = None
    """Newest score since the last match."""
    until: int = 0
    """Last round of its exclusion."""
    cause: str = ""


class ScoreBook:
    """Scores by replica. Depends only on what `update` was told."""

    def __init__(self, settings: GauntletSettings, replicas: Iterable[str]) -> None:
        self._settings = settings
        self._round = 0
        self._entries = {name: _Entry() for name in sorted(replicas)}

    def update(self, facts: RoundFacts, losses: Mapping[str, Losses]) -> None:
        """Take one round into account; rounds come in order. `losses` are those of the contributions that were tried.

        Losses of a replica that did not take part in the round are ignored.
        """
        self._round = facts.round
        for name in sorted(facts.included | facts.missed):
            entry = self._present(name, facts)
            if name in facts.copies:
                entry = self._evaluated(entry, -1.0, 0.0)
            elif name in losses:
                entry = self._evaluated(entry, *_judged(losses[name]))
            self._entries[name] = entry
        self._rate()
        self._exclude(facts)

    def scores(self) -> dict[str, Score]:
        """Return the score of every replica."""
        return {
            name: Score(
                replica=name,
                rating=entry.rating.ordinal,
                average=entry.average,
                synchronisation=entry.synchronisation,
                final=_final(entry),
                evaluations=entry.evaluations,
                excluded=entry.cause,
                uptime=entry.contributed / entry.present if entry.present else 1.0,
            )
            for name, entry in self._entries.items()
        }

    def to_exclude(self) -> dict[str, str]:
        """Return one line for each replica that is to be excluded now: why."""
        return {name: entry.cause for name, entry in self._entries.items() if entry.cause}

    def chosen(self, replicas: Iterable[str]) -> list[str]:
        """Return those of the replicas that a round includes: the `include` with the best scores, or all."""
        names, best = sorted(replicas), self._settings.include
        ranks = self._filled({name: score.final * score.uptime for name, score in self.scores().items()}, names)
        return sorted(sorted(names, key=lambda name: (-ranks[name], name))[:best])

    def weights(self, replicas: Iterable[str]) -> dict[str, float]:
        """Return the weight of each of the replicas in a round's mean; one of them at least has a weight above 0."""
        names = sorted(replicas)
        weights = self._filled({name: _final(entry) for name, entry in self._entries.items()}, names)
        return weights if any(weights.values()) else dict.fromkeys(names, 1.0)

    def forget(self, replica: str) -> None:
        """Forget a replica, whose slot has another holder now."""
        self._entries[replica] = _Entry()

    def to_json(self) -> str:
        """Return the whole state."""
        entries = {name: asdict(entry) for name, entry in self._entries.items()}
        return json.dumps({"round": self._round, "replicas": entries}, sort_keys=True)

    @classmethod
    def from_json(cls, settings: GauntletSettings, text: str) -> ScoreBook:
        """Return the book that `to_json` described."""
        found = json.loads(text)
        book = cls(settings, ())
        book._round = found["round"]
        for name, entry in found["replicas"].items():
            book._entries[name] = _Entry(**{**entry, "rating": Rating(*entry["rating"])})
        return book

    def _present(self, name: str, facts: RoundFacts) -> _Entry:
        entry = self._entries.get(name, _Entry())
        contributed = entry.contributed + (name in facts.included or name in facts.copies)
        synchronisation = facts.synchronisation.get(name, 1.0)
        if entry.cause and facts.round > entry.until:
            entry = replace(entry, cause="", average=0.0, evaluations=0)
        return replace(
            entry,
            present=entry.present + 1,
            contributed=contributed,
            last=facts.round,
            synchronisation=synchronisation,
        )

    def _evaluated(self, entry: _Entry, indicator: float, score: float) -> _Entry:
        alpha = self._settings.alpha
        return replace(
            entry,
            average=max(0.0, (1 - alpha) * entry.average + alpha * indicator),
            gain=(1 - alpha) * entry.gain + alpha * score,
            evaluations=entry.evaluations + 1,
            pending=score,
        )

    def _rate(self) -> None:
        """Rate a match once more than half of the rivals have a score."""
        rivals = [name for name, entry in self._entries.items() if entry.last > self._round - RECENT_ROUNDS]
        scores = {name: pending for name in rivals if (pending := self._entries[name].pending) is not None}
        if len(scores) < 2 or 2 * len(scores) <= len(rivals):
            return
        ratings = {name: self._entries[name].rating for name in scores}
        for name, rating in rated(ratings, scores).items():
            self._entries[name] = replace(self._entries[name], rating=rating, pending=None)

    def _exclude(self, facts: RoundFacts) -> None:
        until = facts.round + self._settings.excluded_rounds
        for name in sorted(facts.included | facts.missed):
            entry = self._entries[name]
            cause = self._cause(name, entry, facts)
            if cause and not entry.cause:
                self._entries[name] = replace(entry, cause=cause, until=until)

    def _cause(self, name: str, entry: _Entry, facts: RoundFacts) -> str:
        bound, grace = self._settings.threshold, self._settings.grace
        if name in facts.copies:
            return f"its contribution to round {facts.round} is a copy of that of {facts.copies[name]}"
        if entry.evaluations >= grace and entry.average < bound:
            return f"its assigned text improves too rarely: {entry.average:.2f} on average, expected at least {bound:g}"
        return ""

    def _filled(self, values: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        """Return the values of `names`; the median for those without an evaluation."""
        known = {name for name, entry in self._entries.items() if entry.evaluations}
        middle = median([values[name] for name in sorted(known)]) if known else 1.0
        return {name: values[name] if name in known else middle for name in names}


def _final(entry: _Entry) -> float:
    """Return the product of three factors, none of which is negative: two negative ones would give a good score."""
    return max(0.0, entry.rating.ordinal) * max(0.0, entry.average) * entry.synchronisation


def _judged(losses: Losses) -> tuple[float, float]:
    """Return the indicator and the score."""
    assigned = (losses.assigned_before - losses.assigned_after) / losses.assigned_before
    other = (losses.other_before - losses.other_after) / losses.other_before
    if not (math.isfinite(assigned) and math.isfinite(other)):
        return -1.0, -1.0
    return (1.0 if assigned > other else -1.0), other
