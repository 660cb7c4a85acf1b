"""Trains rows on as many processes as asked, and shows how far it is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero_pp.program.experiments.jobs import Engine, Job, Outcome, train_job
from hetero_pp.program.launch import PRELOADED

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def train(jobs: Sequence[Job], engine: Engine, workers: int, console: Console) -> Mapping[str, str]:
    """Train every job; returns the causes of those that failed. Ctrl-C ends at once and keeps what is finished."""
    failures: dict[str, str] = {}
    if not jobs:
        return failures
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with Progress(*COLUMNS, console=console) as progress:
        pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context)
        task = progress.add_task("rows", total=len(jobs))
        futures: dict[Future[Outcome], Job] = {pool.submit(train_job, job, engine): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                name = f"{futures[future].name}, seed {futures[future].seed}"
                cause = future.exception()
                if cause is not None:
                    failures[name] = f"{type(cause).__name__}: {cause}"
                progress.advance(task)
                if not console.is_terminal:
                    console.print(f"{done}/{len(jobs)} {name}: {_end(future)}", soft_wrap=True)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # they would finish their rows first
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


def _end(future: Future[Outcome]) -> str:
    if future.exception() is not None:
        return "failed"
    outcome = future.result()
    if outcome["diverged"]:
        return f"diverged after {len(outcome['validation_loss'])} rounds"
    return f"loss {outcome['validation_loss'][-1]:.4f}, {outcome['seconds']:.0f} s"
