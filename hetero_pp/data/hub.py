"""Streamed shards of documents, read with the Hugging Face `datasets` library. Only this file imports the library.

A dataset of the Hub, a folder with the same layout and a file pattern all become a list of files, each one a shard. The
library finds, fetches and decompresses them. JSON is read as lines and parsed here. The library's own JSON reader
requires one schema in all files, which web corpora such as DCLM do not have.
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
from pathlib import Path
from typing import Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count
from hetero_pp.data.corpora import Rows
from hetero_pp.data.readers import bad_utf8, holds_text, names_of_fields, text_of_line, texts_of_column
from hetero_pp.data.settings import STREAMED, DataSettings, is_on_the_hub
from hetero_pp.data.walk import each_once

_KEY = ("data", "corpus")
_ROWS = 256
"""Rows read at once: `datasets` takes 15 times as long if it yields them one by one."""
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
_FORMATS = {".jsonl": "text", ".json": "text", ".parquet": "parquet"}
"""File suffix -> name of the `datasets` reader."""


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
        self.rows = Rows()
        """Counts of the rows read; a row counts again in each epoch."""
        self._on_null = on_null
        self.count = len(files)
        self.skips = skips
        """Number of files that are read, and what is skipped, in words; empty if nothing is skipped."""
        assert dataset.num_shards == self.count
        self._files = files
        self._dataset = dataset.with_format("arrow")
        self._field = field
        if dataset.column_names == []:  # `datasets` was asked for one column, and does not report a missing one
            raise ConfigError(("data", "text_field"), f"found `{field}`, expected a column of {_columns_of(files[0])}")

    @property
    def fingerprint(self) -> str:
        """A digest that changes with the files: commits of Hub files, sizes and modification times of local files."""
        return hashlib.sha256(json.dumps([_stamp(file) for file in self._files]).encode()).hexdigest()

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
        except UnicodeDecodeError:
            raise _bad_line(file) from None
        except Exception as error:  # formats, compression and network errors have no common base class
            raise ConfigError(_KEY, f"{file}: cannot be read ({_line(error)})") from error


def _columns_of(file: str) -> str:
    """Return the file and its column names, for an error message; only the file if it is not a plain .parquet file."""
    if Path(file).suffix != ".parquet":
        return file
    import fsspec
    from pyarrow import parquet

    with fsspec.open(file, "rb") as opened:
        return f"{file}: {names_of_fields(parquet.read_schema(opened).names)}"


def _json_lines(table: Any, file: str, number: int, field: str) -> Iterator[str | None]:
    for line in table.column("text").to_pylist():
        number += 1
        yield text_of_line(line, f"{file}:{number}", field) if line.strip() else ""


def _parquet(table: Any, file: str, number: int, field: str) -> Iterator[str | None]:
    column = table.column(field)
    if not holds_text(column.type):
        raise ConfigError(("data", "text_field"), f"found `{field}` of type {column.type} in {file}, expected text")
    return texts_of_column(column, file, number)


def _bad_line(file: str) -> ConfigError:
    """Return the error for lines that are not UTF-8. `datasets` names no line, so the file is read again to find it."""
    import fsspec

    with fsspec.open(file, "rb", compression="infer") as opened:
        return bad_utf8(file, io.BufferedReader(opened))


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
            found = _matching(settings) or load_dataset_builder(**_dataset(settings)).config.data_files
            files, skips = _each_once(found, settings)
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


def _each_once(
    found: Mapping[str, Sequence[str]], settings: DataSettings
) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
    """Return the files of each split, each real file once, and a text about skipped files.

    Raises ConfigError if a split has no usable file.
    """
    assert settings.streamed is not None
    kept = {split: each_once(files, settings.streamed) for split, files in found.items()}
    for files, skips in kept.values():
        if not files:
            raise ConfigError(
                _KEY, f"found no usable file at `{settings.corpus}` ({skips.partition('; ')[2]}), expected one to read"
            )
    skipped = {split: skips for split, (_, skips) in kept.items()}
    return {split: files for split, (files, _) in kept.items()} if any(skipped.values()) else found, skipped


def _dataset(settings: DataSettings) -> dict[str, Any]:
    """Return the arguments of load_dataset_builder for a dataset of the Hub or a folder with the same layout."""
    assert settings.streamed is not None
    is_named = is_on_the_hub(settings.streamed)
    path = settings.streamed if is_named else str(Path(settings.streamed).expanduser().absolute())
    return {"path": path, "name": settings.stream.subset, "revision": settings.stream.revision if is_named else None}


def _matching(settings: DataSettings) -> Mapping[str, list[str]]:
    """Return the files that match a pattern, as the training split; empty if the corpus is a dataset or a folder."""
    assert settings.streamed is not None
    path = Path(settings.streamed).expanduser().absolute()
    if is_on_the_hub(settings.streamed) or path.is_dir():
        return {}
    if settings.stream.subset is not None:
        raise ConfigError(
            ("data", "stream", "subset"), f"found `{settings.stream.subset}`, expected none: files have no subsets"
        )
    files = sorted(map(str, Path(path.anchor).glob(str(path.relative_to(path.anchor)))))
    if not files:
        choices = f"`{STREAMED}owner/name`, or a folder, a file or a pattern that exists"
        raise ConfigError(_KEY, f"found `{settings.corpus}`, expected {choices}")
    return {settings.stream.split: files}


def _format_of(file: str) -> str:
    """Return the name of the `datasets` reader for a file. Raises ConfigError if there is none."""
    suffixes = [suffix for suffix in Path(file).suffixes if suffix not in _COMPRESSED]
    if not suffixes or suffixes[-1] not in _FORMATS:
        raise ConfigError(_KEY, f"found `{file}`, expected {', '.join(_FORMATS)}, or those compressed (.gz, .zst)")
    return _FORMATS[suffixes[-1]]


def _stamp(file: str) -> Sequence[str | int]:
    """Return the identity of a file's content; its location on this machine does not matter."""
    path = Path(file)
    if not path.exists():
        return [file]  # a URL of the Hub: hf://datasets/owner/name@COMMIT/...
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
