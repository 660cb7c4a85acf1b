"""Trains rows on as many processes as asked, or on the ranks of torchrun, and shows how far it is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero_pp.program.experiments.jobs import Job, Training, train_job
from hetero_pp.program.experiments.outcomes import Outcome
from hetero_pp.program.launch.crew import PRELOADED
from replica_groups.ranks import Ranks

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def train(jobs: Sequence[Job], training: Training, workers: int, console: Console) -> Mapping[str, str]:
    """Train every job; returns the causes of those that failed. Ctrl-C ends at once and keeps what is finished."""
    failures: dict[str, str] = {}
    if not jobs:
        return failures
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with Progress(*COLUMNS, console=console) as progress:
        pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context)
        task = progress.add_task("rows", total=len(jobs))
        futures: dict[Future[Outcome], Job] = {pool.submit(train_job, job, training): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                name = f"{futures[future].name}, seed {futures[future].seed}"
                cause = future.exception()
                if cause is not None:
                    failures[name] = f"{type(cause).__name__}: {cause}"
                progress.advance(task)
                if not console.is_terminal:
                    end = "failed" if cause is not None else _end(future.result())
                    console.print(f"{done}/{len(jobs)} {name}: {end}", soft_wrap=True)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # they would finish their rows first
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


def train_on_ranks(jobs: Sequence[Job], training: Training, ranks: Ranks, console: Console) -> None:
    """Train every job together with the other ranks of torchrun, one after the other."""
    for done, job in enumerate(jobs, start=1):
        outcome = train_job(job, training, ranks)
        if ranks.rank == 0:
            console.print(f"{done}/{len(jobs)} {job.name}, seed {job.seed}: {_end(outcome)}", soft_wrap=True)


def _end(outcome: Outcome) -> str:
    if outcome["diverged"]:
        return f"diverged after {len(outcome['validation_loss'])} rounds"
    return f"loss {outcome['validation_loss'][-1]:.4f}, {outcome['seconds']:.0f} s"
