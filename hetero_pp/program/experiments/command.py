"""`hetero-pp reproduce`: train the rows that are not known yet, then write every table and its verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch
from rich.console import Console

from hetero_pp.program.experiments.corpus import Corpus, prepare_corpus
from hetero_pp.program.experiments.definition import Row
from hetero_pp.program.experiments.jobs import Job, Outcome, make_job
from hetero_pp.program.experiments.report import print_result, result_of, write_result
from hetero_pp.program.experiments.request import Request
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.program.experiments.training import train, train_on_ranks
from hetero_pp.program.report.display import wide
from hetero_pp.run.folder import CACHE
from replica_groups.ranks import init_ranks


def reproduce(request: Request) -> None:
    """Train what is missing, then write every table and its verdicts."""
    console = wide(Console(), 120)
    settings = request.settings()
    tables = {setting.experiment.name: _Table(setting, request, console) for setting in settings}
    asked = {job.key: job for table in tables.values() for _, job in table.asked}
    wanted = [(job, not job.path.exists()) for job in asked.values()]
    failures: Mapping[str, str] = {}
    ranks = init_ranks(torch.device(request.engine.device))
    if request.trains and ranks.world > 1:
        # Which rows are missing is for the first rank to say: the others may not see its files.
        agreed = [job for job, is_missing in wanted if ranks.gather(is_missing)[0]]
        train_on_ranks(agreed, request.engine, ranks, console)
    elif request.trains:
        failures = train([job for job, is_missing in wanted if is_missing], request.engine, request.workers, console)
    ranks.close()
    if ranks.rank > 0:
        return
    for table in tables.values():
        table.write(request.results, console)
    for name, cause in failures.items():
        console.print(f"{name} failed: {cause}", style="red")


class _Table:
    """One experiment's jobs: those that were asked for, and further seeds that are known already."""

    def __init__(self, setting: Setting, request: Request, console: Console) -> None:
        self.setting = setting
        self.corpus: Corpus | None = None
        self.asked: list[tuple[Row, Job]] = []
        self.known: list[tuple[Row, Job]] = []
        if not setting.rows():
            return
        cache, rows = request.runs.absolute() / CACHE, request.results / setting.scale.name / "rows"
        data = setting.config(setting.rows()[0]).data
        with console.status(f"reading {data.corpus}"):
            self.corpus = prepare_corpus(data, setting.scale.vocabulary, cache)
        self.corpus.require_enough([setting.config(row) for row in setting.rows()])
        for seed in count(1):
            jobs = [(row, make_job(setting, row, seed, self.corpus, rows)) for row in setting.rows()]
            done = [(row, job) for row, job in jobs if job.path.exists()]
            if seed <= request.seeds:
                self.asked += jobs
            elif not done:
                break
            else:
                self.known += done

    def write(self, folder: Path, console: Console) -> None:
        outcomes: dict[str, dict[int, Outcome]] = {}
        for row, job in self.asked + self.known:
            if (outcome := job.outcome()) is not None:
                outcomes.setdefault(row.name, {})[job.seed] = outcome
        result = result_of(self.setting, self.corpus, outcomes)
        path = folder / self.setting.scale.name / f"{self.setting.experiment.name}.json"
        if not outcomes and _has_losses(path):
            console.print(f"{path} is kept: no row of it was trained on this corpus", style="yellow")
            return
        write_result(result, outcomes, path)
        print_result(console, result, path)


def _has_losses(path: Path) -> bool:
    """Whether a table was written there that knows something."""
    return path.exists() and any(row["ours"] is not None for row in json.loads(path.read_text())["rows"])
