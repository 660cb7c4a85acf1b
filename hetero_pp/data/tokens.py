"""The token store: a corpus, encoded once, as one memory-mapped file of ids.

Documents are sorted by the sha256 of their text. This random order depends on nothing but the documents, so the names
of files, folders and machines do not matter. The validation part at the end of the file is a random sample of the
documents. Equal documents are adjacent, so hardly any document is in both parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import file_sha256, naming, rename_whole, write_whole
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.units import format_number
from hetero_pp.data.corpora import Listing, Rows, documents, fingerprint, list_corpus, place_of, skipped_files
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import CannotEncode, Tokenizer, load_tokenizer

_FORMAT = 1
_ROWS = ".rows.json"
_BATCH_CHARACTERS = 1 << 20

Span = tuple[bytes, int, int]  # a document: (sha256 of its text, index of its first token, index after its last token)


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The ids of a corpus in two disjoint parts, for training and for validation.

    `digest` is the sha256 of the file: members with equal digests read the same tokens.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    path: Path
    digest: str
    notes: tuple[str, ...] = ()  # lines for the user about skipped files, the tokenizer, and rows without text

    def describe(self, tokens: int | None) -> str:
        """Describe the data for a run of `tokens` tokens in words; None if that number is unknown."""
        epochs = "" if tokens is None else f" ({format_number(tokens / len(self.train), 2)} epochs)"
        return f"{len(self.train):,} tokens to train on{epochs}, {len(self.validation):,} to validate on"


def prepare_tokens(
    settings: DataSettings, cache: Path, tokenizer: Tokenizer | None = None, on_progress: OnProgress = untold
) -> TokenStore:
    """Open the token store of the corpus. Encode the corpus into `cache` if that was not done before.

    `tokenizer` defaults to the one in the settings. Several processes may call this at once: each writes its own file,
    the files are equal, and each is renamed atomically to the final name.
    """
    tokenizer = tokenizer or load_tokenizer(settings)
    listing = list_corpus(settings)
    path = _path_of(settings, cache, tokenizer, listing)
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with naming(path), TemporaryDirectory(prefix="encoding-", dir=cache, ignore_cleanup_errors=True) as scratch:
            rows = Rows()
            texts = documents(settings, partial(on_progress, "encoding the corpus"), rows, listing)
            written = _write(Path(scratch), texts, tokenizer, on_progress, partial(place_of, settings, listing))
            if rows.null:  # kept beside the tokens, for processes that find them already encoded
                write_whole(path.with_suffix(_ROWS), json.dumps(asdict(rows)).encode())
            rename_whole(written, path)
    with naming(path):
        tokens = np.load(path, mmap_mode="r")
    notes = [one for one in (skipped_files(settings, listing),) if one] + list(tokenizer.notes)
    if (beside := path.with_suffix(_ROWS)).is_file():
        notes.append(Rows(**json.loads(beside.read_text(encoding="utf-8"))).note(settings))
    held_out = round(len(tokens) * settings.validation_share)
    if not 0 < held_out < len(tokens):
        raise ConfigError(
            ("data", "validation_share"),
            f"found {settings.validation_share:g}, expected at least one of the {len(tokens)} tokens for "
            "training and one for validation",
        )
    return TokenStore(
        train=tokens[:-held_out],
        validation=tokens[-held_out:],
        vocabulary=tokenizer.vocabulary,
        path=path,
        digest=_digest(path),
        notes=tuple(notes),
    )


def is_encoded(settings: DataSettings, cache: Path) -> bool:
    """Return whether the corpus was encoded into `cache` before."""
    return _path_of(settings, cache, load_tokenizer(settings), list_corpus(settings)).exists()


def _path_of(settings: DataSettings, cache: Path, tokenizer: Tokenizer, listing: Listing) -> Path:
    key = json.dumps([_FORMAT, fingerprint(settings, listing), tokenizer.identity, tokenizer.separator])
    return cache / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"


def _write(
    scratch: Path, texts: Iterable[str], tokenizer: Tokenizer, on_progress: OnProgress, where: Callable[[int], str]
) -> Path:
    """Encode the documents in the order in which they arrive, then copy them in the order of their digests.

    `where` names the document of a number, from 0.
    """
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    separator, spans, end = np.array([tokenizer.separator], dtype), list[Span](), 0
    unordered, path = scratch / "unordered", scratch / "tokens.npy"
    with unordered.open("wb") as file:
        for batch in _batched(texts):
            try:
                encoded = tokenizer.encode_batch(batch)
            except CannotEncode as error:
                raise error.of(where(len(spans) + error.index)) from None
            for text, ids in zip(batch, encoded, strict=True):
                file.write(np.concatenate([ids.astype(dtype), separator]).data)
                spans.append((hashlib.sha256(text.encode()).digest(), end, end + len(ids) + 1))
                end += len(ids) + 1
    source = np.memmap(unordered, dtype=dtype, mode="r")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": source.shape}
    end = 0
    with path.open("wb") as file:  # not memory-mapped: a full disk would kill the process
        np.lib.format.write_array_header_1_0(file, header)
        for _, first, last in sorted(spans):
            file.write(source[first:last].data)
            end += last - first
            on_progress("ordering its documents", end / len(source))
    return path


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents of about `_BATCH_CHARACTERS` characters, so that they fit in memory."""
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _digest(path: Path) -> str:
    """Return the sha256 of a file, cached beside it in the format of `sha256sum`."""
    beside = path.with_suffix(".sha256")
    if beside.exists():
        with naming(beside):
            return beside.read_text(encoding="utf-8").split()[0]
    digest = file_sha256(path)
    with suppress(OSError):  # otherwise the next process computes it again
        write_whole(beside, f"{digest}  {path.name}\n".encode())
    return digest
