"""Training of rows: a row at one seed is trained once for all tables that need it, in one of several processes.

A row that takes long prints a line now and then, and every row one at its end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.files import keep_trying
from hetero_pp.core.progress import NowAndThen
from hetero_pp.data.sources import open_source
from hetero_pp.program.launch.fork_server import fork_server, unheard
from hetero_pp.program.report.output import tell
from hetero_pp.research.experiments.corpus import Corpus
from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.outcomes import Outcome, add_outcome, commit, machine
from hetero_pp.research.experiments.rows import Setting, settings_of
from hetero_pp.research.settings import Every, ablations_of
from hetero_pp.research.trainer.replica import constraint_of
from hetero_pp.research.trainer.train import FastResult, train_fast

OUTCOME_VERSION = 1
"""Version of outcomes. Raise it if a change, even of a default, alters outcomes by more than rounding.

Rows of older versions are trained again.
"""
UNFINISHED = ".rows"  # folder of checkpoints of unfinished rows, beside the runs
FIRST_LINE, LAST_PAUSE = 60.0, 600.0
"""Seconds before a row's first line, when most rows of small tables are finished; longest pause."""

_MEASURED_BESIDE = ("similarity_every", "volume_every", "outer_every")
_IDENTITY = ("version", "corpus", "tokenizer", "steps_of", "moments", "bias_every", "bias_of", "settings")


@dataclass(frozen=True)
class Job:
    """Everything that a worker process needs to train a row."""

    experiment: str
    name: str
    seed: int
    config: RunConfig
    every: Every
    cache: Path
    rows: Path  # file that outcomes are kept in
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
    for all. `moments` marks rows that move U and train coefficients: in older ones, moments stayed as they were.
    """
    settings = settings_of(config, corpus.source.vocabulary)
    tokenizer = corpus.tokenizer
    named = {} if tokenizer is None else {"tokenizer": {"sha256": tokenizer.identity, "ends": tokenizer.separator}}
    measured = {f"{kind}_every": rounds for kind, rounds in every._asdict().items() if rounds is not None}
    measured |= {} if every.bias is None else {"bias_of": "products of two replicas"}
    is_mixed = len(set(map(constraint_of, config.replicas))) > 1
    together = {"steps_of": "every replica"} if config.outer.source == "gradient" and is_mixed else {}
    boundaries = [one.boundary for one in config.replicas if isinstance(one, ParticipantsReplica)]
    moves = any(ablations_of(config, one).grassmann_every is not None for one in config.replicas)
    if moves and any(one.embedding == "coefficients" for one in boundaries):
        together["moments"] = "turned with U"
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


def train_job(job: Job, training: Training, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Train a row in this process and store its outcome.

    Resumes from the last checkpoint if training was interrupted. A line on stderr says now and then how far it is.
    """
    say = NowAndThen(
        lambda doing, _: print(doing, file=sys.stderr, flush=True),
        FIRST_LINE,
        lambda seconds: min(2 * seconds, LAST_PAUSE),
        clock,
    )
    began_at, rounds = _own_commit(), job.config.rounds
    torch.set_num_threads(job.config.threads)
    device = torch.device(training.device)
    torch.set_float32_matmul_precision("high" if training.rounds_products else "highest")
    source = open_source(job.config.data, job.cache)
    outcome: Outcome = {"row": f"{job.experiment}: {job.name}", "seed": job.seed, "key": job.key, **job.identity}

    def keep(result: FastResult) -> None:
        for name, value in dataclasses.asdict(result).items():
            outcome[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        outcome.update(machine=machine(), device=device.type, commit=began_at)
        say = partial(print, f"{job}: its outcome is not saved yet:", file=sys.stderr, flush=True)
        keep_trying(partial(add_outcome, job.rows, outcome), say)

    train_fast(
        RunSpec(job.config, source.vocabulary),
        source,
        lambda round_, loss: say(f"{job}: loss {loss:.4f}, round {round_}/{rounds}", round_ / rounds),
        compiles=training.compiles,
        every=job.every,
        device=device,
        checkpoint=job.cache.parent / UNFINISHED / f"{job.key}.pt",
        on_result=keep,
    )
    return outcome


@cache
def _own_commit() -> str:
    """Return the commit at the first call, because the checkout may change while imported code trains."""
    return commit()


def train(jobs: Sequence[Job], training: Training, workers: int, console: Console) -> Mapping[str, str]:
    """Train every job and return the errors of failed jobs by name. Ctrl-C stops at once and keeps finished rows."""
    failures: dict[str, str] = {}
    if not jobs:
        return failures
    with unheard():
        pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=fork_server())
        futures = {pool.submit(train_job, job, training): job for job in jobs}
    try:
        for number, future in enumerate(as_completed(futures), start=1):
            job, cause = futures[future], future.exception()
            if cause is not None:
                failures[str(job)] = f"{type(cause).__name__}: {cause}"
            end = "failed" if cause is not None else _end(future.result())
            tell(console, f"{number}/{len(jobs)} {job}: {end}")
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()  # otherwise they would finish their rows first
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return failures


def _end(outcome: Outcome) -> str:
    if outcome["diverged"]:
        return f"diverged after {len(outcome['validation_loss'])} rounds"
    return f"loss {outcome['validation_loss'][-1]:.4f}, {outcome['seconds']:.0f} s"
