"""Training of rows: a row at one seed is trained once for all tables that need it, in one of several processes.

The ranks of torchrun train a row together. Progress is a bar per row on a terminal, otherwise occasional lines, and a
line at each end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.files import keep_trying
from hetero_pp.core.progress import NowAndThen
from hetero_pp.data.sources import open_source
from hetero_pp.program.launch.fork_server import fork_server, unheard
from hetero_pp.program.report.output import tell
from hetero_pp.research.experiments.corpus import Corpus
from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.outcomes import Outcome, add_outcome, commit, machine
from hetero_pp.research.experiments.rows import Setting, settings_of
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.replica import constraint_of
from hetero_pp.research.trainer.train import FastResult, train_fast
from replica_groups.engines.ranks import ALONE, Ranks

OUTCOME_VERSION = 1
"""Version of outcomes. Raise it if a change, even of a default, alters outcomes by more than rounding.

Rows of older versions are trained again.
"""
UNFINISHED = ".rows"
"""Folder of checkpoints of unfinished rows, beside the runs."""
FIRST_LINE, LAST_PAUSE = 60.0, 600.0
"""Seconds before a row's first line without a terminal, when most rows of small tables are finished; longest pause."""

_MEASURED_BESIDE = ("similarity_every", "volume_every", "outer_every")
_IDENTITY = ("version", "corpus", "tokenizer", "steps_of", "bias_every", "bias_of", "settings")

OnRound = Callable[[int, float], None]
"""Callback with (round, validation loss)."""
Told = tuple[int, int, float] | None
"""(index of the job, its round, its validation loss); None at the end."""


@dataclass(frozen=True)
class Job:
    """Everything that a worker process needs to train a row."""

    experiment: str
    name: str
    seed: int
    config: RunConfig
    every: Every
    cache: Path
    rows: Path
    """File that outcomes are kept in."""
    identity: Mapping[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.identity)

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True)
class Training:
    """How rows are trained."""

    device: str = "cpu"
    compiles: bool = True
    rounds_products: bool = False
    """Whether a GPU may round the inputs of matrix products to TF32: more digits than bf16, at its speed."""


def make_job(setting: Setting, row: Row, seed: int, corpus: Corpus, rows: Path) -> Job:
    """Return the job of a row; `rows` is the file that outcomes are kept in."""
    config = setting.config(row, seed)
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": corpus.data.tokenizer})})
    every = setting.experiment.every
    identity = identity_of(config, corpus, every)
    return Job(setting.experiment.name, row.name, seed, config, every, corpus.cache, rows, identity)


def identity_of(config: RunConfig, corpus: Corpus, every: Every) -> dict[str, Any]:
    """Return everything that determines a row's outcome as JSON, without defaults.

    `steps_of` marks synchronous rows with several kinds of replicas, whose older outcomes have the first replica's step
    for all.
    """
    settings = settings_of(config, corpus.source.vocabulary)
    tokenizer = corpus.tokenizer
    named = {} if tokenizer is None else {"tokenizer": {"sha256": tokenizer.identity, "ends": tokenizer.separator}}
    measured = {f"{kind}_every": rounds for kind, rounds in every._asdict().items() if rounds is not None}
    measured |= {} if every.bias is None else {"bias_of": "products of two replicas"}
    is_mixed = len(set(map(constraint_of, config.replicas))) > 1
    together = {"steps_of": "every replica"} if config.outer.source == "gradient" and is_mixed else {}
    return {"version": OUTCOME_VERSION, "corpus": corpus.digest, **named, **together, **measured, "settings": settings}


def key_of(identity: Mapping[str, Any]) -> str:
    """Return a hash of everything that determines a row's outcome."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def known_outcomes(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return outcomes by key.

    An outcome with extra measurements is also listed under the key of the row without them, because measuring does not
    affect training.
    """
    measured = [one for one in outcomes.values() if any(part in one for part in _MEASURED_BESIDE)]
    plain = {key_of({part: one[part] for part in _IDENTITY if part in one}): one for one in measured}
    return plain | dict(outcomes)


