"""Verdicts on a table's claims, from paired seeds; and power laws of gaps over the width of the model.

A verdict is `holds`, `does not hold`, or `within noise`, with an interval; one seed decides none. A claim bounds one
quantity or several: a difference should be positive or, for equality, small. Each quantity's values at the seeds that
all rows share give a mean and an interval (Student's t). Rows of one seed share initial weights and data order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import numpy as np

from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.pseudo_gradient.volume import Volume
from hetero_pp.research.experiments.definition import (
    FORWARDS,
    KINDS,
    MEASUREMENTS,
    OF_OUTER_GRADIENTS,
    SEEDLESS,
    WAYS,
    Claim,
    Experiment,
    Trend,
)
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.simulator.charts import Sweep
from hetero_pp.simulator.prediction import predict

LEVEL = 0.05  # share of claims about noise that get a verdict by chance
FIRST_ROUNDS = 20  # Rounds over which cosines with the reference momentum are averaged: SparseLoCo, A.1.
_NO_SEED = 0
"""Seed of predictions, which have none: a claim about them has a verdict without an interval, and is in no family."""

Values = Mapping[str, Mapping[int, float]]  # final loss (or other measurement) by row and seed
Interval = tuple[float, float]
Hours = Mapping[str, Mapping[str, float]]
"""Predicted hours of all rounds by deployment and row. A clock without `at` has one deployment, whose name is empty."""
NO_HOURS: Hours = MappingProxyType({})


def known_values(outcomes: Outcomes) -> dict[str, Values]:
    """Return what is measured of each row and seed, by forward and measurement; seeds without it are left out."""
    return {
        of: {
            row: {seed: value for seed, one in seeds.items() if (value := _value(one, of)) is not None}
            for row, seeds in outcomes.items()
        }
        for of in (*FORWARDS, *MEASUREMENTS)
    }


def _value(outcome: Outcome, of: str) -> float | None:
    """Return one measurement of an outcome: a final loss, a mean over rounds, or a sum over all rounds."""
    if of in FORWARDS:
        if outcome["diverged"]:
            return None
        return outcome["validation_loss"][-1] if of == "own" else outcome[of]
    if of in ("bias", "similarity"):
        found = [one[1] for one in outcome.get(of) or ()]  # (round, value, ...)
        return fmean(found) if found else None
    if of in WAYS:  # megabytes that a replica sends over the run: the mean over measured rounds, for all rounds
        sizes = [ways_of(Volume(*one[1:]))[of] for one in outcome.get("volume") or ()]
        return len(outcome["validation_loss"]) * fmean(sizes) / 1e6 if sizes else None
    if of in OF_OUTER_GRADIENTS:
        place = 1 + OF_OUTER_GRADIENTS.index(of)
        rounds = FIRST_ROUNDS if "momentum" in of else math.inf
        measured = outcome.get("outer_gradients", ())
        found = [one[place] for one in measured if one[0] <= rounds and one[place] is not None]
        return fmean(found) if found else None
    told = outcome.get("attacks")
    if not told:
        return None
    caught = [round_ for name, round_ in told["excluded"].items() if name in told["hostile"]]
    value = {  # hostile.Told, in the units of the table's columns
        "caught": len(caught) if told["hostile"] else None,
        "until_caught": fmean(caught) if caught else None,
        "honest_out": len(told["excluded"]) - len(caught),
        "evaluation": told["evaluation_share"],
        "recomputation": told["recomputation_share"],
        "audit_megabytes": told["audit_bytes"] / 1e6,
        "backdoor": told["backdoor"],
    }.get(of)
    return None if value is None else float(value)


def ways_of(volume: Volume) -> dict[str, float]:
    """Return bytes by the collectives that claims can be about.

    A ring sums dense contributions and forwards sparse ones, as in the papers.
    """
    ring = volume.ring_all_gather if volume.ring_all_reduce is None else volume.ring_all_reduce
    return {"gather": volume.gather, "ring": ring, "sparse_ring": volume.sparse_ring}


def loss_at(losses: Sequence[float], share: float) -> float:
    """Return the loss after the last round that is complete once this share of a row's time has passed.

    If not even one is, returns the loss after the first.
    """
    return losses[max(1, min(len(losses), math.floor(share * len(losses) + 1e-9))) - 1]


def claim_results(experiment: Experiment, outcomes: Outcomes, hours: Hours = NO_HOURS) -> list[dict[str, Any]]:
    """Return the results of each claim, ready for JSON.

    Each result has the verdict in the claim's own forward and in the others. `p` and `family` are the verdict when the
    table's claims are judged as one family. `slices` is the interval over slices of the validation rows. `about` is
    equal for claims of different tables that state the same about the same rows.
    """
    at_the_end = known_values(outcomes)
    early = [_early_values(claim, outcomes, hours.get(claim.at, {})) for claim in experiment.claims]
    timed = {at: {row: {_NO_SEED: one} for row, one in rows.items()} for at, rows in hours.items()}
    known = [
        values or at_the_end | {"hours": timed.get(claim.at, {})}
        for claim, values in zip(experiment.claims, early, strict=True)
    ]
    shares = [shares_of(claim, experiment) for claim in experiment.claims]
    each = list(zip(experiment.claims, known, shares, strict=True))
    p_values = [p_value(claim, values[claim.of], share) for claim, values, share in each]
    results = []
    for (claim, values, share), p, level in zip(each, p_values, holm(p_values), strict=True):
        own, others = values[claim.of], []
        for forward in FORWARDS if claim.of in FORWARDS else ():
            theirs = values.get(forward, {})
            verdict = judge(claim, theirs, share)
            # another forward is omitted if its losses are the same
            if verdict.seeds and any(theirs.get(row) != own.get(row) for row in claim.rows()):
                others.append({"of": forward, **asdict(verdict)})
        judged = None if level is None else judge(claim, own, share, level)
        slices = _slices(outcomes, claim) if claim.by is None and claim.after == 1 else ()
        result = asdict(judge(claim, own, share)) | {"of": claim.of, "why": claim.why, "others": others, "p": p}
        result["family"] = None if judged is None else {"verdict": judged.verdict, "interval": judged.interval}
        result["slices"] = slices_interval(claim, slices, own, share)
        result["about"] = _about(claim, outcomes)
        result |= {"ours": experiment.is_ours(claim), "shown_by": claim.shown_by}
        result |= {} if claim.at_least is None else {"bound": claim.at_least[1]}
        results.append(result)
    return results


def shares_of(claim: Claim, experiment: Experiment) -> dict[str, float]:
    """Return by row what its value is proportional to: its share of compressed replicas, or 1 / sqrt(replicas)."""
    if claim.inverse_root is not None:
        return {row.name: 1 / math.sqrt(row.replicas) for row in experiment.rows if row.replicas is not None}
    return {row.name: row.compressed_share for row in experiment.rows}


def _early_values(claim: Claim, outcomes: Outcomes, hours: Mapping[str, float]) -> dict[str, Values]:
    """Return the losses for a claim about an earlier round, in the form of `known_values`; empty for other claims."""
    if claim.by is None and claim.after == 1:
        return {}
    early: dict[str, dict[int, float]] = {}
    for row, seeds in outcomes.items():
        runs = {seed: one["validation_loss"] for seed, one in seeds.items() if not one["diverged"]}
        if claim.by is None:  # after the first round at which this share of the rounds is complete
            share = claim.after
            early[row] = {seed: losses[math.ceil(share * len(losses) - 1e-9) - 1] for seed, losses in runs.items()}
        elif row in hours:  # after the last complete round at the time at which that row ends
            early[row] = {seed: loss_at(losses, hours[claim.by] / hours[row]) for seed, losses in runs.items()}
    return {"own": early}


def _slices(outcomes: Outcomes, claim: Claim) -> Sequence[Values]:
    """Return the losses on each slice in the claim's forward; rows trained before slices were recorded have none."""
    lists: dict[str, dict[int, list[float]]] = {row: {} for row in claim.rows()}
    for row, by_seed in lists.items():
        for seed, one in outcomes.get(row, {}).items():
            if losses := one.get("slices", {}).get(claim.of):
                by_seed[seed] = losses
    count = min((len(losses) for seeds in lists.values() for losses in seeds.values()), default=0)
    return [
        {row: {seed: losses[index] for seed, losses in seeds.items()} for row, seeds in lists.items()}
        for index in range(count)
    ]


