"""`hetero-pp reproduce`: which rows are needed, train those that are not known yet, write tables and verdicts."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.errors import ConfigError
from hetero_pp.program.check import contribution_bytes
from hetero_pp.program.config import RunPlan
from hetero_pp.program.display import plain_table, wide
from hetero_pp.program.experiments.definition import Catalog, Experiment, Row, Scale
from hetero_pp.program.experiments.report import result_of, rows_to_run, write_overview, write_result
from hetero_pp.program.experiments.rows import (
    Job,
    Outcome,
    make_job,
    prepare_tokenizer,
    require_enough,
    row_config,
    train_job,
    why_not,
)
from hetero_pp.program.inputs import CACHE
from hetero_pp.program.launch import PRELOADED
from hetero_pp.units import format_bytes

SECONDS_PER_FLOP = 1 / 2.0e10
"""Of one CPU core at the micro scale, for estimates before anything was trained."""


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    names: Sequence[str]
    scale: str
    seeds: int
    workers: int
    corpus: str | None
    sweeps: Sequence[str]
    runs: Path
    results: Path
    catalog: Catalog
    trains: bool = True
    """False: write the tables from what was trained so far."""

    def experiments(self) -> list[Experiment]:
        """The experiments by name (all, if none is named), with the rows of sweeps added."""
        names = self.names or sorted(self.catalog.experiments)
        found = [self.catalog.experiment(name) for name in names]
        return [swept(experiment, self.sweeps) for experiment in found] if self.sweeps else found


def swept(experiment: Experiment, sweeps: Sequence[str]) -> Experiment:
    """The experiment with every row repeated for each value of `cell=a,b,c`; claims are left out."""
    rows = list(experiment.rows)
    for sweep in sweeps:
        cell, separator, values = sweep.partition("=")
        if not separator or not values:
            raise ConfigError((), f"--sweep {sweep}: expected CELL=A,B such as `outer.compression.density=1/128,1/32`")
        rows = [
            row.model_copy(update={"name": f"{row.name}, {cell}={value}", "cells": {**row.cells, cell: _plain(value)}})
            for row in rows
            for value in values.split(",")
        ]
    update = {"name": f"{experiment.name}-sweep", "rows": rows, "claims": [], "baseline": rows[0].name}
    return experiment.model_copy(update=update)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def list_experiments(request: Request, path: Path | None) -> None:
    """Print every experiment with its claims and state, and write them as JSON if asked."""
    scale = request.catalog.scale(request.scale)
    entries = [_entry(experiment, scale, request) for experiment in request.experiments()]
    if path is not None:
        path.write_text(json.dumps(entries, indent=1) + "\n")
    table = plain_table(["experiment", "title"], ["rows", "claims", "state"])
    for entry in entries:
        table.add_row(entry["name"], entry["title"], str(entry["rows"]), str(len(entry["claims"])), entry["state"])
    wide(Console(), 120).print(table)


def _entry(experiment: Experiment, scale: Scale, request: Request) -> dict[str, Any]:
    path = request.results / scale.name / f"{experiment.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": [], "claims": []}
    done = sum(row["ours"] is not None for row in known["rows"])
    possible = len(rows_to_run(experiment, scale))
    verdicts = {claim["text"]: claim["verdict"] for claim in known["claims"]}
    return {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "rows": len(experiment.rows),
        "claims": [{"text": one.text, "verdict": verdicts.get(one.text, "not run")} for one in experiment.claims],
        "state": f"{done} of {possible} rows at scale {scale.name}",
    }


def dry_run(request: Request) -> None:
    """Validate every row at the scale; print parameters, tokens, FLOPs, bytes and an estimate of the time."""
    scale, console = request.catalog.scale(request.scale), wide(Console(), 120)
    for experiment in request.experiments():
        table = plain_table(["row"], ["parameters", "tokens", "FLOPs", "contributions", "core hours", "state"])
        for row in experiment.rows:
            table.add_row(row.name, *_cost(scale, row))
        console.print(f"[bold]{experiment.name}[/bold] at scale {scale.name}")
        console.print(table)


def _cost(scale: Scale, row: Row) -> Iterator[str]:
    reason = why_not(scale, row)
    if reason is not None and reason.startswith("not representable"):
        yield from ("", "", "", "", "", reason)
        return
    plan = RunPlan(row_config(scale, row, 0, None, "bytes"), scale.vocabulary)
    parameters = sum(math.prod(shape) for shape in plan.parameter_shapes.values())
    per_step = sum(replica.batch_size for replica in plan.config.replicas) * plan.config.data.sequence_length
    tokens = per_step * plan.total_steps
    flops = 6 * parameters * tokens
    sent = contribution_bytes(plan) * plan.config.outer.rounds
    yield from (f"{parameters:,}", f"{tokens:,}", f"{flops:.2g}", format_bytes(sent))
    yield f"{flops * SECONDS_PER_FLOP / 3600:.2g}"
    yield reason or "can be trained"


def reproduce(request: Request) -> None:
    """Train what is missing, then write every table, its verdicts and the overview."""
    scale, console = request.catalog.scale(request.scale), wide(Console(), 120)
    experiments = request.experiments()
    jobs = {experiment.name: _jobs(experiment, scale, request, console) for experiment in experiments}
    missing = {job.key: job for rows in jobs.values() for _, job in rows if job.outcome() is None}
    failures = _train(list(missing.values()), request.workers, console) if request.trains else {}
    for experiment in experiments:
        outcomes: dict[str, dict[int, Outcome]] = defaultdict(dict)
        for row, job in jobs[experiment.name]:
            if (outcome := job.outcome()) is not None:
                outcomes[row.name][job.seed] = outcome
        result = result_of(experiment, scale, outcomes)
        path = write_result(result, outcomes, request.results)
        _print_result(console, result, path)
    for name, cause in failures.items():
        console.print(f"{name} failed: {cause}", style="red")


def _jobs(experiment: Experiment, scale: Scale, request: Request, console: Console) -> list[tuple[Row, Job]]:
    """Every row of an experiment that the scale can train, seed by seed."""
    rows = rows_to_run(experiment, scale)
    if not rows:
        return []
    cache = request.runs.absolute() / CACHE
    corpus = request.corpus or experiment.corpus
    data = DataSettings.model_validate(scale.base["data"] | ({} if corpus is None else {"corpus": corpus}))
    with console.status(f"reading {data.corpus}"):
        tokenizer = prepare_tokenizer(data, scale.vocabulary, cache)
        store = prepare_tokens(data.model_copy(update={"tokenizer": str(tokenizer)}), cache)
    jobs = [
        (row, make_job(scale, experiment, row, seed, corpus, store, tokenizer, request.results / scale.name / "rows"))
        for seed in range(1, request.seeds + 1)
        for row in rows
    ]
    for _, job in jobs:
        require_enough(job.config, store)
    return jobs


def _train(jobs: Sequence[Job], workers: int, console: Console) -> dict[str, str]:
    """Train rows on as many processes; returns the causes of those that failed. Ctrl-C keeps what is finished."""
    if not jobs:
        return {}
    failures: dict[str, str] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with ProcessPoolExecutor(workers, mp_context=context) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("rows", total=len(jobs))
        futures: dict[Future[Outcome], Job] = {pool.submit(train_job, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                name = f"{futures[future].name}, seed {futures[future].seed}"
                cause = future.exception()
                if cause is not None:
                    failures[name] = f"{type(cause).__name__}: {cause}"
                progress.advance(task)
                if not console.is_terminal:
                    console.print(_progress_line(name, future, progress.tasks[0].completed, len(jobs)))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return failures


def _progress_line(name: str, future: Future[Outcome], done: float, total: int) -> str:
    if future.exception() is not None:
        return f"{done:.0f}/{total} {name}: failed"
    outcome = future.result()
    loss = outcome["validation_loss"][-1] if outcome["validation_loss"] else float("nan")
    end = "diverged" if outcome["diverged"] else f"loss {loss:.4f}"
    return f"{done:.0f}/{total} {name}: {end}, {outcome['seconds']:.0f} s"


def _print_result(console: Console, result: dict[str, Any], path: Path) -> None:
    console.print(f"[bold]{result['name']}[/bold]: {result['title']} ({result['paper']}; scale {result['scale']})")
    table = plain_table(["row"], ["paper", "ours", "spread", "seeds", "to baseline", "state"])
    for row in result["rows"]:
        ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
        table.add_row(
            row["name"],
            *("" if value is None else f"{value:.3f}" for value in (row["paper"], ours["mean"], ours["spread"])),
            str(len(ours["seeds"])),
            "" if row["delta_percent"] is None else f"{row['delta_percent']:+.1f} %",
            row["state"],
        )
    console.print(table)
    for claim in result["claims"]:
        interval = "" if claim["interval"] is None else " ({:+.3f} to {:+.3f} nats)".format(*claim["interval"])
        console.print(f"  {claim['verdict']}: {claim['text']}{interval}", highlight=False)
    console.print(f"  written to {path}", style="dim", highlight=False, soft_wrap=True)


def write_docs(request: Request, path: Path) -> None:
    """The overview of all results."""
    write_overview(request.results, path)
