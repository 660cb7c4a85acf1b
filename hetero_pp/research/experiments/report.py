"""Result of an experiment at a scale: written as JSON, table and picture, and printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

from rich.console import Console

from hetero_pp.core.files import whole, write_whole
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.research.experiments.claims import claim_results, known_values, ways_of
from hetero_pp.research.experiments.clock import predicted_hours
from hetero_pp.research.experiments.corpus import Corpus
from hetero_pp.research.experiments.definition import Measurement, Row, SweptRow
from hetero_pp.research.experiments.facts import facts
from hetero_pp.research.experiments.markdown import difference_cell, markdown, number
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.provenance import Trained, trained_by
from hetero_pp.research.experiments.rates import rate_of
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.supply import counted
from hetero_pp.research.experiments.trends import trend_results
from hetero_pp.research.experiments.varied import lines_of
from hetero_pp.research.experiments.verdict import Values
from hetero_pp.research.trainer.participation import replicas_in
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.traffic import expected_volume


def result_of(
    setting: Setting, corpus: Corpus | None, outcomes: Outcomes, command: str = "", earlier: Sequence[Trained] = ()
) -> dict[str, Any]:
    """Return everything that is known of an experiment at a scale, ready for JSON.

    `command` makes its table. `earlier` is the previous table's record of where its rows were trained.
    """
    experiment, scale = setting.experiment, setting.scale
    values, hours = known_values(outcomes), predicted_hours(experiment)
    configs = [setting.config(row) for row in setting.representable()]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "note": experiment.note,
        "scale": scale.name,
        "facts": facts(configs, scale.vocabulary) if configs else "has no selected rows",
        "command": command,
        "corpus": None if corpus is None else _corpus_result(setting, corpus),
        "baseline": experiment.baseline,
        "rows": [
            _row_result(setting, row, outcomes.get(row.name, {}), values)
            | ({"hours": hours[row.name]} if row.name in hours else {})
            for row in experiment.rows
        ],
        "claims": claim_results(experiment, outcomes, hours),
        "trends": trend_results(setting, outcomes),
        "trained": trained_by(outcomes, earlier),
        **_axes(setting),
    }


def _axes(setting: Setting) -> dict[str, Any]:
    """Return the picture's axes for rows that differ in steps between rounds or in one numeric setting; else empty."""
    rows = setting.representable()
    steps = {row.name: setting.config(row).inner.steps for row in rows}
    varied = lines_of(setting, rows)
    return ({"inner_steps": steps} if len(set(steps.values())) > 1 else {}) | ({"varied": varied} if varied else {})