def _about(claim: Claim, outcomes: Outcomes) -> str | None:
    """Return a hash of the statement and of the rows that it is about; None if a row was not trained."""
    keys = {row: sorted(one["key"] for one in outcomes.get(row, {}).values()) for row in claim.rows()}
    if not all(keys.values()):
        return None

    def with_keys(part: Any) -> Any:
        """Return the part of a claim with each row's name replaced by its keys."""
        if isinstance(part, dict):
            return {name: with_keys(one) for name, one in part.items()}
        if isinstance(part, float):
            return part
        return keys[part] if isinstance(part, str) else [with_keys(one) for one in part]

    parts = claim.model_dump(include=set(KINDS), exclude_none=True)
    margin = None if claim.lower or claim.grows or claim.at_least else claim.margin
    said = [claim.of, margin, with_keys(parts)] + ([claim.after] if claim.after < 1 else [])
    said += [] if claim.by is None else ["by", claim.by]
    said += ["at", claim.at] if claim.at else []
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim: `holds`, `does not hold`, `within noise`, `one seed`, or `not run`."""

    text: str
    verdict: str
    interval: Interval | None  # interval of the claim's difference, in nats for losses; None with fewer than two seeds
    seeds: int
    difference: float | None = None  # mean of the claim's difference over the seeds


def judge(claim: Claim, values: Values, shares: Mapping[str, float], level: float = LEVEL) -> Verdict:
    """Return the verdict on a claim; `not run` if one of its rows has no loss.

    `shares`: what the values of a claim of several rows are proportional to, by row (`shares_of`).
    """
    found = quantities(claim, values, shares)
    if not found:
        return Verdict(claim.text, "not run", None, 0)
    seeds = len(found[0])
    intervals = [interval_of(list(one.values()), level) for one in found]
    lowest, highest = _bounds(claim)
    if seeds == 1 and claim.of not in SEEDLESS:
        verdict = "one seed"
    elif all(lowest < low and high < highest for low, high in intervals):
        verdict = "holds"
    elif any(high < lowest or low > highest for low, high in intervals):
        verdict = "does not hold"
    else:
        verdict = "within noise"
    place = _decisive(claim, intervals)
    return Verdict(claim.text, verdict, intervals[place] if seeds > 1 else None, seeds, fmean(found[place].values()))


def p_value(claim: Claim, values: Values, shares: Mapping[str, float]) -> float | None:
    """Return the smallest level at which the claim has a verdict other than `within noise`.

    None with fewer than two seeds. A claim about several quantities holds at the largest of their levels. It fails at
    the smallest level of those beyond their bound.
    """
    from scipy.special import stdtr

    found = quantities(claim, values, shares)
    if not found or len(found[0]) < 2:
        return None
    lowest, highest = _bounds(claim)
    within: list[float] = []
    beyond: list[float] = []
    for one in found:
        mean, count = fmean(one.values()), len(one)
        slack = min(mean - lowest, highest - mean)
        # the two-sided probability that noise alone moves the mean that far
        error = stdev(one.values()) / math.sqrt(count)
        tail = float(slack == 0) if error == 0 else float(2 * stdtr(count - 1, -abs(slack) / error))
        (within if slack > 0 else beyond).append(tail)
    return min(beyond) if beyond else max(within)


def holm(values: Sequence[float | None], level: float = LEVEL) -> list[float | None]:
    """Return the level at which to judge each claim of a family. None stays None.

    The probability of any wrong verdict on noise in the whole family is then at most `level`. Source: Holm 1979. The
    smallest p-value of m is judged at level / m, the next at level / (m - 1), and so on. From the first claim that is
    within noise, all are judged at its level.
    """
    ordered = sorted((value, index) for index, value in enumerate(values) if value is not None)
    levels: list[float | None] = [None] * len(values)
    own, is_over = level, False
    for place, (value, index) in enumerate(ordered):
        if not is_over:
            own = level / (len(ordered) - place)
            is_over = value > own
        levels[index] = own
    return levels


def quantities(claim: Claim, values: Values, shares: Mapping[str, float]) -> list[dict[int, float]]:
    """Return the values that the claim bounds, by seed, at the seeds of all its rows; empty if there are none."""
    seeds = sorted(set.intersection(*(set(values.get(row, {})) for row in claim.rows())))
    if not seeds:
        return []

    def difference(first: str, second: str, share: float = 1.0) -> dict[int, float]:
        return {seed: values[second][seed] - share * values[first][seed] for seed in seeds}

    if (rows := claim.proportional or claim.inverse_root) is not None:
        base, *others = rows
        return [difference(base, row, shares[row] / shares[base]) for row in others]
    if claim.at_least is not None:
        row, bound = claim.at_least
        return [{seed: values[row][seed] - bound for seed in seeds}]
    if claim.grows is not None:
        gaps = [difference(*pair) for pair in claim.grows]
        return [{seed: other[seed] - one[seed] for seed in seeds} for one, other in pairwise(gaps)]
    pair = claim.lower or claim.equal or claim.at_most
    assert pair is not None
    return [difference(*pair)]


def slices_interval(
    claim: Claim, slices: Sequence[Values], values: Values, shares: Mapping[str, float]
) -> Interval | None:
    """Return the interval of the claim's decisive quantity over slices of the validation rows, for the same models.

    It shows the uncertainty due to the choice of validation rows. None without two slices of each row and seed.
    """
    found = quantities(claim, values, shares)
    parts = [quantities(claim, one, shares) for one in slices]
    if not found or len(parts) < 2 or any(len(part) != len(found) or set(part[0]) != set(found[0]) for part in parts):
        return None
    place = _decisive(claim, [interval_of(list(one.values())) for one in found])
    return interval_of([fmean(part[place].values()) for part in parts])


def _bounds(claim: Claim) -> Interval:
    if claim.at_most is not None:
        return -claim.margin, math.inf
    is_about_size = any(kind is not None for kind in (claim.equal, claim.proportional, claim.inverse_root))
    return (-claim.margin, claim.margin) if is_about_size else (0.0, math.inf)


def _decisive(claim: Claim, intervals: Sequence[Interval]) -> int:
    """Return the index of the interval that is nearest to a bound, or farthest beyond one."""
    lowest, highest = _bounds(claim)
    slack = [min(low - lowest, highest - high) for low, high in intervals]
    return slack.index(min(slack))


def interval_of(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the interval of the mean (95 % by default); one value is both ends."""
    if len(values) == 1:
        return values[0], values[0]
    from scipy.special import stdtrit

    # Rounded to three decimals as in printed tables of Student's t, because committed results were made with those.
    quantile = round(float(stdtrit(len(values) - 1, 1 - level / 2)), 3)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def deployments_of(experiment: Experiment) -> Sweep:
    """Return the deployments of an experiment's clock, without predicting them.

    Raises ConfigError for a file that is not a valid run, and for a row that names an unknown deployment.
    """
    if experiment.clock is None:
        return Sweep.of_rows({})
    path = experiment.beside(experiment.clock.run)
    known = ConfigFile(path).config.simulate.rows
    for number, row in enumerate(experiment.rows):
        if row.timed is not None and row.timed not in known:
            told = f"found `{row.timed}`, expected a row of `simulate.rows` in {path}: {', '.join(known)}"
            raise experiment.located(ConfigError(("rows", number, "timed"), told))
    return Sweep.of_rows(known)


