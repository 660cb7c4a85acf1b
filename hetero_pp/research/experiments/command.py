"""`hetero-pp reproduce`: train the rows without an outcome, then write every table and its verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain, count
from pathlib import Path

import torch
from rich.console import Console

from hetero_pp.core.errors import RunFailed
from hetero_pp.core.shipped import shipped
from hetero_pp.program.report.output import say, shown_reading, standard_output, tell
from hetero_pp.research.experiments.corpus import Corpus, prepare_corpus
from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.jobs import Job, known_outcomes, make_job
from hetero_pp.research.experiments.listing import print_broken, print_supply
from hetero_pp.research.experiments.outcomes import ROWS, Outcome, alone, read_outcomes
from hetero_pp.research.experiments.report import print_result, result_of, write_result
from hetero_pp.research.experiments.request import RESULTS, Request
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.supply import counted
from hetero_pp.research.experiments.training import train, train_on_ranks
from hetero_pp.run.folder import CACHE
from replica_groups.engines.ranks import init_ranks


def reproduce(request: Request) -> None:
    """Train the missing rows, then write every table and its verdicts. Raises RunFailed if a row was not trained."""
    console = standard_output()
    settings, broken = request.settings()
    rows = request.results.absolute() / request.catalog.scale(request.scale).name / ROWS
    outcomes = known_outcomes(read_outcomes(rows))
    tables = {setting.experiment.name: _Table(setting, request, rows, outcomes, console) for setting in settings}
    asked: dict[str, Job] = {}
    for _, job in chain.from_iterable(table.asked for table in tables.values()):
        if request.trains_row(job.name):
            asked.setdefault(job.key, job)
    wanted = [(job, key not in outcomes) for key, job in asked.items()]
    failures: Mapping[str, str] = {}
    ranks = init_ranks(torch.device(request.training.device))
    if ranks.rank == 0:
        _tell_notes(tables.values(), console)
    if request.trains and ranks.world > 1:
        # The first rank decides which rows are missing, because the other ranks may not see its files.
        agreed = [job for job, is_missing in wanted if ranks.gather(is_missing)[0]]
        train_on_ranks(agreed, request.training, ranks, console)
    elif request.trains:
        failures = train([job for job, is_missing in wanted if is_missing], request.training, request.workers, console)
    ranks.close()
    if ranks.rank > 0:
        return
    with alone(rows):
        outcomes = known_outcomes(read_outcomes(rows))
        for table in tables.values():
            table.write(request.results, outcomes, console)
        _tell_differences([job for job, is_missing in wanted if is_missing], outcomes, rows, console)
    print_broken(console, broken)
    for name, cause in failures.items():
        tell(console, f"{name} failed: {cause}", style="red")
    if failures:
        missing = sum(is_missing for _, is_missing in wanted)
        raise RunFailed(f"{len(failures)} of {missing} rows did not finish training")


def _tell_differences(trained: Iterable[Job], outcomes: Mapping[str, Outcome], rows: Path, console: Console) -> None:
    """Compare each row that was trained again with the row of the repository, for a folder of results elsewhere."""
    committed = shipped(str(RESULTS / rows.parent.name / ROWS)).absolute()
    if committed == rows or not committed.is_file():
        return
    earlier = known_outcomes(read_outcomes(committed))
    for job in trained:
        if job.key in outcomes and job.key in earlier:
            here, there = outcomes[job.key]["validation_loss"][-1], earlier[job.key]["validation_loss"][-1]
            told = f"loss {here:.4f} here, {there:.4f} in the repository's rows, difference {here - there:+.4f}"
            tell(console, f"{job.name}, seed {job.seed}: {told}")


def _tell_notes(tables: Iterable[_Table], console: Console) -> None:
    """Print which parts of the corpora are skipped; print each line once."""
    found = (table.corpus.source.notes for table in tables if table.corpus is not None)
    for note in dict.fromkeys(chain.from_iterable(found)):
        tell(console, note)


class _Table:
    """Jobs of one experiment: the requested ones, and further seeds that already have outcomes."""

    def __init__(
        self, setting: Setting, request: Request, rows: Path, outcomes: Mapping[str, Outcome], console: Console
    ) -> None:
        self.setting = setting
        self.seeds = request.seeds
        self.corpus: Corpus | None = None
        self.asked: list[tuple[Row, Job]] = []
        self.known: list[tuple[Row, Job]] = []
        if not setting.rows():
            return
        cache = request.runs.absolute() / CACHE
        data = setting.config(setting.rows()[0]).data
        with shown_reading(console, f"reading {data.corpus}") as on_progress:
            self.corpus = prepare_corpus(data, setting.scale.vocabulary, cache, on_progress)
        supply = counted(setting, self.corpus)
        supply.require_enough()
        if request.trains:
            print_supply(console, supply)
        first = setting.experiment.first_seed
        for seed in count(first):
            jobs = [(row, make_job(setting, row, seed, self.corpus, rows)) for row in setting.rows()]
            done = [(row, job) for row, job in jobs if job.key in outcomes]
            if seed < first + request.seeds:
                self.asked += jobs
            elif not done:
                break
            else:
                self.known += done

    def write(self, folder: Path, outcomes: Mapping[str, Outcome], console: Console) -> None:
        """Write the table of all known outcomes; keep an existing table with results if nothing is known."""
        known: dict[str, dict[int, Outcome]] = {}
        for row, job in self.asked + self.known:
            if (outcome := outcomes.get(job.key)) is not None:
                known.setdefault(row.name, {})[job.seed] = outcome
        path = folder / self.setting.scale.name / f"{self.setting.experiment.name}.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not known and any(row["ours"] is not None for row in earlier.get("rows", [])):
            say(console, f"{path} was not changed: none of its rows was trained on this corpus", style="yellow")
            return
        seeds = max(map(len, known.values()), default=self.seeds)
        command = f"{self.setting.command} --seeds {seeds}"
        result = result_of(self.setting, self.corpus, known, command, earlier.get("trained", []))
        write_result(result, known, path)
        print_result(console, result, path)
