"""Verdicts on a table's claims: in each forward, judged as one family, and on slices of the validation rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hetero_pp.outer.volume import Volume
from hetero_pp.research.experiments.clock import loss_at
from hetero_pp.research.experiments.definition import (
    FORWARDS,
    KINDS,
    OF_ATTACKS,
    OF_OUTER_GRADIENTS,
    WAYS,
    Claim,
    Experiment,
    Forward,
)
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes
from hetero_pp.research.experiments.verdict import Values, holm, judge, p_value, slices_interval

FIRST_ROUNDS = 20
"""Rounds over which cosines with the reference momentum are averaged: SparseLoCo, A.1."""

_NO_SEED = 0
"""Seed of predictions, which have none: a claim about them has a verdict without an interval, and is in no family."""


def claim_results(
    experiment: Experiment, outcomes: Outcomes, hours: Mapping[str, float] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Return the results of each claim, ready for JSON; `hours` are the predicted ones of rows (clock).

    Each result has the verdict in the claim's own forward and in the others. `p` and `family` are the verdict when the
    table's claims are judged as one family. `slices` is the interval over slices of the validation rows. `about` is
    equal for claims of different tables that state the same about the same rows.
    """
    at_the_end = known_values(outcomes)
    at_the_end["hours"] = {row: {_NO_SEED: one} for row, one in hours.items()}
    known = [_early_values(claim, outcomes, hours) or at_the_end for claim in experiment.claims]
    each = [
        (claim, values, shares_of(claim, experiment)) for claim, values in zip(experiment.claims, known, strict=True)
    ]
    found = [_in_each_forward(*one) for one in each]
    p_values = [p_value(claim, values[claim.of], shares) for claim, values, shares in each]
    for (claim, values, shares), result, p, level in zip(each, found, p_values, holm(p_values), strict=True):
        judged = None if level is None else judge(claim, values[claim.of], shares, level)
        result["p"] = p
        result["family"] = None if judged is None else {"verdict": judged.verdict, "interval": judged.interval}
        slices = _slices(outcomes, claim) if values is at_the_end else ()
        result["slices"] = slices_interval(claim, slices, values[claim.of], shares)
        result["about"] = _about(claim, outcomes)
        result |= {"ours": experiment.is_ours(claim), "shown_by": claim.shown_by}
        result |= {} if claim.at_least is None else {"bound": claim.at_least[1]}
    return found


def shares_of(claim: Claim, experiment: Experiment) -> dict[str, float]:
    """Return by row what its value is proportional to: its share of compressed replicas, or 1 / sqrt(replicas)."""
    if claim.inverse_root is not None:
        return {row.name: 1 / math.sqrt(row.replicas) for row in experiment.rows if row.replicas is not None}
    return {row.name: row.compressed_share for row in experiment.rows}


def known_values(outcomes: Outcomes) -> dict[str, Values]:
    """Return the last loss of each row and seed by forward, and the other measurements."""
    values: dict[str, Values] = {
        forward: {row: _losses(seeds, forward) for row, seeds in outcomes.items()} for forward in FORWARDS
    }
    for measured in ("bias", "similarity"):
        values[measured] = {row: _means(seeds, measured) for row, seeds in outcomes.items()}
    for way in WAYS:
        values[way] = {row: _megabytes(seeds, way) for row, seeds in outcomes.items()}
    for place, measured in enumerate(OF_OUTER_GRADIENTS, start=1):
        rounds = FIRST_ROUNDS if "momentum" in measured else math.inf
        values[measured] = {row: _of_outer_gradients(seeds, place, rounds) for row, seeds in outcomes.items()}
    for measured in OF_ATTACKS:
        values[measured] = {row: _of_attacks(seeds, measured) for row, seeds in outcomes.items()}
    return values


def _of_attacks(seeds: Mapping[int, Outcome], measured: str) -> dict[int, float]:
    """Return what rows with attacks tell by seed: hostile.Told, in the units of the table's columns."""
    found = {}
    for seed, told in ((seed, outcome.get("attacks")) for seed, outcome in seeds.items()):
        if not told:
            continue
        caught = [round_ for name, round_ in told["excluded"].items() if name in told["hostile"]]
        value = {
            "caught": len(caught) if told["hostile"] else None,
            "until_caught": fmean(caught) if caught else None,
            "honest_out": len(told["excluded"]) - len(caught),
            "evaluation": told["evaluation_share"],
            "recomputation": told["recomputation_share"],
            "audit_megabytes": told["audit_bytes"] / 1e6,
            "backdoor": told["backdoor"],
        }[measured]
        if value is not None:
            found[seed] = float(value)
    return found


def _early_values(claim: Claim, outcomes: Outcomes, hours: Mapping[str, float]) -> dict[str, Values]:
    """Return the values for a claim about an earlier round, in the form of `known_values`; empty for other claims."""
    if claim.by is not None:
        until = hours[claim.by]
        rows = {row: seeds for row, seeds in outcomes.items() if row in hours}
        return {"own": {row: _losses_at(seeds, until / hours[row]) for row, seeds in rows.items()}}
    if claim.after < 1:
        return {"own": {row: _losses_after(seeds, claim.after) for row, seeds in outcomes.items()}}
    return {}