def predicted_hours(experiment: Experiment) -> Hours:
    """Return the predicted hours of all rounds of each row that is `timed`, by deployment; empty without a clock.

    The deployment is the YAML of another run, such as the paper's model on its links. Its `simulate.rows` are named by
    the table's rows, so that a small model's losses are shown on a large model's clock. Raises ConfigError as
    `deployments_of` does.
    """
    clock = experiment.clock
    if clock is None:
        return {}
    rows, path, hours = deployments_of(experiment), experiment.beside(clock.run), dict[str, dict[str, float]]()
    for at, cells in (clock.at or {"": {}}).items():
        changes = Sweep.of_rows({"clock": clock.cells | cells}).overrides("clock")
        hours[at] = {
            row.name: 24 * predict(spec_of(ConfigFile(path, [*changes, *rows.overrides(row.timed)]))).days
            for row in experiment.rows
            if row.timed is not None
        }
    return hours


def hours_until(loss: float, outcomes: Mapping[int, Outcome], hours: float) -> float | None:
    """Return the predicted hours until the mean validation loss over a row's seeds is at most `loss`.

    `hours` are those of all rounds, which take equally long. Between two rounds the loss is interpolated. Returns None
    if no round reaches the loss.
    """
    curves = [one["validation_loss"] for one in outcomes.values() if not one["diverged"]]
    losses = np.mean(curves, axis=0) if curves else np.array([])
    reached = np.flatnonzero(losses <= loss)
    if not reached.size:
        return None
    after = int(reached[0])  # rounds that end above the loss
    before = losses[after - 1]
    rounds = after + (float((before - loss) / (before - losses[after])) if after else 1.0)
    return hours * rounds / len(losses)


