"""An experiment's result as JSON, as a markdown table and on the screen; and docs/results.md from all of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from hetero_pp.files import whole, write_whole
from hetero_pp.program.experiments.corpus import Corpus
from hetero_pp.program.experiments.definition import Row
from hetero_pp.program.experiments.outcomes import Outcome
from hetero_pp.program.experiments.plots import draw
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.program.experiments.verdict import Values, judge
from hetero_pp.program.report.display import plain_table

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""row -> seed -> outcome"""


def result_of(setting: Setting, corpus: Corpus | None, outcomes: Outcomes) -> dict[str, Any]:
    """Everything that is known of an experiment at a scale, ready for JSON."""
    experiment, scale = setting.experiment, setting.scale
    losses = {
        row: {seed: one["validation_loss"][-1] for seed, one in seeds.items() if not one["diverged"]}
        for row, seeds in outcomes.items()
    }
    values = {"loss": losses, "bias": {row: _biases(seeds) for row, seeds in outcomes.items()}}
    claims = [
        asdict(judge(claim, values[claim.of])) | {"of": claim.of, "why": claim.why} for claim in experiment.claims
    ]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "note": experiment.note,
        "scale": scale.name,
        "about": scale.about,
        "corpus": None if corpus is None else _corpus_result(setting, corpus),
        "baseline": experiment.baseline,
        "rows": [_row_result(setting, row, outcomes.get(row.name, {}), values) for row in experiment.rows],
        "claims": claims,
        "machine": machine(),
        "commit": commit(),
    }


def _biases(seeds: Mapping[int, Outcome]) -> dict[int, float]:
    """The mean over the measured rounds, by seed."""
    return {seed: fmean(share for _, share in one["bias"]) for seed, one in seeds.items() if one.get("bias")}


def _corpus_result(setting: Setting, corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.data.corpus,
        "sha256": corpus.store.digest,
        "tokens": len(corpus.store.train),
        "epochs": max(corpus.epochs(setting.config(row)) for row in setting.rows()),
    }


def _row_result(
    setting: Setting, row: Row, outcomes: Mapping[int, Outcome], values: Mapping[str, Values]
) -> dict[str, Any]:
    losses = values["loss"].get(row.name, {})
    result: dict[str, Any] = {"name": row.name, "paper": row.paper, "ours": None, "delta_percent": None}
    result |= {"compressed_share": row.compressed_share, "k_over_d": _k_over_d(setting, row), "bits": row.bits}
    result["state"] = setting.why_not(row) or ("done" if outcomes else "not run")
    if diverged := sorted(seed for seed, one in outcomes.items() if one["diverged"]):
        last = {seed: (outcomes[seed]["validation_loss"] or [None])[-1] for seed in diverged}
        result["state"] = f"diverged (seed: last finite loss {last})"
    if not losses:
        return result
    result["ours"] = _spread(losses)
    baseline = values["loss"].get(setting.experiment.baseline, {})
    paired = [100 * (losses[seed] / baseline[seed] - 1) for seed in losses if seed in baseline]
    result["delta_percent"] = fmean(paired) if paired else None
    first = outcomes[min(outcomes)]
    result |= {"bytes_per_token": first["boundary_bytes_per_token"], "tokens": first["tokens"]}
    for forward in ("uncompressed", "compressed"):
        known = [outcomes[seed][forward] for seed in losses if outcomes[seed][forward] is not None]
        result[forward] = fmean(known) if known else None
    if biases := values["bias"].get(row.name, {}):
        result["bias"] = _spread(biases)
    return result