def _corpus_result(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    supply = counted(setting, corpus)
    named = {} if corpus.tokenizer is None else {"tokenizer": corpus.data.tokenizer}
    known = {"tokens": supply.training, "epochs": supply.epochs}
    return {"name": corpus.data.corpus, "sha256": corpus.digest, **named, **known}


def _row_result(
    setting: Setting, row: Row, outcomes: Mapping[int, Outcome], values: Mapping[str, Values]
) -> dict[str, Any]:
    losses = values["own"].get(row.name, {})
    result: dict[str, Any] = {"name": row.name, "paper": row.paper, "ours": None, "delta_percent": None}
    if isinstance(row, SweptRow):
        result |= {"of": row.of, "swept": row.swept}
    result["baseline"] = setting.experiment.baseline_of(row)
    result |= {"compressed_share": row.compressed_share, "k_over_d": _k_over_d(setting, row), "bits": row.bits}
    result["but_for_rank"] = _but_for_rank(setting, row)
    result["state"] = setting.why_not(row) or ("done" if outcomes else "not run")
    if diverged := sorted(seed for seed, one in outcomes.items() if one["diverged"]):
        last = {seed: (outcomes[seed]["validation_loss"] or [None])[-1] for seed in diverged}
        result["state"] = f"diverged (seed: last finite loss {last})"
    if setting.not_representable(row) is None:
        result["rate"] = rate_of(setting.config(row))
    if not losses:
        return result
    result["ours"] = _spread(losses)
    baseline = values["own"].get(result["baseline"], {})
    paired = [100 * (losses[seed] / baseline[seed] - 1) for seed in losses if seed in baseline]
    result["delta_percent"] = fmean(paired) if paired else None
    first = outcomes[min(outcomes)]
    replicas = len(setting.config(row).replicas)
    result |= {"bytes_per_token": first["boundary_bytes_per_token"], "tokens": first["tokens"], "replicas": replicas}
    if "contribution_bytes" in first:
        result["contribution_bytes"] = first["contribution_bytes"] / replicas
    if cpu := [one["cpu_seconds"] for one in outcomes.values() if "cpu_seconds" in one]:
        result["cpu_seconds"] = fmean(cpu)
    for forward in ("uncompressed", "compressed"):
        known = values[forward].get(row.name, {})
        result[forward] = fmean(known.values()) if known else None
        result[f"{forward}_seeds"] = {str(seed): known[seed] for seed in sorted(known)}
    for measured in get_args(Measurement):
        if found := values.get(measured, {}).get(row.name, {}):
            result[measured] = _spread(found)
    if "gather" in result:
        result["by_formula"] = _volume_by_formula(setting, row)
    return result


def _volume_by_formula(setting: Setting, row: Row) -> dict[str, float]:
    """Return the megabytes that a replica sends over the run with each collective, from the settings alone."""
    spec = RunSpec(setting.config(row), setting.scale.vocabulary)
    rounds = range(1, spec.config.outer.rounds + 1)
    sent = [ways_of(expected_volume(spec, len(replicas_in(spec.config, round_)))) for round_ in rounds]
    return {way: sum(one[way] for one in sent) / 1e6 for way in sent[0]}


def _spread(values: Mapping[int, float]) -> dict[str, Any]:
    """Return mean, standard deviation, and the value of each seed."""
    ordered = {str(seed): values[seed] for seed in sorted(values)}
    return {
        "mean": fmean(ordered.values()),
        "spread": stdev(ordered.values()) if len(ordered) > 1 else None,
        "seeds": ordered,
    }


def _k_over_d(setting: Setting, row: Row) -> float | None:
    """Return the share of dimensions that crosses a compressed boundary, after rounding; None without one."""
    if row.rank == "full" or row.compressed_share == 0 or setting.not_representable(row) is not None:
        return None
    width = setting.config(row).model.resolve(setting.scale.vocabulary).width
    return (max(1, round(row.rank * width)) if isinstance(row.rank, float) else row.rank) / width


def _but_for_rank(setting: Setting, row: Row) -> int | None:
    """Return the number of the first row that differs only in the rank; None without a compressed boundary."""

    def others(one: Row) -> Any:
        return setting.meaning(one.model_copy(update={"rank": 1}))

    if _k_over_d(setting, row) is None:
        return None
    numbered = ((number, one) for number, one in enumerate(setting.experiment.rows) if _k_over_d(setting, one))
    return next(number for number, one in numbered if others(one) == others(row))


def write_result(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Write the JSON to `path`, and .md and .png beside it."""
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
    picture = path.with_suffix(".png").name if any(outcomes.values()) else None
    write_whole(path.with_suffix(".md"), ("\n".join(markdown(result, picture)) + "\n").encode())
    if picture is not None:
        with whole(path.with_suffix(".png")) as part:
            draw(result, outcomes, part)


def print_result(console: Console, result: Mapping[str, Any], path: Path) -> None:
    where = "; ".join(part for part in (result["paper"], f"scale {result['scale']}") if part)
    say(console, f"{result['name']}: {result['title']} ({where})", bold=result["name"])
    say(console, result["facts"], style="dim", indent="  ")
    papers = ["paper"] if any(row["paper"] is not None for row in result["rows"]) else []
    table = PlainTable(["row"], [*papers, "ours", "spread", "seeds", "to baseline"], ["state"])
    for row in result["rows"]:
        ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
        numbers = [number(row["paper"], 3)] if papers else []
        numbers += [number(ours["mean"], 3), number(ours["spread"], 3), str(len(ours["seeds"]))]
        difference = "" if row["delta_percent"] is None else f"{row['delta_percent']:+.1f} %"
        table.add_row(row["name"], *numbers, difference, row["state"])
    console.print(table)
    for claim in result["claims"]:
        found = difference_cell(claim)
        say(console, f"{claim['verdict']}: {claim['text']}" + (f" ({found})" if found else ""), indent="  ")
    say(console, f"written to {path}", style="dim", indent="  ")