class PowerLaw:
    """gap = factor * width ^ exponent, for gaps in percent of the baseline's loss, at paired seeds.

    The law is fitted to the logarithms by least squares over widths and seeds. Its intervals (95 %, Student's t) are of
    the mean and assume that the law keeps holding. Predictions far beyond the trained widths are extrapolations, not
    measurements.
    """

    def __init__(self, logs: Sequence[tuple[float, float]]) -> None:
        """Fit the law to the logarithms of widths and gaps."""
        from scipy.special import stdtrit

        self._widths, self._gaps = np.array(logs).T
        self._quantile = stdtrit(len(logs) - 2, 1 - LEVEL / 2)
        line = self._line(1.0)
        self.exponent = float(line.slope)
        self.exponent_interval = self._around(line.slope, line.stderr)

    def at(self, width: float) -> float:
        """Return the gap at a width."""
        return math.exp(self._line(width).intercept)

    def interval(self, width: float) -> Interval:
        """Return the interval of the mean gap at a width."""
        line = self._line(width)
        low, high = self._around(line.intercept, line.intercept_stderr)
        return math.exp(low), math.exp(high)

    def _line(self, width: float) -> Any:
        """Return the regression of the logarithms, with its intercept at a width."""
        from scipy.stats import linregress

        return linregress(self._widths - math.log(width), self._gaps)

    def _around(self, mean: float, error: float) -> Interval:
        return float(mean - self._quantile * error), float(mean + self._quantile * error)


