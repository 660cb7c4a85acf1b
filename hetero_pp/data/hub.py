"""Streamed shards of documents, by the Hugging Face `datasets` library: the only file that imports it.

A dataset of the Hub, a folder of the same layout and a pattern of files give the same thing: files, each a shard. The
library finds, fetches and decompresses them. Of JSON it reads lines, which are parsed here: its own reader wants one
schema of all fields in all files, which web corpora such as DCLM do not have.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_pp.data.corpora import Rows
from hetero_pp.data.readers import bad_utf8, holds_text, names_of, text_of_line, texts_of_column
from hetero_pp.data.settings import STREAMED, DataSettings, is_on_the_hub
from hetero_pp.data.walk import each_once
from hetero_pp.errors import ConfigError
from hetero_pp.units import format_count

_KEY = ("data", "corpus")
_ROWS = 256
"""Documents read at once: datasets would take 15 times as long to give them one by one."""
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
_FORMATS = {".jsonl": "text", ".json": "text", ".parquet": "parquet"}
"""Suffix of a file -> what of datasets reads it."""


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
        """`on_null` is told of the rows that were read so far at the 1st, 2nd, 4th, 8th, ... row that is null."""
        self.rows = Rows()
        """The rows that were read, in every epoch again."""
        self._on_null = on_null
        self.count = len(files)
        self.skips = skips
        """How many files are read, and what is skipped, in words; empty if nothing is."""
        assert dataset.num_shards == self.count
        self._files = files
        self._dataset = dataset.with_format("arrow")
        self._field = field
        if dataset.column_names == []:  # datasets was asked for one column, and says no more
            raise ConfigError(("data", "text_field"), f"found `{field}`, expected a column of {_columns_of(files[0])}")

    @property
    def fingerprint(self) -> str:
        """A digest that differs where the files do: of the Hub's with their commit, of others by size and time."""
        return hashlib.sha256(json.dumps([_stamp(file) for file in self._files]).encode()).hexdigest()

    def documents(self, shard: int, start: int) -> Iterator[str]:
        """The texts of a shard from document `start` on; one that is null is empty.

        Raises ConfigError if the file cannot be read, has no text in the field, or has only null there.
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
        """The texts of a shard from row `start` on, None for null. Raises ConfigError if the file cannot be read."""
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
        except Exception as error:  # formats, compression and the network raise their own, with no common base
            raise ConfigError(_KEY, f"{file}: cannot be read ({_line(error)})") from error


def _columns_of(file: str) -> str:
    """The file and the names of its columns; of one that is compressed as a whole the file alone."""
    if Path(file).suffix != ".parquet":
        return file
    import fsspec
    from pyarrow import parquet

    with fsspec.open(file, "rb") as opened:
        return f"{file}: {names_of(parquet.read_schema(opened).names)}"


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
    """The error for lines that are not UTF-8. `datasets` names no line, so the file is read again to find it."""
    import fsspec

    with fsspec.open(file, "rb", compression="infer") as opened:
        return bad_utf8(file, io.BufferedReader(opened))


def open_splits(settings: DataSettings) -> dict[str, Shards]:
    """The splits of the streamed corpus by name.

    Raises ConfigError if there is no such dataset, folder or file, or if the library is not installed.
    """
    try:
        from datasets import load_dataset, load_dataset_builder
        from tqdm import tqdm  # comes with datasets
    except ImportError:
        extra = "which needs an extra: pip install 'hetero-pp[datasets]'"
        raise ConfigError(_KEY, f"found `{settings.corpus}`, {extra}") from None
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which members that just end would leak
    try:
        found = _matching(settings) or load_dataset_builder(**_dataset(settings)).config.data_files
        files, skips = _each_once(found, settings)
        first = next(iter(files.values()))[0]
        columns = {"columns": [settings.text_field]} if _format_of(first) == "parquet" else {}
        splits = load_dataset(_format_of(first), data_files=files, streaming=True, **columns)
    except ConfigError:
        raise
    except Exception as error:  # a dozen kinds, from a missing folder to no network
        expected = f"expected a dataset that can be opened ({_line(error)})"
        raise ConfigError(_KEY, f"found `{settings.corpus}`, {expected}") from error
    field = settings.text_field

    def say(rows: Rows) -> None:
        print(f"{rows.note(settings)} (so far)", file=sys.stderr, flush=True)

    return {str(name): Shards(files[name], splits[name], field, skips[name], say) for name in splits}


def _each_once(
    found: Mapping[str, Sequence[str]], settings: DataSettings
) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
    """The files of each split, each real file once, and in words what is skipped. Raises ConfigError if none is."""
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
    """What load_dataset_builder is called with for a dataset of the Hub, or for a folder like one."""
    assert settings.streamed is not None
    is_named = is_on_the_hub(settings.streamed)
    path = settings.streamed if is_named else str(Path(settings.streamed).expanduser().absolute())
    return {"path": path, "name": settings.stream.subset, "revision": settings.stream.revision if is_named else None}


def _matching(settings: DataSettings) -> Mapping[str, list[str]]:
    """The files of a pattern, as the split to train on; empty if the corpus is a dataset or a folder like one."""
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
    """What of datasets reads a file. Raises ConfigError if nothing does."""
    suffixes = [suffix for suffix in Path(file).suffixes if suffix not in _COMPRESSED]
    if not suffixes or suffixes[-1] not in _FORMATS:
        raise ConfigError(_KEY, f"found `{file}`, expected {', '.join(_FORMATS)}, or those compressed (.gz, .zst)")
    return _FORMATS[suffixes[-1]]


def _stamp(file: str) -> Sequence[str | int]:
    """What tells a file from another one in its place; where it lies on this machine does not matter."""
    path = Path(file)
    if not path.exists():
        return [file]  # a URL of the Hub: hf://datasets/owner/name@COMMIT/...
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
