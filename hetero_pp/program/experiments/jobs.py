"""A row at a seed, to be trained once for all tables that need it: its key, its outcome, its training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.program.experiments.corpus import Corpus
from hetero_pp.program.experiments.definition import Row
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.topology import ParticipantsReplica
from replica_groups.fast.train import train_fast
from replica_groups.ranks import ALONE, Ranks

ENGINE_VERSION = 1
"""Raised when a change alters what a row comes to by more than rounding: rows are trained again."""

UNFINISHED = ".rows"
"""Checkpoints of rows under way, beside the runs."""

Outcome = dict[str, Any]
"""A FastResult as JSON, with `key` and `seed`."""


@dataclass(frozen=True)
class Job:
    """Everything that a worker process needs to train a row."""

    name: str
    seed: int
    config: RunConfig
    bias_every: int | None
    cache: Path
    rows: Path
    key: str

    @property
    def path(self) -> Path:
        """Where its outcome is kept."""
        return self.rows / f"{self.key}.json"

    def outcome(self) -> Outcome | None:
        """What it came to, if it was trained before."""
        return json.loads(self.path.read_text()) if self.path.exists() else None


@dataclass(frozen=True)
class Engine:
    """How rows are trained."""

    device: str = "cpu"
    compiles: bool = True


def make_job(setting: Setting, row: Row, seed: int, corpus: Corpus, rows: Path) -> Job:
    """The job of a row; `rows` is the folder where outcomes are kept."""
    config = setting.config(row, seed)
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": corpus.data.tokenizer})})
    bias_every = setting.experiment.bias_every
    key = _key(config, bias_every, corpus)
    return Job(row.name, seed, config, bias_every, corpus.store.path.parent, rows, key)


def _key(config: RunConfig, bias_every: int | None, corpus: Corpus) -> str:
    """A hash of all that decides what a row comes to."""
    meaning = json.loads(config.model_dump_json())
    for irrelevant in ("name", "links", "exchange", "snapshots", "simulate", "plan"):
        meaning.pop(irrelevant)
    if meaning["model"]["weights"] is None:
        meaning["model"].pop("weights")
    compression = meaning["outer"]["compression"]
    compression.pop("accelerator")
    for cells, cell, usual in (
        (meaning["outer"], "divides_by", "replicas"),
        (compression, "selection", "top_k"),
        (compression, "quantiser", "levels"),
    ):
        if cells[cell] == usual:  # it was not there when the first rows were trained
            cells.pop(cell)
    for replica in meaning["replicas"]:
        for irrelevant in ("hardware", "accelerators"):
            replica.pop(irrelevant)
        for of_an_engine in ("device", "ranks", "nodes", "rendezvous", "torchtitan", "deepspeed"):
            replica.pop(of_an_engine, None)
    for irrelevant in ("corpus", "tokenizer", "stream"):
        meaning["data"].pop(irrelevant)
    meaning["data"]["repeat"] = True  # says whether a row may be trained, not what it comes to
    width = config.model.resolve(corpus.store.vocabulary).width
    for replica, settings in zip(meaning["replicas"], config.replicas, strict=True):
        if isinstance(settings, ParticipantsReplica):
            replica["boundary"]["rank"] = settings.boundary.dimensions(width)  # 1/8 of 64 is 8
    measured = [] if bias_every is None else [f"bias every {bias_every}"]
    text = json.dumps([ENGINE_VERSION, corpus.store.digest, meaning, *measured], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def train_job(job: Job, engine: Engine, ranks: Ranks = ALONE) -> Outcome:
    """Train a row in this process, or with the other ranks of torchrun; the first of them keeps its outcome.

    What was interrupted goes on from its last checkpoint.
    """
    torch.set_num_threads(job.config.threads)
    device = torch.device(engine.device) if ranks.world == 1 else ranks.device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: more digits than bf16, at its speed on large matrices
    store = prepare_tokens(job.config.data, job.cache)
    result = train_fast(
        RunSpec(job.config, store.vocabulary),
        store,
        compiles=engine.compiles,
        bias_every=job.bias_every,
        device=device,
        ranks=ranks,
        checkpoint=job.cache.parent / UNFINISHED / f"{job.key}.pt",
    )
    outcome = {"key": job.key, "seed": job.seed} | _finite(dataclasses.asdict(result))
    if ranks.rank == 0:
        _write(job, outcome)
    return outcome


def _write(job: Job, outcome: Outcome) -> None:
    job.rows.mkdir(parents=True, exist_ok=True)
    temporary = job.path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(outcome))
    temporary.replace(job.path)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
