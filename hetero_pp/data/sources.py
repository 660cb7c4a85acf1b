"""Sources of tokens: a corpus that is encoded once, or one that is streamed. Both give batches and validation rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.units import format_count
from hetero_pp.data.hub import Shards, open_splits
from hetero_pp.data.order import NOTHING_HELD_OUT, HeldOut, Order
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.stream import ENCODED_AT_ONCE, StreamBatches, TokenStream, encode
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.data.tokens import TokenStore, prepare_tokens


class StreamedCorpus:
    """Corpus that is read during training. Opening it reads only the list of its files."""

    def __init__(self, settings: DataSettings, tokenizer: Tokenizer | None = None) -> None:
        """Open the corpus. Raises ConfigError if it cannot be opened or has no such split."""
        self.settings = settings
        self.tokenizer = tokenizer or load_tokenizer(settings)
        self._splits = open_splits(settings)
        self._training = self._split("split", settings.stream.split)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including the separator."""
        return self.tokenizer.vocabulary

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to show to the user, about the tokenizer and about skipped files."""
        skips = [f"data.corpus: {self.settings.corpus}: {self._training.skips}"] if self._training.skips else []
        return (*self.tokenizer.notes, *skips)

    def describe(self, tokens: int | None) -> str:
        """Describe the corpus for training on `tokens` tokens; None if their number is unknown."""
        wanted = "" if tokens is None else f"{tokens:,} tokens from "
        return f"{wanted}a stream of {format_count(self._training.count, 'shard')}"

    def batches(self, sequence_length: int, seed: int, replica: int, replicas: int, batch_size: int) -> StreamBatches:
        stream = self.settings.stream
        order = Order(
            shards=self._training,
            seed=seed,
            replica=replica,
            replicas=replicas,
            shuffle_buffer=stream.shuffle_buffer,
            held_out=NOTHING_HELD_OUT if stream.validation_split is not None else self._held_out,
        )
        return StreamBatches(TokenStream(order, self.tokenizer, self.settings.repeat), sequence_length, batch_size)

    def validation(self, batch_size: int) -> list[torch.Tensor]:
        """Return the validation rows, int64 [<= batch_size, L + 1], which are equal on all hosts.

        Raises ConfigError if there are too few.
        """
        return list(self._validation.split(batch_size))

    @cached_property
    def digest(self) -> str:
        """Sha256 over a sample: tokenizer, number of shards, start of the first and last shard, and validation rows.

        Corpora with different digests differ. Corpora that differ only elsewhere have equal digests.
        """
        shards = self._training
        begin = [next(shards.documents(shard, 0), "") for shard in (0, shards.count - 1)]
        rows = hashlib.sha256(self._validation.numpy().astype("<i8").tobytes()).hexdigest()
        text = json.dumps([self.tokenizer.identity, self.tokenizer.separator, shards.count, begin, rows])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the files and of the streaming settings, which determine every token for a given tokenizer.

        No text is read. Files that were rewritten have another fingerprint, even if their text is the same.
        """
        files = [shards.fingerprint for _, shards in sorted(self._splits.items())]
        stream = self.settings.stream.model_dump(mode="json", exclude={"revision"})
        return hashlib.sha256(json.dumps([files, stream], sort_keys=True).encode()).hexdigest()

    @cached_property
    def _held_out(self) -> HeldOut:
        """The documents to validate on if there is no validation split: at the start of the first shard with text."""
        shards = self._training
        full = (shard for shard in range(shards.count) if any(text.strip() for text in shards.documents(shard, 0)))
        return HeldOut(next(full, 0), self.settings.stream.validation_documents)

    @cached_property
    def _validation(self) -> torch.Tensor:
        """First tokens of the validation split or of the held-out documents, int64 [validation_sequences, L + 1]."""
        rows, columns = self.settings.validation_sequences, self.settings.sequence_length + 1
        stream = self.settings.stream
        texts: Iterator[str]
        if stream.validation_split is None:
            key, (shard, documents) = "validation_documents", self._held_out
            texts = islice(self._training.documents(shard, 0), documents)
        else:
            key, split = "validation_split", self._split("validation_split", stream.validation_split)
            texts = chain.from_iterable(split.documents(shard, 0) for shard in range(split.count))
        ids = self._encode(texts, rows * columns)
        if len(ids) < rows * columns:
            raise ConfigError(
                ("data", "stream", key),
                f"found {len(ids)} tokens to validate on ({getattr(stream, key)}), expected at least "
                f"{rows * columns}: {rows} sequences x {columns} tokens",
            )
        return torch.from_numpy(ids.reshape(rows, columns))

    def _encode(self, texts: Iterator[str], count: int) -> np.ndarray:
        """Return up to `count` tokens of the documents that are not blank, with a separator after each document."""
        pieces = [np.empty(0, np.int64)]
        missing = count
        full = (text for text in texts if text.strip())
        while missing > 0 and (some := list(islice(full, ENCODED_AT_ONCE))):
            for ids in encode(self.tokenizer, some):
                pieces.append(ids)
                missing -= len(ids)
        return np.concatenate(pieces)[:count]

    def _split(self, key: str, name: str) -> Shards:
        if name not in self._splits:
            raise ConfigError(("data", "stream", key), f"found `{name}`, expected one of {', '.join(self._splits)}")
        return self._splits[name]


Source = TokenStore | StreamedCorpus


def tokens_digest(source: Source | None) -> str:
    """Return the digest by which hosts verify that they read the same tokens; empty without a TokenStore."""
    return source.digest if isinstance(source, TokenStore) else ""


def open_source(settings: DataSettings, cache: Path, on_progress: OnProgress = untold) -> Source:
    """Open the corpus of `data.corpus`: as a stream, or encoded into `cache` unless it is there already."""
    if settings.streamed is None:
        return prepare_tokens(settings, cache, on_progress=on_progress)
    return StreamedCorpus(settings)
