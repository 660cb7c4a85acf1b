"""`hetero-pp reproduce --list` and `--dry-run`: what there is, what is known of it, and what it would cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.program.experiments.definition import Row
from hetero_pp.program.experiments.request import Request
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.program.report.display import plain_table, wide
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.loads import contribution_bytes
from hetero_pp.units import format_bytes

SECONDS_PER_FLOP = {"cpu": 1 / 2.0e10, "gpu": 1 / 4.0e13}
"""Of one core at the micro scale (measured), and of one large GPU at a tenth of its peak (assumed), for estimates."""


def list_experiments(request: Request, path: Path | None) -> None:
    """Print every experiment with its claims, cost and state, and write them as JSON if asked."""
    entries = [_entry(setting, request) for setting in request.settings()]
    if path is not None:
        path.write_text(json.dumps(entries, indent=1) + "\n")
    table = plain_table(["experiment", "title"], ["rows", "claims", "hours", "state"])
    for entry in entries:
        numbers = str(entry["rows"]), str(len(entry["claims"])), f"{entry['hours']:.2g}"
        table.add_row(entry["name"], entry["title"], *numbers, entry["state"])
    console = wide(Console(), 120)
    console.print(table)
    unit = "of one core" if request.catalog.scale(request.scale).hardware == "cpu" else "of one GPU (assumed speed)"
    console.print(f"hours: {unit}, for {request.seeds} seeds of every row, before anything is known", style="dim")


def _entry(setting: Setting, request: Request) -> dict[str, Any]:
    experiment, scale = setting.experiment, setting.scale
    path = request.results / scale.name / f"{experiment.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": [], "claims": []}
    done = sum(row["ours"] is not None for row in known["rows"])
    verdicts = {claim["text"]: claim["verdict"] for claim in known["claims"]}
    representable = [row for row in experiment.rows if setting.not_representable(row) is None]
    hours = sum(Cost.of(setting, row).hours for row in representable) * request.seeds
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "rows": len(experiment.rows),
        "claims": [{"text": one.text, "verdict": verdicts.get(one.text, "not run")} for one in experiment.claims],
        "hours": hours,
        "state": f"{done} of {len(representable)} rows at scale {scale.name}",
    }


@dataclass(frozen=True)
class Cost:
    """What a row takes."""

    parameters: int
    tokens: int
    flops: float
    sent_bytes: int
    hours: float

    @classmethod
    def of(cls, setting: Setting, row: Row) -> Cost:
        """By the usual 6 N tokens."""
        spec = RunSpec(setting.config(row), setting.scale.vocabulary)
        parameters = sum(math.prod(shape) for shape in spec.parameter_shapes.values())
        per_step = sum(replica.batch_size for replica in spec.config.replicas) * spec.config.data.sequence_length
        tokens = per_step * spec.total_steps
        flops = 6.0 * parameters * tokens
        sent = contribution_bytes(spec) * spec.config.outer.rounds
        hours = flops * SECONDS_PER_FLOP[setting.scale.hardware] / 3600
        return cls(parameters, tokens, flops, sent, hours)


def dry_run(request: Request) -> None:
    """Validate every row at the scale; print parameters, tokens, FLOPs, bytes and an estimate of the time."""
    console = wide(Console(), 120)
    for setting in request.settings():
        table = plain_table(["row"], ["parameters", "tokens", "FLOPs", "contributions", "hours", "state"])
        for row in setting.experiment.rows:
            table.add_row(row.name, *_cost_cells(setting, row))
        console.print(f"[bold]{setting.experiment.name}[/bold] at scale {setting.scale.name}")
        console.print(table)


def _cost_cells(setting: Setting, row: Row) -> Iterator[str]:
    reason = setting.not_representable(row)
    if reason is not None:
        yield from ("", "", "", "", "", reason)
        return
    cost = Cost.of(setting, row)
    yield from (f"{cost.parameters:,}", f"{cost.tokens:,}", f"{cost.flops:.2g}", format_bytes(cost.sent_bytes))
    yield f"{cost.hours:.2g}"
    yield setting.why_not(row) or "can be trained"
