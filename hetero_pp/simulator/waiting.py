"""Replicas that wait for a slower one: what each would do alone, and rounds of a given time, in which none waits.

All numbers are those of `predict`, for the run, for the run with one of its replicas, and for the run with rounds of a
given time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_pp.config.alike import alike, label_of
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import ROUND_TIMES, format_count, format_duration, format_percent
from hetero_pp.simulator.prediction import Prediction, predict

WORTH_TELLING = 0.1
"""Smallest share of a round that a replica has to wait for another, and smallest gain of rounds of a given time."""

MOST_COMPARED = 3  # most classes of replicas that are predicted alone, beside the slowest: those that wait the longest

_GOOD_ENOUGH = 0.97  # share of the tokens per second with long rounds that shorter rounds of a given time have to reach
_LONGEST_ROUND = 86400.0
_MOST_STEPS = 2000  # most steps of a replica in a round of a given time: the largest H in DiLoCo's paper


@dataclass(frozen=True)
class TimedRounds:
    """Rounds of a given time in place of a number of steps."""

    seconds: float
    rounds: int  # rounds in which the run trains about as many tokens as before
    warmup_rounds: float  # the same share of the run as before
    tokens_per_second: float
    steps: Mapping[str, float]  # steps of a round, by replica


@dataclass(frozen=True)
class ReplicaWaits:
    """Replicas that wait in each round."""

    slowest: str  # label of the replicas that the others wait for
    shares: Mapping[str, float]  # share of a round for which replicas wait, by their label; the longest first
    more: int  # number of other classes of replicas
    alone: Mapping[str, float]  # tokens per second of one replica without all others, by label
    together: float  # tokens per second of the run
    named: Sequence[str]  # the first replica of each label
    timed: TimedRounds | None
    """None if rounds of a given time would gain little, or if another setting needs a number of steps."""

    def told(self) -> Iterator[str]:
        """Yield a sentence on the replicas that wait, and one on rounds of a given time."""
        waits = [f"{label} ({format_percent(share)} of each round)" for label, share in self.shares.items()]
        waits += [format_count(self.more, "other class", "other classes")] if self.more else []
        verb = "waits" if len(waits) == 1 and " .. " not in waits[0] else "wait"
        each = " each" if any(" (" in label for label in self.alone) else ""
        alone = ", ".join(f"{label} {rate:,.0f}" for label, rate in self.alone.items())
        yield (
            f"{', '.join(waits)} {verb} for {self.slowest}: {self.together:,.0f} tokens per second. Alone, they would "
            f"train{each}: {alone}."
        )
        if self.timed is not None:
            steps = ", ".join(f"{name} {count:,.0f}" for name, count in self.timed.steps.items() if name in self.named)
            yield (
                f"Rounds of {format_duration(self.timed.seconds)} would give {self.timed.tokens_per_second:,.0f} "
                f"tokens per second (steps a round: {steps}): write `inner: {{seconds: "
                f"{format_duration(self.timed.seconds)}, warmup_rounds: {self.timed.warmup_rounds:g}}}` in place of "
                f"`steps` and `warmup_steps`, and `outer.rounds: {self.timed.rounds}` for as many tokens."
            )


def waiting(spec: RunSpec, prediction: Prediction) -> ReplicaWaits | None:
    """Return which replicas wait for a slower one; None if none waits for WORTH_TELLING of a round.

    Raises ConfigError as `predict` does.
    """
    if spec.config.inner.steps is None:
        return None
    found = {replica.name: replica for replica in prediction.replicas}
    inner = [(max(found[one.name].inner_seconds for one in same), same) for same in alike(spec)]
    inner.sort(key=lambda one: one[0])
    (longest, slowest), others = inner[-1], inner[:-1]
    shares = {label_of(same): (longest - seconds) / prediction.round_seconds for seconds, same in others}
    if not shares or max(shares.values()) < WORTH_TELLING:
        return None
    compared = [same for _, same in others[:MOST_COMPARED]] + [slowest]
    apart = {label_of(same): predict(RunSpec(alone(spec.config, same[0]), spec.shape.vocabulary)) for same in compared}
    shortest = min(one.round_seconds for one in apart.values())
    longest = _MOST_STEPS * min(one.step_seconds for one in apart.values())
    return ReplicaWaits(
        slowest=label_of(slowest),
        shares=dict(list(shares.items())[:MOST_COMPARED]),
        more=len(others[MOST_COMPARED:]),
        alone={label: one.tokens_per_second / one.replicas[0].count for label, one in apart.items()},
        together=prediction.tokens_per_second,
        named=[same[0].name for same in compared],
        timed=_timed(spec, prediction, shortest, min(longest, _LONGEST_ROUND)),
    )


def alone(config: RunConfig, replica: ReplicaSettings) -> RunConfig:
    """Return the configuration with only this replica, for predictions: without all that names others."""
    here, simulate = {replica.name, *replica.members, EXCHANGE}, config.simulate

    def at(sites: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: [one for one in site.members if one in here] for name, site in sites.items()}
        return {name: sites[name].model_copy(update={"members": own}) for name, own in kept.items() if own}

    own = {
        "fleets": {name: fleet for name, fleet in simulate.fleets.items() if name in here},
        "measured": {name: cost for name, cost in simulate.measured.items() if name in here},
        "sites": at(simulate.sites),
        "published": [],
    }
    return config.model_copy(
        update={"replicas": [replica], "sites": at(config.sites), "simulate": simulate.model_copy(update=own)}
    )


def _timed(spec: RunSpec, prediction: Prediction, shortest: float, longest: float) -> TimedRounds | None:
    """Return the shortest rounds of a given time whose tokens per second are close to those of long ones.

    They last `shortest` to `longest` seconds, and at most about as long as a round of the run. Short ones are better,
    because replicas then take fewer steps between two exchanges.
    """
    upper = next((one for one in ROUND_TIMES if one >= prediction.round_seconds), longest)
    lengths = [one for one in ROUND_TIMES if shortest <= one <= min(upper, longest)]
    found: dict[float, Prediction] = {}

    def predicted(seconds: float) -> float:
        config = with_rounds_of(spec.config, seconds)
        config.check()
        found[seconds] = predict(RunSpec(config, spec.shape.vocabulary))
        return found[seconds].tokens_per_second

    try:
        best = predicted(lengths[-1]) if lengths else 0.0
        if best < (1 + WORTH_TELLING) * prediction.tokens_per_second:
            return None
        seconds = next(one for one in lengths if predicted(one) >= _GOOD_ENOUGH * best)
    except ConfigError:  # another setting needs a number of steps, or steps take no time
        return None
    then, before = found[seconds], spec.latest.outer.rounds
    rounds = max(1, round(before * (prediction.tokens / prediction.rounds) / (then.tokens / then.rounds)))
    inner = spec.config.inner
    warmup = float(f"{(inner.warmup_steps or 0) / (inner.steps or 1) * rounds / before:.2g}")
    steps = {replica.name: replica.steps for replica in then.replicas}
    return TimedRounds(seconds, rounds, warmup, then.tokens_per_second, steps)


def with_rounds_of(config: RunConfig, seconds: float, rounds: int | None = None, warmup: float = 1.0) -> RunConfig:
    """Return the configuration with rounds of a given time."""
    inner = {"steps": None, "seconds": seconds, "warmup_steps": None, "warmup_rounds": warmup}
    outer = {} if rounds is None else {"rounds": rounds}
    return config.model_copy(
        update={"inner": config.inner.model_copy(update=inner), "outer": config.outer.model_copy(update=outer)}
    )