def train_job(
    job: Job, training: Training, ranks: Ranks = ALONE, on_round: OnRound = lambda round_, loss: None
) -> Outcome:
    """Train a row in this process, or with the other ranks of torchrun; the first rank stores the outcome.

    Resumes from the last checkpoint if training was interrupted. `on_round` is also called with round 0 at the start.
    """
    began_at = _own_commit()
    torch.set_num_threads(job.config.threads)
    device = torch.device(training.device) if ranks.world == 1 else ranks.device
    torch.set_float32_matmul_precision("high" if training.rounds_products else "highest")
    source = open_source(job.config.data, job.cache)
    on_round(0, math.nan)
    outcome: Outcome = {"row": f"{job.experiment}: {job.name}", "seed": job.seed, "key": job.key, **job.identity}

    def keep(result: FastResult) -> None:
        for name, value in dataclasses.asdict(result).items():
            outcome[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        outcome.update(machine=machine(), device=device.type, commit=began_at)
        if ranks.rank == 0:
            keep_trying(partial(add_outcome, job.rows, outcome), partial(_say, job))

    train_fast(
        RunSpec(job.config, source.vocabulary),
        source,
        on_round,
        compiles=training.compiles,
        every=job.every,
        device=device,
        ranks=ranks,
        checkpoint=job.cache.parent / UNFINISHED / f"{job.key}.pt",
        on_result=keep,
    )
    return outcome


def _say(job: Job, line: str) -> None:
    print(f"{job}: its outcome is not saved yet: {line}", file=sys.stderr, flush=True)


@cache
def _own_commit() -> str:
    """Return the commit at the first call, because the checkout may change while imported code trains."""
    return commit()


def train(jobs: Sequence[Job], training: Training, workers: int, console: Console) -> Mapping[str, str]:
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
                index, cause = futures[future], future.exception()
                if cause is not None:
                    failures[str(jobs[index])] = f"{type(cause).__name__}: {cause}"
                progress.finished(index, "failed" if cause is not None else _end(future.result()))
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # otherwise they would finish their rows first
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


def train_on_ranks(jobs: Sequence[Job], training: Training, ranks: Ranks, console: Console) -> None:
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


class RowProgress:
    """Shows the rounds of rows, also of rows in other processes, and the rows that are finished."""

    def __init__(self, jobs: Sequence[Job], console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (TextColumn("{task.description}", table_column=Column()), BarColumn(20), MofNCompleteColumn())
        self._jobs, self._console, self._clock = jobs, console, clock
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._all = self._progress.add_task("rows", total=len(jobs))
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._bars: dict[int, TaskID] = {}
        self._lines: dict[int, NowAndThen] = {}

    def __enter__(self) -> RowProgress:
        self._progress.start()
        return self

    def __exit__(self, *cause: object) -> None:
        self._progress.stop()

    def follow(self, told: Queue[Told]) -> None:
        """Show every round in the queue until it ends."""
        with suppress(EOFError, OSError):  # the queue is gone, as after Ctrl-C
            while (one := told.get()) is not None:
                self.round(*one)

    def round(self, index: int, round_: int, loss: float) -> None:
        """Show a completed round of a row, or round 0 at its start; ignore rounds that arrive after its end."""
        job = self._jobs[index]
        rounds, text = job.config.outer.rounds, str(job) + (f": loss {loss:.4f}" if round_ else "")
        with self._lock:
            if index in self._done:
                return
            if self._console.is_terminal:
                if index not in self._bars:
                    self._bars[index] = self._progress.add_task("", total=rounds)
                self._progress.update(self._bars[index], description=f"  {text}", completed=round_)
                return
            if index not in self._lines:
                self._lines[index] = NowAndThen(
                    lambda doing, _: tell(self._console, doing),
                    FIRST_LINE,
                    lambda seconds: min(2 * seconds, LAST_PAUSE),
                    self._clock,
                )
            self._lines[index](f"{text}, round {round_}/{rounds}", round_ / rounds)

    def finished(self, index: int, end: str) -> None:
        """Show that a row is trained, or has failed."""
        with self._lock:
            self._done.add(index)
            self._progress.advance(self._all)
            if index in self._bars:
                self._progress.remove_task(self._bars.pop(index))
        if not self._console.is_terminal:
            tell(self._console, f"{len(self._done)}/{len(self._jobs)} {self._jobs[index]}: {end}")
