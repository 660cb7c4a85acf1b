"""Result of an experiment at a scale: everything that is known of it, as JSON, and printed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.files import whole, write_whole
from hetero_pp.core.units import format_number
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.research.experiments.claims import (
    Values,
    claim_results,
    hours_until,
    known_values,
    predicted_hours,
    times_tokens,
    trend_result,
    ways_of,
)
from hetero_pp.research.experiments.corpus import Corpus, Supply, rounded
from hetero_pp.research.experiments.definition import MEASUREMENTS, Row
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes, Trained, trained_by
from hetero_pp.research.experiments.pages import difference_cell, markdown, number
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.rows import Setting, rate_of
from hetero_pp.research.settings import research_of
from hetero_pp.research.trainer.participation import replicas_in, sequences_in
from hetero_pp.simulator.traffic import expected_volume

PAPERS = {
    title: OuterSettings.model_validate({"rounds": 1, "method": method})
    for title, method in (("Het-PP", "het_pp"), ("SparseLoCo", "sparseloco"))
}
"""Outer settings of papers, by title."""

_LEAST_VALUES = 3  # fewest values of a setting for which a picture has a line


def result_of(
    setting: Setting,
    corpus: Corpus | None,
    outcomes: Outcomes,
    command: str = "",
    earlier: Sequence[Trained] = (),
    curve: tuple[RunConfig, Mapping[float, float]] | None = None,
) -> dict[str, Any]:
    """Return everything that is known of an experiment at a scale, ready for JSON.

    `command` makes its table. `earlier` is the previous table's record of where its rows were trained. `curve` has the
    scale's losses by tokens, and the run of one of its rows: only rows with its model and text are compared with it.
    """
    experiment, scale = setting.experiment, setting.scale
    values, hours = known_values(outcomes), predicted_hours(experiment)
    configs = [setting.config(row) for row in setting.representable()]
    of_corpus: dict[str, Any] | None = None
    if corpus is not None:
        supply = Supply(setting, corpus.source)
        of_corpus = {"name": corpus.data.corpus, "sha256": corpus.digest}
        of_corpus |= {} if corpus.tokenizer is None else {"tokenizer": corpus.data.tokenizer}
        of_corpus |= {"tokens": supply.training, "epochs": supply.epochs}
    result: dict[str, Any] = {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "note": experiment.note,
        "scale": scale.name,
        "facts": facts(configs, scale.vocabulary) if configs else "has no selected rows",
        "command": command,
        "corpus": of_corpus,
        "baseline": experiment.baseline,
        "rows": [
            _row_result(setting, row, outcomes.get(row.name, {}), values, curve)
            | ({"hours": hours[""][row.name]} if row.name in hours.get("", {}) else {})
            for row in experiment.rows
        ],
        "claims": claim_results(experiment, outcomes, hours),
        "trends": [trend_result(setting, trend, outcomes) for trend in experiment.trends],
        "trained": trained_by(outcomes, earlier),
    }
    if experiment.clock is not None and experiment.clock.at:
        result["clock"] = {
            "hours": hours,
            "until": [
                {
                    "loss": loss,
                    "hours": {
                        at: {row: hours_until(loss, outcomes.get(row, {}), one) for row, one in rows.items()}
                        for at, rows in hours.items()
                    },
                }
                for loss in experiment.clock.losses
            ],
        }
    if curve is not None and any("times_tokens" in row for row in result["rows"]):
        result["budgets"] = scale.budgets
    # axes of the picture, for rows that differ in steps between rounds or in one number
    steps = {row.name: setting.config(row).inner.steps for row in setting.representable()}
    if len(set(steps.values())) > 1:
        result["inner_steps"] = steps
    if varied := lines_of(setting, setting.representable()):
        result["varied"] = varied
    return result


def _row_result(
    setting: Setting,
    row: Row,
    outcomes: Mapping[int, Outcome],
    values: Mapping[str, Values],
    curve: tuple[RunConfig, Mapping[float, float]] | None,
) -> dict[str, Any]:
    losses = values["own"].get(row.name, {})
    result: dict[str, Any] = {"name": row.name, "paper": row.paper, "ours": None, "delta_percent": None}
    result["baseline"] = setting.experiment.baseline_of(row)
    result |= {"compressed_share": row.compressed_share, "k_over_d": _k_over_d(setting, row), "bits": row.bits}
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
    config = setting.config(row)
    replicas = len(config.replicas)
    if curve is not None and (config.model, config.data) == (curve[0].model, curve[0].data):
        result["times_tokens"] = times_tokens(curve[1], result["ours"]["mean"], first["tokens"])
    result |= {"bytes_per_token": first["boundary_bytes_per_token"], "tokens": first["tokens"], "replicas": replicas}
    if "contribution_bytes" in first:
        result["contribution_bytes"] = first["contribution_bytes"] / replicas
    if cpu := [one["cpu_seconds"] for one in outcomes.values() if "cpu_seconds" in one]:
        result["cpu_seconds"] = fmean(cpu)
    for forward in ("uncompressed", "compressed"):
        known = values[forward].get(row.name, {})
        result[forward] = fmean(known.values()) if known else None
        result[f"{forward}_seeds"] = {str(seed): known[seed] for seed in sorted(known)}
    for measured in MEASUREMENTS:
        if found := values[measured].get(row.name):
            result[measured] = _spread(found)
    if "gather" in result:  # the megabytes of each collective over the run, from the settings alone
        spec = RunSpec(setting.config(row), setting.scale.vocabulary)
        rounds = range(1, spec.config.rounds + 1)
        sent = [ways_of(expected_volume(spec, len(replicas_in(spec.config, round_)), round_)) for round_ in rounds]
        result["by_formula"] = {way: sum(one[way] for one in sent) / 1e6 for way in sent[0]}
    return result


def _spread(values: Mapping[int, float]) -> dict[str, Any]:
    ordered = {str(seed): values[seed] for seed in sorted(values)}
    spread = stdev(ordered.values()) if len(ordered) > 1 else None
    return {"mean": fmean(ordered.values()), "spread": spread, "seeds": ordered}


def _k_over_d(setting: Setting, row: Row) -> float | None:
    """Return the share of dimensions that crosses a compressed boundary, after rounding; None without one."""
    if row.rank == "full" or row.compressed_share == 0 or setting.not_representable(row) is not None:
        return None
    width = setting.width(row)
    return (max(1, round(row.rank * width)) if isinstance(row.rank, float) else row.rank) / width


def lines_of(setting: Setting, rows: Sequence[Row]) -> dict[str, list[list[tuple[str, float]]]]:
    """Return by setting the lines that rows form; the rows (name, value) of a line differ only in this setting.

    A setting is named by its dotted key; the rank by `k/d`. Rows with other numbers of steps between rounds also differ
    in rounds, so that they see as many tokens; that is no further difference. Other settings of single replicas form no
    lines.
    """
    values: dict[str, dict[str, Any]] = {}
    for row in rows:
        values[row.name] = dict(_flat(setting.config(row).model_dump(mode="json"), ""))
        values[row.name]["k/d"] = _k_over_d(setting, row)
    keys = dict.fromkeys(key for found in values.values() for key, value in found.items() if _is_number(value))
    lines: dict[str, list[list[tuple[str, float]]]] = {}
    for key in keys:
        if key.startswith(("replicas", "research.ablations")):
            continue
        follows = {key, "outer.rounds"} if key == "inner.steps" else {key}
        groups: dict[tuple[Any, ...], dict[float, str]] = defaultdict(dict)
        for name, found in values.items():
            if _is_number(found.get(key)):
                others = tuple(
                    (one, value)
                    for one, value in sorted(found.items())
                    if one not in follows and not (key == "k/d" and one.endswith("boundary.rank"))
                )
                groups[others].setdefault(found[key], name)
        of_key = [[(name, value) for value, name in sorted(group.items())] for group in groups.values()]
        if long := [line for line in of_key if len(line) >= _LEAST_VALUES]:
            lines[key] = long
    return lines


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by their dotted keys; each element of a list is a leaf."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{index}]")
    else:
        yield key, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def facts(configs: Sequence[RunConfig], vocabulary: int) -> str:
    """Return `0.34 M parameters, 819 k tokens, M = 4, H = 10, 40 outer rounds, density 1/32, not quantised`."""
    specs = [RunSpec(config, vocabulary) for config in configs]
    replicas = []
    for config in configs:
        counts = [count or len(config.replicas) for count in research_of(config).counts.values()]
        counts = counts or [len(config.replicas)]
        low, high = min(counts), max(counts)
        replicas.append(str(low) if low == high else f"{low} to {high}")
    sizes = [spec.parameter_count / 1e6 for spec in specs]
    parts = [
        f"{_joined([f'{format_number(size, 2)} M' if size < 10 else f'{size:.0f} M' for size in sizes])} parameters",
        f"{_joined([rounded(token_count(spec)) for spec in specs])} tokens",
        f"M = {_joined(replicas)}",
    ]
    with_rounds = [config for config in configs if config.outer.source == "difference"]
    if len(with_rounds) < len(specs):
        parts.append("gradients averaged every step" + (" in some rows" if with_rounds else ""))
    if with_rounds:
        outer = [config.outer for config in with_rounds]
        parts.append(f"H = {_joined([str(config.inner.steps) for config in with_rounds])}")
        parts.append(f"{_joined([str(one.rounds) for one in outer])} outer rounds")
        parts.append(f"density {_joined([_ratio(one.compression.density) for one in outer])}")
        differ = []
        for title, paper in PAPERS.items():
            theirs = paper.compression.density, _quantiser(paper.compression)
            ours = {
                (one.compression.density, _quantiser(one.compression)) for one in outer if one.method == paper.method
            }
            differ += [f"{title}'s paper: {_ratio(theirs[0])}, {theirs[1]}"] if ours - {theirs} else []
        told = f" ({'; '.join(differ)})" if differ else ""
        parts.append(_joined([_quantiser(one.compression) for one in outer]) + told)
    return ", ".join(parts)


def _joined(values: Sequence[str]) -> str:
    """Join the distinct values: `a`, `a or b`, `a, b or c`."""
    *most, last = dict.fromkeys(values)
    return f"{', '.join(most)} or {last}" if most else last


def token_count(spec: RunSpec) -> int:
    """Return the number of training tokens of all replicas together."""
    sequences = sequences_in(spec.config, spec.latest.rounds)
    return sequences * spec.config.data.sequence_length * spec.inner_steps


def _ratio(value: float) -> str:
    return str(Fraction(value).limit_denominator(10_000))


def _quantiser(compression: CompressionSettings) -> str:
    if compression.value_bits == 32:
        return "not quantised"
    return "signs" if compression.quantiser == "signs" else f"{compression.value_bits}-bit codes"


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
