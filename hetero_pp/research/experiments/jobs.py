"""A row at one seed, trained once for all tables that need it: its key, its outcome, its training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hetero_pp.core.files import keep_trying
from hetero_pp.data.sources import open_source
from hetero_pp.research.experiments.corpus import Corpus
from hetero_pp.research.experiments.definition import Row
from hetero_pp.research.experiments.identity import settings_of
from hetero_pp.research.experiments.outcomes import Outcome, add_outcome
from hetero_pp.research.experiments.provenance import commit, machine
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.replica import constraint_of
from hetero_pp.research.trainer.train import FastResult, train_fast
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from replica_groups.engines.ranks import ALONE, Ranks

OUTCOME_VERSION = 1
"""Version of outcomes. Raise it if a change, even of a default, alters outcomes by more than rounding.

Rows of older versions are trained again.
"""

UNFINISHED = ".rows"
"""Folder of checkpoints of unfinished rows, beside the runs."""


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

    def outcome(self, result: FastResult, device: torch.device, commit: str) -> Outcome:
        """Return a result of this machine as a record for the file of outcomes."""
        named = {"row": f"{self.experiment}: {self.name}", "seed": self.seed, "key": self.key}
        trained = {"machine": machine(), "device": device.type, "commit": commit}
        return {**named, **self.identity, **_finite(dataclasses.asdict(result)), **trained}


@dataclass(frozen=True)
class RowTraining:
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


_BESIDE = ("similarity_every", "volume_every", "outer_every")
_IDENTITY = ("version", "corpus", "tokenizer", "steps_of", "bias_every", "bias_of", "settings")


def known_outcomes(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return outcomes by key.

    An outcome with extra measurements is also listed under the key of the row without them, because measuring does not
    affect training.
    """
    measured = [one for one in outcomes.values() if any(part in one for part in _BESIDE)]
    plain = {key_of({part: one[part] for part in _IDENTITY if part in one}): one for one in measured}
    return plain | dict(outcomes)


OnRound = Callable[[int, float], None]
"""Callback with (round, validation loss)."""


def train_job(
    job: Job, training: RowTraining, ranks: Ranks = ALONE, on_round: OnRound = lambda round_, loss: None
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
    outcomes: list[Outcome] = []

    def keep(result: FastResult) -> None:
        outcomes.append(job.outcome(result, device, began_at))
        if ranks.rank == 0:
            keep_trying(partial(add_outcome, job.rows, outcomes[0]), partial(_say, job))

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
    return outcomes[0]


def _say(job: Job, line: str) -> None:
    print(f"{job.name}, seed {job.seed}: its outcome is not saved yet: {line}", file=sys.stderr, flush=True)


@cache
def _own_commit() -> str:
    """Return the commit at the first call, because the checkout may change while imported code trains."""
    return commit()


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
