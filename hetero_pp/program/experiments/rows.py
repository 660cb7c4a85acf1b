"""A row at a scale and a seed: its configuration, its key, and its training, once and for all tables that need it."""

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

from pydantic import ValidationError

from hetero_pp.data.corpora import documents, fingerprint
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.errors import ConfigError
from hetero_pp.program.config import RunConfig, RunPlan
from hetero_pp.program.experiments.definition import Experiment, Row, Scale
from hetero_pp.topology import ParticipantsReplica

ENGINE_VERSION = 1
"""Raised when a change alters what a row comes to: rows of another version are trained again."""

Outcome = dict[str, Any]
"""A FastResult as JSON, with `key` and `seed`."""


@dataclass(frozen=True)
class Job:
    """One row to train: everything a worker process needs."""

    name: str
    seed: int
    config: RunConfig
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


def why_not(scale: Scale, row: Row) -> str | None:
    """Why a row cannot be trained at a scale; None if it can."""
    if isinstance(row.rank, float):
        width = RunConfig.model_validate(row_values(scale, row, 0, None, "bytes")).model.resolve(scale.vocabulary).width
        if row.rank * width < 1:
            return f"not representable: k = {row.rank * width:.2g} of {width} dimensions"
    return None if scale.trains else "validated only at this scale"


def row_values(scale: Scale, row: Row, seed: int, corpus: str | None, tokenizer: str) -> dict[str, Any]:
    """The row's configuration, as the YAML of a run would say it."""
    values = json.loads(json.dumps(scale.base)) | {"name": "row", "seed": seed}
    values["data"] |= {"tokenizer": tokenizer} | ({} if corpus is None else {"corpus": corpus})
    values["outer"]["rounds"] = round(values["outer"]["rounds"] * row.budget)
    for dotted, value in row.cells.items():
        node, (*parents, last) = values, dotted.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    count = row.replicas or scale.replicas
    compressed = row.compressed_replicas(count)
    boundary = {"rank": row.rank, "bits": row.bits, "ablations": row.ablations}
    values["replicas"] = [
        {"name": f"r{index}", "batch_size": scale.batch_size}
        | (
            {"kind": "participants", "stages": scale.stages, "boundary": boundary}
            if index < compressed
            else {"kind": "datacenter"}
        )
        for index in range(count)
    ]
    return values


def row_config(scale: Scale, row: Row, seed: int, corpus: str | None, tokenizer: str) -> RunConfig:
    """The row's configuration, checked. Raises ConfigError naming the row."""
    try:
        config = RunConfig.model_validate(row_values(scale, row, seed, corpus, tokenizer))
        config.check()
    except ValidationError as error:
        raise ConfigError((), f"row `{row.name}`: {' '.join(str(error).split())}") from None
    return config


def make_job(
    scale: Scale,
    experiment: Experiment,
    row: Row,
    seed: int,
    corpus: str | None,
    store: TokenStore,
    tokenizer: Path,
    rows: Path,
) -> Job:
    """The job of a row; `store` holds the encoded corpus, `rows` is where outcomes are kept."""
    config = row_config(scale, row, seed, corpus or experiment.corpus, str(tokenizer))
    meaning = json.loads(config.model_dump_json())
    for irrelevant in ("name", "links", "exchange", "snapshots"):
        meaning.pop(irrelevant)
    for path in ("corpus", "tokenizer"):
        meaning["data"].pop(path)
    width = config.model.resolve(store.vocabulary).width
    for replica, settings in zip(meaning["replicas"], config.replicas, strict=True):
        if isinstance(settings, ParticipantsReplica):
            replica["boundary"]["rank"] = settings.boundary.dimensions(width)  # 1/8 of 64 is 8
    text = json.dumps([ENGINE_VERSION, store.digest, meaning], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    return Job(row.name, seed, config, store.path.parent, rows, key)


def train_job(job: Job) -> Outcome:
    """Train a row, unless that was done before; keeps its outcome."""
    import torch

    from hetero_pp.program.fast import train_fast

    known = job.outcome()
    if known is not None:
        return known
    torch.set_num_threads(1)
    store = prepare_tokens(job.config.data, job.cache)
    result = train_fast(RunPlan(job.config, store.vocabulary), store)
    outcome = {"key": job.key, "seed": job.seed} | _finite(dataclasses.asdict(result))
    job.rows.mkdir(parents=True, exist_ok=True)
    temporary = job.path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(outcome))
    temporary.replace(job.path)
    return outcome


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def prepare_tokenizer(data: DataSettings, vocabulary: int, cache: Path) -> Path:
    """A byte-pair encoding of the corpus with this many tokens, trained once and kept in `cache`."""
    name = hashlib.sha256(f"{fingerprint(data)}/{vocabulary}".encode()).hexdigest()[:24]
    path = cache / f"bpe-{vocabulary}-{name}.json"
    if not path.exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents(data), trainer)
        cache.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(temporary))
        temporary.replace(path)
    return path


def require_enough(config: RunConfig, store: TokenStore) -> None:
    """Raise ConfigError, saying how many tokens are lacking, if the corpus may not be repeated and is too small."""
    per_row = config.outer.rounds * config.inner.steps * (config.data.sequence_length + 1)
    needed = per_row * sum(replica.batch_size for replica in config.replicas)
    if not config.data.repeat and needed > len(store.train):
        raise ConfigError(
            ("data", "corpus"),
            f"found {len(store.train):,} tokens, expected {needed:,}: {needed - len(store.train):,} are lacking "
            "(or allow to repeat the corpus)",
        )
