"""`hetero-pp reproduce --list` and `--dry-run`: the experiments, their known rows, and their estimated cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_bytes, format_flops, format_number
from hetero_pp.program.report.output import say, standard_output, tell
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.facts import parameter_count, token_count
from hetero_pp.research.experiments.request import Request
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.supply import Estimates, Supply
from hetero_pp.research.trainer.measurements import contribution_bytes
from hetero_pp.run.spec import RunSpec

SECONDS_PER_FLOP = {"cpu": 1 / 2.0e10, "gpu": 1 / 4.0e13}
"""Seconds per FLOP of one core at the micro scale (measured), and of one large GPU at a tenth of its peak (assumed)."""


def list_experiments(request: Request, path: Path | None) -> None:
    """Print every experiment with its claims, cost and state; write them as JSON if `path` is set."""
    settings, broken = request.settings()
    entries = [_entry(setting, request) for setting in settings]
    entries += [{"name": name, "state": "broken", "error": str(error)} for name, error in broken.items()]
    if path is not None:
        write_whole(path, (json.dumps(entries, indent=1) + "\n").encode())
    table = PlainTable(["experiment", "title"], ["rows", "claims", "hours", "known"])
    for entry in entries:
        if "error" in entry:
            table.add_row(entry["name"], entry["state"])
        else:
            numbers = str(entry["rows"]), str(len(entry["claims"])), format_number(entry["hours"], 2)
            table.add_row(entry["name"], entry["title"], *numbers, entry["state"].partition(" rows ")[0])
    console = standard_output()
    console.print(table)
    print_broken(console, broken)
    notes = (
        f"`known`: trained rows, of the rows that the scale {request.scale} can represent. `hours`: "
        f"{_unit(request)}, for {request.seeds} seeds of every row, including known rows."
    )
    say(console, notes, style="dim")


def _unit(request: Request) -> str:
    is_cpu = request.catalog.scale(request.scale).hardware == "cpu"
    return "of one core" if is_cpu else "of one GPU (assumed speed)"


def print_broken(console: Console, broken: Mapping[str, ConfigError]) -> None:
    """Print one line for each experiment that cannot be used."""
    for name, error in broken.items():
        tell(console, f"{name} is invalid: {error}", style="red")


def _entry(setting: Setting, request: Request) -> dict[str, Any]:
    experiment, scale = setting.experiment, setting.scale
    path = request.results / scale.name / f"{experiment.name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "claims": []}
    done = sum(row["ours"] is not None for row in known["rows"])
    verdicts = {claim["text"]: claim["verdict"] for claim in known["claims"]}
    representable = setting.representable()
    hours = sum(_hours(setting, _spec(setting, row)) for row in representable) * request.seeds
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "rows": len(experiment.rows),
        "claims": [{"text": one.text, "verdict": verdicts.get(one.text, "not run")} for one in experiment.claims],
        "hours": hours,
        "state": f"{done} of {len(representable)} rows at scale {scale.name}",
    }


def _spec(setting: Setting, row: Row) -> RunSpec:
    return RunSpec(setting.config(row), setting.scale.vocabulary)


def _flops(spec: RunSpec) -> float:
    """Return the FLOPs of training by the usual estimate of 6 per parameter and token."""
    return 6.0 * parameter_count(spec) * token_count(spec)


def _hours(setting: Setting, spec: RunSpec) -> float:
    return _flops(spec) * SECONDS_PER_FLOP[setting.scale.hardware] / 3600


def dry_run(request: Request) -> None:
    """Validate every row at the scale and print its cost.

    Prints parameters, tokens, FLOPs, bytes, an estimate of the time, and whether the corpus has enough tokens.
    """
    console = standard_output()
    settings, broken = request.settings()
    estimates = Estimates()
    for setting in settings:
        supply = estimates.of(setting)
        table = PlainTable(["row"], ["parameters", "tokens", "compute", "sends", "hours"], ["state"])
        for row in setting.experiment.rows:
            table.add_row(row.name, *_cost_cells(setting, row))
        name = setting.experiment.name
        say(console, f"{name} at scale {setting.scale.name}", bold=name)
        console.print(table)
        if supply is not None:
            print_supply(console, supply)
    say(
        console,
        "`compute`: 6 floating-point operations per parameter and token. `sends`: all contributions of all "
        f"rounds. `hours`: {_unit(request)}, for one seed.",
        style="dim",
    )
    print_broken(console, broken)


def print_supply(console: Console, supply: Supply) -> None:
    """Print whether a table's corpus has enough tokens."""
    for sentence in supply.describe():
        say(console, f"{sentence}.", indent="  ")


def _cost_cells(setting: Setting, row: Row) -> Iterator[str]:
    reason = setting.not_representable(row)
    if reason is not None:
        yield from ("", "", "", "", "", reason)
        return
    spec = _spec(setting, row)
    yield from (f"{parameter_count(spec):,}", f"{token_count(spec):,}", format_flops(_flops(spec)))
    yield format_bytes(contribution_bytes(spec, spec.config.outer.rounds))
    yield format_number(_hours(setting, spec), 2)
    yield setting.why_not(row) or "ready"
