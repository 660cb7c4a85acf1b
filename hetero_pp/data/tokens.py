"""The token store: a corpus, encoded once, as one memory-mapped file of ids.

Documents stand in the order of the sha256 of their text. That is a random order which depends on nothing but
the documents, so names of files, folders and machines do not matter, and the validation part at the end of
the file is a random sample of the documents (equal documents are neighbours: hardly one is in both parts).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hetero_pp.data.corpora import Rows, documents, fingerprint
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.errors import ConfigError
from hetero_pp.files import file_sha256, naming, rename_whole, write_whole
from hetero_pp.progress import OnProgress, untold
from hetero_pp.units import format_number

_FORMAT = 1
_ROWS = ".rows.json"
_BATCH_CHARACTERS = 1 << 20

Span = tuple[bytes, int, int]
"""A document: (sha256 of its text, its first token, the one after its last)."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The ids of a corpus: two parts that share no token, for training and for validation.

    `digest` is the sha256 of the file: two members that have the same read the same tokens.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    path: Path
    digest: str
    notes: tuple[str, ...] = ()
    """Lines that the user has to see: of the tokenizer, and of rows without text."""

    def describe(self, tokens: int | None) -> str:
        """What there is to train `tokens` tokens on, in words; None where their number is not known."""
        epochs = "" if tokens is None else f" ({format_number(tokens / len(self.train), 2)} epochs)"
        return f"{len(self.train):,} tokens to train on{epochs}, {len(self.validation):,} to validate on"


def prepare_tokens(
    settings: DataSettings, cache: Path, tokenizer: Tokenizer | None = None, on_progress: OnProgress = untold
) -> TokenStore:
    """Open the token store of the corpus, encoding it into `cache` unless that was done before.

    `tokenizer` is by default the one that the settings name. Several processes may call this at once: each
    writes a file of its own, the files are equal, and renaming one to its final name replaces it whole.
    """
    tokenizer = tokenizer or load_tokenizer(settings)
    key = json.dumps([_FORMAT, fingerprint(settings), tokenizer.identity, tokenizer.separator])
    path = cache / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with naming(path), TemporaryDirectory(prefix="encoding-", dir=cache, ignore_cleanup_errors=True) as scratch:
            rows = Rows()
            texts = documents(settings, partial(on_progress, "encoding the corpus"), rows)
            written = _write(Path(scratch), texts, tokenizer, on_progress)
            _keep_rows(path, rows)
            rename_whole(written, path)
    with naming(path):
        tokens = np.load(path, mmap_mode="r")
    held_out = round(len(tokens) * settings.validation_share)
    if not 0 < held_out < len(tokens):
        raise ConfigError(
            ("data", "validation_share"),
            f"found {settings.validation_share:g}, expected at least one of the {len(tokens)} tokens on either side",
        )
    return TokenStore(
        train=tokens[:-held_out],
        validation=tokens[-held_out:],
        vocabulary=tokenizer.vocabulary,
        path=path,
        digest=_digest(path),
        notes=(*tokenizer.notes, *_kept_rows(path, settings)),
    )


def _keep_rows(path: Path, rows: Rows) -> None:
    """Write beside the tokens how many rows have no text, for processes that find the tokens encoded."""
    if rows.null:
        write_whole(path.with_suffix(_ROWS), json.dumps(asdict(rows)).encode())


def _kept_rows(path: Path, settings: DataSettings) -> Iterator[str]:
    """Say in one line how many rows were skipped, if any were."""
    beside = path.with_suffix(_ROWS)
    if beside.is_file():
        yield Rows(**json.loads(beside.read_text(encoding="utf-8"))).note(settings)


def _write(scratch: Path, texts: Iterable[str], tokenizer: Tokenizer, on_progress: OnProgress) -> Path:
    """Encode the documents in the order they come, then copy them in the order of their digests."""
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    unordered = scratch / "unordered"
    spans = _encode(texts, tokenizer, dtype, unordered)
    source = np.memmap(unordered, dtype=dtype, mode="r")
    path = scratch / "tokens.npy"
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": source.shape}
    end = 0
    with path.open("wb") as file:  # not mapped into memory: a disk that is full would kill the process
        np.lib.format.write_array_header_1_0(file, header)
        for _, first, last in sorted(spans):
            file.write(source[first:last].data)
            end += last - first
            on_progress("ordering its documents", end / len(source))
    return path


def _encode(texts: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype, path: Path) -> list[Span]:
    """Write every document and a separator to a raw file; where each of them is."""
    separator = np.array([tokenizer.separator], dtype)
    spans = []
    end = 0
    with path.open("wb") as file:
        for batch in _batched(texts):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                file.write(np.concatenate([ids.astype(dtype), separator]).data)
                spans.append((hashlib.sha256(text.encode()).digest(), end, end + len(ids) + 1))
                end += len(ids) + 1
    return spans


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents that fit in memory, unless one alone does not."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _digest(path: Path) -> str:
    """The sha256 of a file, kept beside it in the format of `sha256sum`."""
    beside = path.with_suffix(".sha256")
    if beside.exists():
        with naming(beside):
            return beside.read_text(encoding="utf-8").split()[0]
    digest = file_sha256(path)
    with suppress(OSError):  # else it is computed again by who needs it next
        write_whole(beside, f"{digest}  {path.name}\n".encode())
    return digest
