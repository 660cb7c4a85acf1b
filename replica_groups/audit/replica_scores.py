"""Scores of all replicas of a run, round after round (Gauntlet, arXiv:2505.21684), and what follows from them.

The paper filters by uptime, reliability and synchronisation in a first stage; here they are factors of the final score.
Ours are the indicator in standard errors, matches of more than half of the rivals, doubt, and exclusions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, median_high
from typing import NamedTuple

from hetero_pp.config.audit import FEWEST_REPLICAS, GauntletSettings
from hetero_pp.core.errors import ConfigError, DamagedFile
from hetero_pp.core.seeds import seed_of
from hetero_pp.messages.messages_pb2 import Losses, Score
from replica_groups.audit.gauntlet import why

RECENT_ROUNDS = 16  # rounds for which a replica that is away still counts as a rival
KNOWN_ROUNDS = 64  # rounds for which a score counts after a replica's last evaluation

PROBATION = 2.0
"""Moving average with which a replica returns, over the threshold. It stays if its first evaluations are good."""

CLEAR = 0.75
"""Least mean indicator of most replicas with which one below the bound is excluded.

In simulations of honest replicas with any noise, at most 0.13 % of them were then excluded within 300 evaluations."""


WORK, CLEAREST, MOST_DOUBT, RECENT_TRIALS = 1 / 3, 4.0, 12.0, 4
"""Doubt about a replica adds up log-likelihood ratios of its trials, at least 0 (CUSUM), and excludes it from 12 on.

A ratio is 0 at a third of the usual improvement of assigned text, and at most 4 in size: at least three trials decide.
Usual is the median of the others in the fragment's last four rounds. Beside six honest replicas, noise of the honest
size improved its text by at most .06 of that in 24 trials. Honest work improved it by at least .75 of that in 72."""

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


NEW = Rating()  # rating before the first match


@dataclass(frozen=True)
class RoundFacts:
    """Facts about a round, known without a trial of any contribution."""

    round: int
    included: frozenset[str]  # replicas whose contributions are in the round's mean
    missed: frozenset[str]  # replicas that took part and whose contributions did not arrive in time
    synchronisation: Mapping[str, float]
    """1 for a replica that started from the right parameters, 0 for another; 1 by default."""
    copies: Mapping[str, str]  # original by copy
    left_out: frozenset[str] = frozenset()  # replicas whose contributions arrived in time and are not in the mean
    texts: Mapping[str, int] = field(default_factory=dict)  # tokens that replicas trained on in the round
    against: Mapping[str, float] = field(default_factory=dict)
    """Agreement of contributions whose signs agree too little with those of the others."""
    shown: Mapping[str, bool] = field(default_factory=dict)
    """Whether the replicas that were drawn to show their text did so in time."""
    fragments: int = 1  # of the model; a round has one in turn


@dataclass(frozen=True)
class _ScoreEntry:
    """Known facts about one replica."""

    rating: Rating = NEW
    average: float = 0.0  # moving average of the indicator, at least 0
    gain: float = 0.0  # moving average of its score in matches
    usual: float = 0.0  # the same of the mean score of these matches
    matches: int = 0
    evaluations: int = 0
    trials: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Fragment -> improvement of its assigned text when it was last tried, and that round."""
    doubt: float = 0.0  # log-likelihood ratio for no work, over its last trials
    asked: int = 0
    shown: int = 0  # rounds in which it was drawn to show its text, and did so in time
    present: int = 0
    contributed: int = 0  # rounds in which it was present, and to which it contributed, without those of an exclusion
    counted: int = 0  # rounds whose mean has its contribution
    last: int = 0  # last round in which it was present
    evaluated: int = 0  # last round in which it was evaluated
    synchronisation: float = 1.0
    pending: float | None = None  # newest score since the last match
    text: int = 0  # tokens that it trained on in its last round
    until: int = 0  # last round of its exclusion
    cause: str = ""  # why it is excluded

    @property
    def final(self) -> float:
        """Product of factors, none of which is negative: two negative ones would make a good score."""
        work = max(0.0, self.rating.ordinal) * self.average
        return work * self.synchronisation * self.uptime * self.reliability

    @property
    def improvement(self) -> float:
        """Its improvement as a share of that of all in its matches."""
        return max(0.0, self.gain) / self.usual if self.usual > 0 else 1.0

    @property
    def uptime(self) -> float:
        return self.contributed / self.present if self.present else 1.0

    @property
    def reliability(self) -> float:
        return self.shown / self.asked if self.asked else 1.0