def _spread(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean, standard deviation, and the value of each seed."""
    ordered = {str(seed): values[seed] for seed in sorted(values)}
    return {
        "mean": fmean(ordered.values()),
        "spread": stdev(ordered.values()) if len(ordered) > 1 else None,
        "seeds": ordered,
    }


def _k_over_d(setting: Setting, row: Row) -> float | None:
    """The share of the dimensions that crosses a compressed boundary, after rounding; None without one."""
    if row.rank == "full" or row.compressed_share == 0 or setting.not_representable(row) is not None:
        return None
    width = setting.config(row).model.resolve(setting.scale.vocabulary).width
    return (max(1, round(row.rank * width)) if isinstance(row.rank, float) else row.rank) / width


def write_result(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Write the JSON to `path`, and .md and .png beside it."""
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
    write_whole(path.with_suffix(".md"), ("\n".join(markdown(result)) + "\n").encode())
    if any(outcomes.values()):
        with whole(path.with_suffix(".png")) as part:
            draw(result, outcomes, part)


def markdown(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of an experiment and the verdicts on its claims."""
    yield f"### {result['name']}: {result['title']}"
    yield ""
    yield f"{result['paper']}. Scale `{result['scale']}`: {result['about']}."
    if result["note"]:
        yield f"{result['note']}"
    corpus = result["corpus"]
    if corpus is not None:
        yield f"Corpus: {corpus['name']}, {corpus['tokens']:,} tokens, read {corpus['epochs']:.2g} times."
    yield ""
    measured = any("bias" in row for row in result["rows"])
    yield "| row | paper | paper, % | ours | spread | seeds | ours, % | uncompressed | compressed | bytes/token |" + (
        " bias, % | state |" if measured else " state |"
    )
    yield "|" + "---|" * (12 if measured else 11)
    base = next((row["paper"] for row in result["rows"] if row["name"] == result["baseline"]), None)
    for row in result["rows"]:
        yield "| " + " | ".join(_cells(row, base, measured)) + " |"
    yield ""
    yield "| claim | verdict | 95 % interval | seeds |"
    yield "|---|---|---|---|"
    for claim in result["claims"]:
        yield f"| {claim['text']} | **{claim['verdict']}** | {_interval(claim)} | {claim['seeds']} |"
    for claim in result["claims"]:
        if claim["why"]:
            yield ""
            yield f"*{claim['text']}*: {claim['why']}"


def _cells(row: Mapping[str, Any], base: float | None, measured: bool) -> Iterator[str]:
    ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
    theirs = None if row["paper"] is None or base is None else 100 * (row["paper"] / base - 1)
    yield from (row["name"], _number(row["paper"], 3), _signed(theirs), _number(ours["mean"], 3))
    yield from (_number(ours["spread"], 3), str(len(ours["seeds"])), _signed(row["delta_percent"]))
    yield from (_number(row.get("uncompressed"), 3), _number(row.get("compressed"), 3))
    yield _number(row.get("bytes_per_token"), 1)
    if measured:
        yield _number(100 * row["bias"]["mean"], 2) if "bias" in row else ""
    yield row["state"]


def _interval(claim: Mapping[str, Any]) -> str:
    """Of the difference that the claim is about, with its unit."""
    if claim["interval"] is None:
        return ""
    scaled = [value * (100 if claim["of"] == "bias" else 1) for value in claim["interval"]]
    return "{:+.3f} to {:+.3f} ".format(*scaled) + ("% points" if claim["of"] == "bias" else "nats")


def print_result(console: Console, result: Mapping[str, Any], path: Path) -> None:
    """The table on the screen."""
    console.print(f"[bold]{result['name']}[/bold]: {result['title']} ({result['paper']}; scale {result['scale']})")
    table = plain_table(["row"], ["paper", "ours", "spread", "seeds", "to baseline", "state"])
    for row in result["rows"]:
        ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
        numbers = (_number(value, 3) for value in (row["paper"], ours["mean"], ours["spread"]))
        difference = "" if row["delta_percent"] is None else f"{row['delta_percent']:+.1f} %"
        table.add_row(row["name"], *numbers, str(len(ours["seeds"])), difference, row["state"])
    console.print(table)
    for claim in result["claims"]:
        interval = f" ({_interval(claim)})" if claim["interval"] else ""
        console.print(f"  {claim['verdict']}: {claim['text']}{interval}", highlight=False)
    console.print(f"  written to {path}", style="dim", highlight=False, soft_wrap=True)


def write_overview(folder: Path, path: Path) -> None:
    """docs/results.md: every table of every scale, generated from the committed results."""
    results = [json.loads(found.read_text()) for found in sorted(folder.glob("*/*/*.json"))]
    lines = [
        "# Results",
        "",
        "Generated by `hetero-pp reproduce` from `benchmarks/results/`; not written by hand. Losses are validation "
        "losses of the synced model in nats: `ours` is each replica's own forward, averaged over replicas; "
        "`uncompressed` and `compressed` are the same model without boundaries, and with those of a compressed "
        "replica. A percentage is the difference to the baseline row, paired by seed. A verdict needs the 95 % "
        "interval over paired seeds to exclude zero; with one seed, differences below 0.03 nats decide nothing.",
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
    write_whole(path, ("\n".join(lines) + "\n").encode())


def machine() -> dict[str, Any]:
    """What this ran on."""
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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
