"""Sources of tokens: a corpus that is encoded once, or one that is streamed. Both give batches and validation rows.

Streamed shards are read with the Hugging Face `datasets` library, which only this file imports. A dataset of the Hub, a
folder with the same layout and a file pattern all become a list of files, each one a shard. The library finds, fetches
and decompresses them. JSON is read as lines and parsed here, because the library's own JSON reader requires one schema
in all files, which web corpora such as DCLM do not have.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.units import format_count
from hetero_pp.data.corpora import Rows, each_once
from hetero_pp.data.readers import bad_utf8, holds_text, names_of_fields, text_of_line, texts_of_column
from hetero_pp.data.settings import STREAMED, DataSettings, is_on_the_hub
from hetero_pp.data.stream import ENCODED_AT_ONCE, NOTHING_HELD_OUT, HeldOut, Order, StreamBatches, TokenStream, encode
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.data.tokens import TokenStore, prepare_tokens

_KEY = ("data", "corpus")
_ROWS = 256  # rows read at once: `datasets` takes 15 times as long if it yields them one by one
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
_FORMATS = {".jsonl": "text", ".json": "text", ".parquet": "parquet"}  # file suffix -> name of the `datasets` reader


class Shards:
    """The documents of one split, as numbered shards."""

    def __init__(
        self,
        files: Sequence[str],
        dataset: Any,
        field: str,
        skips: str = "",
        on_null: Callable[[Rows], object] = lambda _: None,
    ) -> None:
        """Open a split. `on_null` is called at the 1st, 2nd, 4th, 8th, ... null row, with the counts so far."""
        self.rows = Rows()  # counts of the rows read; a row counts again in each epoch
        self._on_null = on_null
        self.count = len(files)
        self.skips = skips  # number of files that are read, and what is skipped, in words; empty if nothing is skipped
        assert dataset.num_shards == self.count
        self._files = files
        self._dataset = dataset.with_format("arrow")
        self._field = field
        if dataset.column_names == []:  # `datasets` was asked for one column, and does not report a missing one
            columns = files[0]
            if Path(columns).suffix == ".parquet":
                import fsspec
                from pyarrow import parquet

                with fsspec.open(files[0], "rb") as opened:
                    columns = f"{files[0]}: {names_of_fields(parquet.read_schema(opened).names)}"
            raise ConfigError(("data", "text_field"), f"found `{field}`, expected a column of {columns}")

    @property
    def fingerprint(self) -> str:
        """A digest that changes with the files: commits of Hub files, sizes and modification times of local files."""
        stamps: list[list[str | int]] = []  # the location on this machine does not matter
        for file in self._files:
            status = path.stat() if (path := Path(file)).exists() else None
            # without a path, a URL of the Hub: hf://datasets/owner/name@COMMIT/...
            stamps.append([file] if status is None else [status.st_size, status.st_mtime_ns])
        return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()

    def documents(self, shard: int, start: int) -> Iterator[str]:
        """Yield the texts of a shard, starting with document `start`. A null text is yielded as an empty string.

        Raises ConfigError if the file cannot be read, lacks the text field, or contains only null there.
        """
        rows = nulls = 0
        for text in self._rows(shard, start):
            rows += 1
            self.rows.read += 1
            if text is None:
                nulls += 1
                self.rows.null += 1
                if self.rows.null & (self.rows.null - 1) == 0:
                    self._on_null(self.rows)
            yield text or ""
        if rows == nulls > start == 0:
            found = f"only null in `{self._field}` ({format_count(rows, 'row')})"
            raise ConfigError(_KEY, f"{self._files[shard]}: found {found}, expected text")

    def _rows(self, shard: int, start: int) -> Iterator[str | None]:
        """Yield the texts of a shard, starting with row `start`, None for null.

        Raises ConfigError if the file cannot be read.
        """
        file = self._files[shard]
        read = _parquet if _format_of(file) == "parquet" else _json_lines
        number = 0
        try:
            for table in self._dataset.shard(self.count, shard).iter(_ROWS):
                skipped = min(max(start - number, 0), len(table))
                yield from read(table[skipped:], file, number + skipped, self._field)
                number += len(table)
        except ConfigError:
            raise
        except UnicodeDecodeError:  # `datasets` names no line, so the file is read again to find it
            import fsspec

            with fsspec.open(file, "rb", compression="infer") as opened:
                raise bad_utf8(file, io.BufferedReader(opened)) from None
        except Exception as error:  # formats, compression and network errors have no common base class
            raise ConfigError(_KEY, f"{file}: cannot be read ({_line(error)})") from error


def _json_lines(table: Any, file: str, number: int, field: str) -> Iterator[str | None]:
    for line in table.column("text").to_pylist():
        number += 1
        yield text_of_line(line, f"{file}:{number}", field) if line.strip() else ""


def _parquet(table: Any, file: str, number: int, field: str) -> Iterator[str | None]:
    column = table.column(field)
    if not holds_text(column.type):
        raise ConfigError(("data", "text_field"), f"found `{field}` of type {column.type} in {file}, expected text")
    return texts_of_column(column, file, number)


def open_splits(settings: DataSettings) -> dict[str, Shards]:
    """Open the splits of the streamed corpus, by name.

    Raises ConfigError if the dataset, folder or file does not exist, or if the library is not installed.
    """
    try:
        from datasets import load_dataset, load_dataset_builder
        from tqdm import tqdm  # comes with datasets
    except ImportError:
        extra = "which needs an optional package: pip install 'hetero-pp[datasets]'"
        raise ConfigError(_KEY, f"found `{settings.corpus}`, {extra}") from None
    tqdm.set_lock(threading.RLock())  # its default is a system semaphore, which leaks when a member exits abruptly
    try:
        with _retries_told_once(settings):
            files, skips = _files_of(settings, load_dataset_builder)
            first = next(iter(files.values()))[0]
            columns = {"columns": [settings.text_field]} if _format_of(first) == "parquet" else {}
            splits = load_dataset(_format_of(first), data_files=files, streaming=True, **columns)
    except ConfigError:
        raise
    except Exception as error:  # a dozen error types, from a missing folder to no network
        expected = f"expected a dataset that can be opened ({_line(error)})"
        raise ConfigError(_KEY, f"found `{settings.corpus}`, {expected}") from error
    field = settings.text_field

    def say(rows: Rows) -> None:
        print(f"{rows.note(settings)} (so far)", file=sys.stderr, flush=True)

    return {str(name): Shards(files[name], splits[name], field, skips[name], say) for name in splits}


def _files_of(
    settings: DataSettings, builder_of: Callable[..., Any]
) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
    """Return the files of each split, each real file once, and a text about skipped files.

    Files that match a pattern are the training split. `builder_of` is load_dataset_builder.
    """
    assert settings.streamed is not None
    path, stream = Path(settings.streamed).expanduser().absolute(), settings.stream
    is_named = is_on_the_hub(settings.streamed)
    if is_named or path.is_dir():
        builder = builder_of(
            path=settings.streamed if is_named else str(path),
            name=stream.subset,
            revision=stream.revision if is_named else None,
        )
        found = builder.config.data_files
    else:
        if stream.subset is not None:
            told = f"found `{stream.subset}`, expected none: files have no subsets"
            raise ConfigError(("data", "stream", "subset"), told)
        matching = sorted(map(str, Path(path.anchor).glob(str(path.relative_to(path.anchor)))))
        if not matching:
            choices = f"`{STREAMED}owner/name`, or a folder, a file or a pattern that exists"
            raise ConfigError(_KEY, f"found `{settings.corpus}`, expected {choices}")
        found = {stream.split: matching}
    kept = {split: each_once(files, settings.streamed) for split, files in found.items()}
    for files, skips in kept.values():
        if not files:
            told = f"({skips.partition('; ')[2]}), expected one to read"
            raise ConfigError(_KEY, f"found no usable file at `{settings.corpus}` {told}")
    skipped = {split: skips for split, (_, skips) in kept.items()}
    # unchanged if nothing is skipped: `datasets` knows more of its own lists than the names
    return {split: files for split, (files, _) in kept.items()} if any(skipped.values()) else found, skipped


@contextmanager
def _retries_told_once(settings: DataSettings) -> Iterator[None]:
    """Print one line in place of the two that the client of the Hub logs for each of its retries."""
    logger, told = logging.getLogger("huggingface_hub.utils._http"), list[str]()

    def tell_first(record: logging.LogRecord) -> bool:
        if not told:
            told.append(f"data.corpus: {settings.corpus}: {record.getMessage()}; trying again for half a minute")
            print(told[0], file=sys.stderr, flush=True)
        return False

    logger.addFilter(tell_first)
    try:
        yield
    finally:
        logger.removeFilter(tell_first)


def _format_of(file: str) -> str:
    """Return the name of the `datasets` reader for a file. Raises ConfigError if there is none."""
    suffixes = [suffix for suffix in Path(file).suffixes if suffix not in _COMPRESSED]
    if not suffixes or suffixes[-1] not in _FORMATS:
        raise ConfigError(_KEY, f"found `{file}`, expected {', '.join(_FORMATS)}, or those compressed (.gz, .zst)")
    return _FORMATS[suffixes[-1]]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
        # Tokens of the documents that are not blank, with a separator after each.
        pieces, missing = [np.empty(0, np.int64)], rows * columns
        full = (text for text in texts if text.strip())
        while missing > 0 and (some := list(islice(full, ENCODED_AT_ONCE))):
            for one in encode(self.tokenizer, some):
                pieces.append(one)
                missing -= len(one)
        ids = np.concatenate(pieces)[: rows * columns]
        if len(ids) < rows * columns:
            raise ConfigError(
                ("data", "stream", key),
                f"found {len(ids)} tokens to validate on ({getattr(stream, key)}), expected at least "
                f"{rows * columns}: {rows} sequences x {columns} tokens",
            )
        return torch.from_numpy(ids.reshape(rows, columns))

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
