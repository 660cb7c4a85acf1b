"""An experiment's result as JSON, as a markdown table and as pictures; and docs/results.md from all of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hetero_pp.program.experiments.definition import Experiment, Row, Scale
from hetero_pp.program.experiments.rows import Outcome, why_not
from hetero_pp.program.experiments.verdict import judge

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""row -> seed -> outcome"""


def result_of(experiment: Experiment, scale: Scale, outcomes: Outcomes) -> dict[str, Any]:
    """Everything that is known of an experiment at a scale, ready for JSON."""
    losses = {
        row: {seed: one["validation_loss"][-1] for seed, one in seeds.items() if not one["diverged"]}
        for row, seeds in outcomes.items()
    }
    baseline = losses.get(experiment.baseline, {})
    rows = [
        _row_result(row, scale, outcomes.get(row.name, {}), losses.get(row.name, {}), baseline)
        for row in experiment.rows
    ]
    claims = [asdict(judge(claim, losses)) | ({"why": claim.why} if claim.why else {}) for claim in experiment.claims]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "note": experiment.note,
        "scale": scale.name,
        "about": scale.about,
        "baseline": experiment.baseline,
        "rows": rows,
        "claims": claims,
        "machine": machine(),
        "commit": commit(),
    }


def _row_result(
    row: Row, scale: Scale, outcomes: Mapping[int, Outcome], losses: Mapping[int, float], baseline: Mapping[int, float]
) -> dict[str, Any]:
    result: dict[str, Any] = {"name": row.name, "paper": row.paper, "ours": None, "delta_percent": None}
    reason = why_not(scale, row)
    diverged = sorted(seed for seed, one in outcomes.items() if one["diverged"])
    result["state"] = reason or ("done" if outcomes else "not run")
    if diverged:
        last = {seed: (outcomes[seed]["validation_loss"] or [None])[-1] for seed in diverged}
        result["state"] = f"diverged (seed: last finite loss {last})"
    if not losses:
        return result
    values = [losses[seed] for seed in sorted(losses)]
    result["ours"] = {
        "mean": fmean(values),
        "spread": stdev(values) if len(values) > 1 else None,
        "seeds": {str(seed): losses[seed] for seed in sorted(losses)},
    }
    paired = [100 * (losses[seed] / baseline[seed] - 1) for seed in losses if seed in baseline]
    result["delta_percent"] = fmean(paired) if paired else None
    first = outcomes[min(outcomes)]
    result["bytes_per_token"] = first["boundary_bytes_per_token"]
    result["tokens"] = first["tokens"]
    for forward in ("uncompressed", "compressed"):
        known = [outcomes[seed][forward] for seed in losses if outcomes[seed][forward] is not None]
        result[forward] = fmean(known) if known else None
    return result


def write_result(result: Mapping[str, Any], outcomes: Outcomes, folder: Path) -> Path:
    """Write <folder>/<scale>/<name>.json, .md and .png; returns the JSON's path."""
    path = folder / result["scale"] / f"{result['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(markdown(result)) + "\n")
    if any(outcomes.values()):
        _draw(result, outcomes, path.with_suffix(".png"))
    return path


def markdown(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of an experiment and the verdicts on its claims."""
    yield f"### {result['name']}: {result['title']}"
    yield ""
    yield f"{result['paper']}. Scale `{result['scale']}`: {result['about']}."
    if result["note"]:
        yield f"{result['note']}"
    yield ""
    yield "| row | paper | paper, % | ours | spread | seeds | ours, % | bytes/token | state |"
    yield "|---|---|---|---|---|---|---|---|---|"
    base = next((row["paper"] for row in result["rows"] if row["name"] == result["baseline"]), None)
    for row in result["rows"]:
        ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
        theirs = None if row["paper"] is None or base is None else 100 * (row["paper"] / base - 1)
        cells = [row["name"], _number(row["paper"], 3), _signed(theirs), _number(ours["mean"], 3)]
        cells += [_number(ours["spread"], 3), str(len(ours["seeds"])), _signed(row["delta_percent"])]
        cells += [_number(row.get("bytes_per_token"), 1), row["state"]]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield "| claim | verdict | 95 % interval, nats | seeds |"
    yield "|---|---|---|---|"
    for claim in result["claims"]:
        interval = "" if claim["interval"] is None else "{:+.3f} to {:+.3f}".format(*claim["interval"])
        yield f"| {claim['text']} | **{claim['verdict']}** | {interval} | {claim['seeds']} |"
    for claim in result["claims"]:
        if claim.get("why"):
            yield ""
            yield f"{claim['text']}: {claim['why']}"


def write_overview(folder: Path, path: Path) -> None:
    """docs/results.md: every table of every scale, generated from the committed results."""
    results = [
        json.loads(found.read_text()) for found in sorted(folder.glob("*/*/*.json")) if found.parent.name != "rows"
    ]
    lines = [
        "# Results",
        "",
        "Generated by `hetero-pp reproduce` from `benchmarks/results/`; not written by hand. Losses are validation "
        "losses of the synced model in nats, each replica in its own forward, averaged. A percentage is the difference "
        "to the baseline row, paired by seed. A verdict needs the 95 % interval over paired seeds to exclude zero; "
        "with one seed, differences below 0.03 nats decide nothing.",
        "",
        "| experiment | scale | holds | does not hold | within noise | not run |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        verdicts = [claim["verdict"] for claim in result["claims"]]
        counts = [verdicts.count(kind) for kind in ("holds", "does not hold", "within noise", "not run")]
        lines.append(f"| {result['name']} | {result['scale']} | " + " | ".join(map(str, counts)) + " |")
    for result in results:
        lines += ["", *markdown(result)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _draw(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Loss curves (first seed of each row), and final loss against bytes per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    curves, against_bytes = figure.subplots(1, 2)
    for number, row in enumerate(result["rows"]):
        seeds = outcomes.get(row["name"], {})
        if not seeds:
            continue
        color, losses = f"C{number % 10}", seeds[min(seeds)]["validation_loss"]
        style = ["-", "--", ":"][number // 10 % 3]
        curves.plot(range(1, len(losses) + 1), losses, style, color=color, label=row["name"])
        if row["ours"] is not None:
            size = max(row["bytes_per_token"], 1.0)
            against_bytes.errorbar(size, row["ours"]["mean"], row["ours"]["spread"] or 0.0, fmt="o", color=color)
            against_bytes.annotate(row["name"], (size, row["ours"]["mean"]), (6, 3), textcoords="offset points", size=8)
    curves.set(title=f"{result['name']}, {result['scale']}", xlabel="outer round", ylabel="validation loss, nats")
    curves.legend(fontsize=8)
    against_bytes.set(xlabel="bytes a token, hop and direction (1: none)", ylabel="final loss, nats", xscale="log")
    for axes in (curves, against_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def machine() -> dict[str, Any]:
    """What this ran on."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The code's commit, if this is a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}"


def rows_to_run(experiment: Experiment, scale: Scale) -> Sequence[Row]:
    """The rows that can be trained at a scale."""
    return [row for row in experiment.rows if why_not(scale, row) is None]