class ReplicaScores:
    """Scores by replica. Depends only on what `update` was told."""

    def __init__(self, settings: GauntletSettings, replicas: Iterable[str]) -> None:
        """Begin without scores. Raises ConfigError if the package for ratings is not installed."""
        require_openskill()
        self._settings = settings
        self._round = 0
        self._entries = {name: _ScoreEntry() for name in sorted(replicas)}

    def update(self, facts: RoundFacts, losses: Mapping[str, Losses]) -> None:
        """Take one round into account; rounds come in order. `losses` are those of the contributions that were tried.

        Losses of a replica that did not take part in the round are ignored.
        """
        self._round, key = facts.round, str(facts.round % facts.fragments)
        here = sorted(facts.included | facts.missed | facts.left_out | facts.copies.keys() | facts.against.keys())
        for name in here:
            entry = self._present(name, facts)
            if name in losses:
                entry = replace(entry, trials=entry.trials | {key: (_improvement(losses[name]), facts.round)})
            self._entries[name] = entry
        for name in here:
            entry = self._entries[name]
            if name in facts.copies or name in facts.against or entry.synchronisation == 0:
                entry = self._evaluated(entry, -1.0, 0.0)
            elif not facts.shown.get(name, True):
                entry = self._evaluated(replace(entry, doubt=entry.doubt + CLEAREST), -1.0, 0.0)
            elif name in losses:
                doubt = max(0.0, entry.doubt + self._doubt(name, losses[name].error, facts))
                entry = self._evaluated(replace(entry, doubt=doubt), *_judged(losses[name]))
            self._entries[name] = entry
        self._play()
        for name, entry in self._entries.items():
            if entry.cause and entry.until <= self._round:
                probation = PROBATION * self._settings.threshold
                self._entries[name] = replace(entry, cause="", average=probation, doubt=0.0)
        self._exclude(here, facts)

    def _doubt(self, name: str, error: float, facts: RoundFacts) -> float:
        """Return the log-likelihood ratio, for no work against usual work, of the contribution that was just tried.

        With less text than the others it may improve less, by the root. `error`: standard error of its improvement.
        Fragments improve text by different amounts, so it is compared with trials of the same one.
        """
        own, key = self._entries[name], str(facts.round % facts.fragments)
        since = max(0, facts.round - RECENT_TRIALS * facts.fragments)
        recent = [one for one in self._entries.values() if one is not own and one.trials.get(key, (0.0, 0))[1] > since]
        if len(recent) < FEWEST_REPLICAS - 1:
            return 0.0
        usual, text = median(one.trials[key][0] for one in recent), median(one.text for one in recent)
        usual *= min(1.0, math.sqrt(own.text / text)) if text else 1.0
        if not 0 < usual < math.inf:
            return 0.0
        ratio = (WORK * usual - own.trials[key][0]) * usual / max(error, 1e-9) ** 2
        return max(-CLEAREST, min(CLEAREST, ratio))

    def preferred(self) -> tuple[list[str], list[str]]:
        """Return the replicas that are to be tried first: those in doubt, the most doubtful first, and new ones."""
        doubtful = [name for name, one in self._entries.items() if one.doubt > CLEAREST / 2]
        new = [name for name, one in self._entries.items() if not one.evaluations]
        return sorted(doubtful, key=lambda name: -self._entries[name].doubt), new

    def scores(self) -> dict[str, Score]:
        """Return the scores of all replicas. The share is 0 for an excluded one, and for all if nobody has a score."""
        total = sum(entry.final for entry in self._entries.values() if not entry.cause)
        return {
            name: Score(
                replica=name,
                rating=entry.rating.ordinal,
                average=entry.average,
                synchronisation=entry.synchronisation,
                final=entry.final,
                evaluations=entry.evaluations,
                excluded=entry.cause,
                uptime=entry.uptime,
                reliability=entry.reliability,
                share=entry.final / total if total > 0 and not entry.cause else 0.0,
            )
            for name, entry in self._entries.items()
        }

    def to_exclude(self) -> dict[str, str]:
        """Return one line for each replica that is to be excluded now: why."""
        return {name: entry.cause for name, entry in self._entries.items() if entry.cause}

    def chosen(self, replicas: Iterable[str]) -> list[str]:
        """Return those of the replicas that a round includes: the `include` with the best scores, or all.

        The best are those with the highest final scores. A replica without a score is in the middle. Among equal ones,
        it takes those that the fewest rounds have included.
        """
        entries = {name: self._entries.get(name, _ScoreEntry()) for name in sorted(replicas)}
        values = self._filled({name: entry.final for name, entry in self._entries.items()}, entries)
        order = sorted(entries, key=lambda name: (-values[name], entries[name].counted, name))
        return sorted(order[: self._settings.include])

    def weights(self, replicas: Iterable[str]) -> dict[str, float]:
        """Return the weight of each of the replicas in a round's mean, of which the largest is 1.

        It is in proportion to the moving average of the indicator, and to the improvement instead of the rating. Two
        replicas that share one contribution can have the best ranks, but improve no more than it does. A replica
        without a score is in the middle.
        """
        names = sorted(replicas)
        entries = self._entries.items()
        values = {name: entry.improvement * entry.average * entry.synchronisation for name, entry in entries}
        weights = self._filled(values, names)
        largest = max(weights.values(), default=0.0)
        return {name: weight / largest if largest > 0 else 1.0 for name, weight in weights.items()}

    def forget(self, replica: str) -> None:
        """Forget a replica, whose slot has another holder now."""
        self._entries[replica] = _ScoreEntry()

    def to_json(self) -> str:
        entries = {name: asdict(entry) for name, entry in self._entries.items()}
        return json.dumps({"round": self._round, "replicas": entries}, sort_keys=True)

    @classmethod
    def from_json(cls, settings: GauntletSettings, text: str) -> ReplicaScores:
        """Return the book that `to_json` described. Raises DamagedFile."""
        book = cls(settings, ())
        try:
            found = json.loads(text)
            book._round = found["round"]
            for name, entry in found["replicas"].items():
                book._entries[name] = _ScoreEntry(**{**entry, "rating": Rating(*entry["rating"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFile(f"scores: found text that is no book of scores ({error})") from None
        return book

    def _present(self, name: str, facts: RoundFacts) -> _ScoreEntry:
        entry = self._entries.get(name, _ScoreEntry())
        if entry.cause:
            return replace(entry, last=facts.round)
        return replace(
            entry,
            present=entry.present + 1,
            contributed=entry.contributed + (name not in facts.missed),
            counted=entry.counted + (name in facts.included),
            last=facts.round,
            text=facts.texts.get(name, entry.text),
            asked=entry.asked + (name in facts.shown),
            shown=entry.shown + facts.shown.get(name, False),
            synchronisation=facts.synchronisation.get(name, 1.0),
        )

    def _evaluated(self, entry: _ScoreEntry, indicator: float, score: float) -> _ScoreEntry:
        alpha = self._settings.alpha
        return replace(
            entry,
            average=max(0.0, (1 - alpha) * entry.average + alpha * indicator),
            evaluations=entry.evaluations + 1,
            evaluated=self._round,
            pending=score,
        )

    def _play(self) -> None:
        """Rate a match between the replicas with a new score, once they are more than half of all rivals.

        In matches of a few, two replicas that meet only each other could raise the rating of one without limit. Equal
        scores are in an order that changes from match to match.
        """
        rivals = [name for name, entry in self._entries.items() if entry.last > self._round - RECENT_ROUNDS]
        scores = {name: score for name in rivals if (score := self._entries[name].pending) is not None}
        if len(scores) < 2 or 2 * len(scores) <= len(rivals):
            return
        order = sorted(scores, key=lambda name: (scores[name], seed_of("draw", self._round, name)))
        mean = fmean(scores[name] for name in order)
        for name, rating in rated({name: self._entries[name].rating for name in order}, order).items():
            entry = self._entries[name]
            newest = max(self._settings.alpha, 1 / (entry.matches + 1))
            self._entries[name] = replace(
                entry,
                rating=rating,
                gain=(1 - newest) * entry.gain + newest * scores[name],
                usual=(1 - newest) * entry.usual + newest * mean,
                matches=entry.matches + 1,
                pending=None,
            )

    def _exclude(self, here: Sequence[str], facts: RoundFacts) -> None:
        """Exclude copies, contributions against the others, replicas without work, and those with a low average.

        A low average excludes only if the text separates those that read as much or more. The more text a replica reads
        in a round, the less the drawn part of it improves more than other text.
        """
        bound, until = self._settings.threshold, facts.round + self._settings.excluded_rounds
        free = {name: entry for name in here if not (entry := self._entries[name]).cause}
        judged = {name: entry for name, entry in free.items() if entry.evaluations >= max(1, self._settings.grace)}
        below = [
            name
            for name, entry in judged.items()
            if entry.average < bound and self._separates([one for one in judged.values() if one.text >= entry.text])
        ]
        causes = {
            name: f"its assigned text improves too rarely: {judged[name].average:.2f}, expected at least {bound:g}"
            for name in below
        }
        for name, entry in free.items():
            if entry.doubt >= MOST_DOUBT:
                causes[name] = "its assigned text hardly improves, or it does not show its text"
        causes |= {name: why(facts.round, found) for name, found in facts.against.items()}
        for name, original in facts.copies.items():
            causes[name] = f"its contribution to round {facts.round} is a copy of that of {original}"
        for name in causes.keys() & free.keys():
            self._entries[name] = replace(free[name], cause=causes[name], until=until)

    def _separates(self, judged: Collection[_ScoreEntry]) -> bool:
        """Return whether the indicator is clear for most replicas: their text of a round may be too much to show it."""
        kept = 1 - self._settings.alpha
        return len(judged) > 0 and median_high(one.average / (1 - kept**one.evaluations) for one in judged) >= CLEAR

    def _filled(self, values: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
        """Return the values of `names`; for those without a score the mean of the others'.

        All are equal until more than half of them have one.
        """
        grace, since = max(1, self._settings.grace), self._round - KNOWN_ROUNDS
        entries = {name: entry for name, entry in self._entries.items() if name in names}
        known = {name for name, entry in entries.items() if entry.evaluations >= grace and entry.evaluated > since}
        if 2 * len(known) <= len(names):
            return dict.fromkeys(names, 1.0)
        middle = fmean(values[name] for name in sorted(known))
        return {name: values[name] if name in known else middle for name in names}


def _judged(losses: Losses) -> tuple[float, float]:
    """Return the indicator and the score of a contribution.

    The indicator is the difference between the improvements over its standard error, from -1 to 1. Gauntlet takes its
    sign, with which chance counts as much as a clear difference.
    """
    if min(losses.assigned_before, losses.other_before) <= 0:
        return -1.0, 0.0
    assigned = _improvement(losses)
    other = (losses.other_before - losses.other_after) / losses.other_before
    difference = assigned - other
    if not math.isfinite(difference) or not math.isfinite(losses.error):
        return -1.0, -1.0
    if difference == 0 or losses.error <= 0:
        return (1.0 if difference > 0 else -1.0), other
    return max(-1.0, min(1.0, difference / losses.error)), other


def _improvement(losses: Losses) -> float:
    before = losses.assigned_before
    return (before - losses.assigned_after) / before if before > 0 else 0.0


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
