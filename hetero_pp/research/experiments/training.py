"""Training of rows in several processes or on the ranks of torchrun, with progress."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerContext
from queue import Queue

from rich.console import Console

from hetero_pp.program.launch.fork_server import fork_server, unheard
from hetero_pp.research.experiments.jobs import Job, RowTraining, train_job
from hetero_pp.research.experiments.outcomes import Outcome
from hetero_pp.research.experiments.row_progress import RowProgress, Told
from replica_groups.engines.ranks import Ranks


def train(jobs: Sequence[Job], training: RowTraining, workers: int, console: Console) -> Mapping[str, str]:
    """Train every job and return the errors of failed jobs by name. Ctrl-C stops at once and keeps finished rows."""
    failures: dict[str, str] = {}
    if not jobs:
        return failures
    context = fork_server()
    with RowProgress(jobs, console) as progress, _followed(context, progress) as told:
        pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context)
        futures: dict[Future[Outcome], int] = {
            pool.submit(train_job, job, training, on_round=partial(_tell, told, index)): index
            for index, job in enumerate(jobs)
        }
        try:
            for future in as_completed(futures):
                job = jobs[futures[future]]
                cause = future.exception()
                if cause is not None:
                    failures[f"{job.name}, seed {job.seed}"] = f"{type(cause).__name__}: {cause}"
                progress.finished(futures[future], "failed" if cause is not None else _end(future.result()))
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # otherwise they would finish their rows first
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


@contextmanager
def _followed(context: ForkServerContext, progress: RowProgress) -> Iterator[Queue[Told]]:
    """Yield a queue for rounds from other processes, which is read while the block runs."""
    with unheard():
        manager = context.Manager()
    with manager:
        told: Queue[Told] = manager.Queue()
        follower = threading.Thread(target=progress.follow, args=(told,), name="rounds", daemon=True)
        follower.start()
        try:
            yield told
        finally:
            with suppress(EOFError, OSError):  # after Ctrl-C the queue is gone
                told.put(None)
            follower.join()


def _tell(told: Queue[Told], index: int, round_: int, loss: float) -> None:
    told.put((index, round_, loss))


def train_on_ranks(jobs: Sequence[Job], training: RowTraining, ranks: Ranks, console: Console) -> None:
    """Train every job in turn, together with the other ranks of torchrun; the first rank shows the progress."""
    if ranks.rank > 0:
        for job in jobs:
            train_job(job, training, ranks)
        return
    with RowProgress(jobs, console) as progress:
        for index, job in enumerate(jobs):
            progress.finished(index, _end(train_job(job, training, ranks, partial(progress.round, index))))


def _end(outcome: Outcome) -> str:
    if outcome["diverged"]:
        return f"diverged after {len(outcome['validation_loss'])} rounds"
    return f"loss {outcome['validation_loss'][-1]:.4f}, {outcome['seconds']:.0f} s"