def _losses_after(seeds: Mapping[int, Outcome], share: float) -> dict[int, float]:
    """Return the loss by seed after the first round at which this share of the rounds is complete."""
    return {seed: losses[math.ceil(share * len(losses) - 1e-9) - 1] for seed, losses in _losses_by_round(seeds).items()}


def _losses_at(seeds: Mapping[int, Outcome], share: float) -> dict[int, float]:
    """Return the loss by seed after the last complete round at this share of the row's time."""
    return {seed: loss_at(losses, share) for seed, losses in _losses_by_round(seeds).items()}


def _losses_by_round(seeds: Mapping[int, Outcome]) -> dict[int, list[float]]:
    return {seed: one["validation_loss"] for seed, one in seeds.items() if not one["diverged"]}


def _losses(seeds: Mapping[int, Outcome], forward: Forward) -> dict[int, float]:
    """Return the synced model's final loss by seed, for the seeds that have one."""
    known = {seed: one for seed, one in seeds.items() if not one["diverged"]}
    found = {seed: one["validation_loss"][-1] if forward == "own" else one[forward] for seed, one in known.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _means(seeds: Mapping[int, Outcome], measured: str) -> dict[int, float]:
    """Return the mean by seed over the rounds with a measurement; an entry is (round, value, ...)."""
    return {
        seed: fmean(one[1] for one in outcome[measured]) for seed, outcome in seeds.items() if outcome.get(measured)
    }


def _of_outer_gradients(seeds: Mapping[int, Outcome], place: int, rounds: float) -> dict[int, float]:
    """Return the mean by seed of one value of OuterGradient over the measured ones of the first `rounds` rounds."""
    known = {
        seed: [one[place] for one in outcome.get("outer_gradients", ()) if one[0] <= rounds and one[place] is not None]
        for seed, outcome in seeds.items()
    }
    return {seed: fmean(values) for seed, values in known.items() if values}


def _megabytes(seeds: Mapping[int, Outcome], way: str) -> dict[int, float]:
    """Return the megabytes that a replica sends over the run, by measured seed.

    Extrapolates the mean over the measured rounds to all rounds.
    """
    return {
        seed: len(outcome["validation_loss"]) * fmean(ways_of(Volume(*one[1:]))[way] for one in outcome["volume"]) / 1e6
        for seed, outcome in seeds.items()
        if outcome.get("volume")
    }


def ways_of(volume: Volume) -> dict[str, float]:
    """Return bytes by the collectives that claims can be about.

    A ring sums dense contributions and forwards sparse ones, as in the papers.
    """
    ring = volume.ring_all_gather if volume.ring_all_reduce is None else volume.ring_all_reduce
    return {"gather": volume.gather, "ring": ring, "sparse_ring": volume.sparse_ring}


def _in_each_forward(claim: Claim, values: Mapping[str, Values], shares: Mapping[str, float]) -> dict[str, Any]:
    """Return the verdict in the claim's forward, and in each other forward where all its rows have a loss.

    Another forward is omitted if its losses are the same.
    """
    others, own = [], values[claim.of]
    for forward in FORWARDS if claim.of in FORWARDS else ():
        theirs = values.get(forward, {})
        verdict = judge(claim, theirs, shares)
        if verdict.seeds and any(theirs.get(row) != own.get(row) for row in claim.rows()):
            others.append({"of": forward, **asdict(verdict)})
    return asdict(judge(claim, own, shares)) | {"of": claim.of, "why": claim.why, "others": others}


def _slices(outcomes: Outcomes, claim: Claim) -> Sequence[Values]:
    """Return the losses on each slice in the claim's forward; rows trained before slices were recorded have none."""
    lists = {row: _lists(outcomes.get(row, {}), claim.of) for row in claim.rows()}
    count = min((len(losses) for seeds in lists.values() for losses in seeds.values()), default=0)
    return [
        {row: {seed: losses[index] for seed, losses in seeds.items()} for row, seeds in lists.items()}
        for index in range(count)
    ]


def _lists(seeds: Mapping[int, Outcome], forward: str) -> dict[int, list[float]]:
    known = {seed: one.get("slices", {}).get(forward) for seed, one in seeds.items()}
    return {seed: losses for seed, losses in known.items() if losses}


def _about(claim: Claim, outcomes: Outcomes) -> str | None:
    """Return a hash of the statement and of the rows that it is about; None if a row was not trained."""
    keys = {row: sorted(one["key"] for one in outcomes.get(row, {}).values()) for row in claim.rows()}
    if not all(keys.values()):
        return None
    parts = claim.model_dump(include=set(KINDS), exclude_none=True)
    margin = None if claim.lower or claim.grows or claim.at_least else claim.margin
    said = [claim.of, margin, _with_keys(parts, keys)] + ([claim.after] if claim.after < 1 else [])
    said += [] if claim.by is None else ["by", claim.by]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]


def _with_keys(part: Any, keys: Mapping[str, Sequence[str]]) -> Any:
    """Return the part of a claim with each row's name replaced by its keys."""
    if isinstance(part, dict):
        return {name: _with_keys(one, keys) for name, one in part.items()}
    if isinstance(part, float):
        return part
    return keys[part] if isinstance(part, str) else [_with_keys(one, keys) for one in part]