def fit(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Fit the law to (width, gap) with a gap above zero; None with fewer than three of them, or at a single width."""
    logs = [(math.log(width), math.log(gap)) for width, gap in points if gap > 0]
    return PowerLaw(logs) if len(logs) > 2 and len({x for x, _ in logs}) > 1 else None


def trend_result(setting: Setting, trend: Trend, outcomes: Outcomes) -> dict[str, Any]:
    """Return a trend, ready for JSON: its points, its law, and the law's predictions at the paper's widths."""
    values = known_values(outcomes)[trend.of]
    rows = {row.name: row for row in setting.experiment.rows}
    points: list[dict[str, Any]] = []
    for name in trend.rows:
        own, base = values.get(name, {}), values.get(setting.experiment.baseline_of(rows[name]), {})
        gaps = {str(seed): 100 * (own[seed] / base[seed] - 1) for seed in sorted(own) if seed in base}
        if gaps:
            points.append({"row": name, "width": setting.width(rows[name]), "percent": gaps})
    flat = [(float(point["width"]), gap) for point in points for gap in point["percent"].values()]
    law, exponent, said = fit(flat), None, list[dict[str, Any]]()
    if law is not None:
        exponent = {"value": law.exponent, "interval": law.exponent_interval}
        for width in sorted({point["width"] for point in points} | set(trend.paper)):
            said.append({"width": width, "percent": law.at(width), "interval": law.interval(width)})
    result = {"name": trend.name, "of": trend.of, "points": points, "left_out": sum(gap <= 0 for _, gap in flat)}
    return result | {"exponent": exponent, "paper": trend.paper, "law": said}


def times_tokens(curve: Mapping[float, float], loss: float, tokens: float) -> tuple[str, float]:
    """Return how many times the tokens of a curve a row took to reach its loss, as `""` and a number.

    `curve` has losses by tokens, and is linear in the logarithm of tokens between two of them. It is not extrapolated:
    for a loss outside of it the number is a bound, after `> ` or `< `.
    """
    points = sorted(curve.items(), reverse=True)  # from the most tokens, which have the lowest loss
    bound = "> " if loss > points[-1][1] else "< " if loss < points[0][1] else ""
    logs = np.interp(loss, [one for _, one in points], [math.log(one) for one, _ in points])
    return bound, tokens / float(np.exp(logs))
