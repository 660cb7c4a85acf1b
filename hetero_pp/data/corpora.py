"""Corpora: the documents that `data.corpus` names, as a stream, and a quick fingerprint of them."""

from __future__ import annotations

import hashlib
import json
import stat
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count
from hetero_pp.data.prose import package_folders
from hetero_pp.data.readers import OnShare, readers_of
from hetero_pp.data.settings import DOCSTRINGS, INSTALLED, PROSE, STREAMED, DataSettings
from hetero_pp.data.walk import Listing, list_files

_KEY = ("data", "corpus")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
_STREAMED_ONLY = {(".jsonl", ".gz"), (".jsonl", ".zst"), (".json", ".gz"), (".json", ".zst")}
"""File endings that only a streamed corpus can read."""


@dataclass
class Rows:
    """Number of rows read from a corpus, and number of rows with a null text."""

    read: int = 0
    null: int = 0

    def note(self, settings: DataSettings) -> str:
        """Say in one line how many rows were skipped; empty if none were."""
        skipped = f"skipped {self.null:,} of {format_count(self.read, 'row')}: `{settings.text_field}` is null"
        return f"data.corpus: {settings.corpus}: {skipped}" if self.null else ""


def documents(
    settings: DataSettings, on_share: OnShare = lambda _: None, rows: Rows | None = None, listing: Listing | None = None
) -> Iterator[str]:
    """Yield the documents of the corpus that are not blank, file by file in the order of the files' names.

    Rows with a null text are skipped and counted in `rows`. `listing`: the corpus's files, if they are listed already.
    Raises ConfigError for an unreadable file, for a file with null rows only, and for a corpus without any document.
    """
    found, listing = False, listing or list_corpus(settings)
    for text in _documents_of(listing.files, settings, on_share, rows or Rows()):
        found = True
        yield text
    if not found:
        skips = f" ({listing.skips()})" if listing.skips() else ""
        raise ConfigError(_KEY, f"found no text in `{settings.corpus}`{skips}, expected at least one document")


def place_of(settings: DataSettings, listing: Listing, index: int) -> str:
    """Return the name of a document for an error message; `index` is its number in the corpus, from 0."""
    for path in listing.files:
        for number, _ in enumerate(_documents_of([path], settings, lambda _: None, Rows())):
            if index == 0:
                return f"document {number + 1:,} of {path}"
            index -= 1
    return "a document that has just been removed"


def sample(settings: DataSettings, size: int) -> tuple[list[str], float]:
    """Return documents of some files, spread evenly over all files, and their share of the corpus.

    The files amount to about `size` bytes, or to all if there are fewer. From one large file, it takes the
    first documents.
    """
    files = list_corpus(settings).files
    whole = _bytes_of(files)
    some = files[:: max(1, whole // size)]
    part = _bytes_of(some) / whole
    texts: list[str] = []
    read = [(0, 0.0)]
    """Pairs (number of texts so far, share of these files that was read)."""
    for text in _documents_of(some, settings, lambda share: read.append((len(texts), share)), Rows()):
        if read[-1][1] * part * whole >= size:
            break
        texts.append(text)
    count, share = read[-1]
    return texts[:count], share * part


def _documents_of(files: Sequence[Path], settings: DataSettings, on_share: OnShare, rows: Rows) -> Iterator[str]:
    """Yield the documents of the files that are not blank; call `on_share` between documents."""
    before, whole = 0, _bytes_of(files)
    for path in files:
        size = _size(path)
        within = partial(_within, on_share, before / whole, size / whole)
        if size:
            yield from (text for text in _rows_of(path, settings, within, rows) if text.strip())
        before += size
        on_share(before / whole)


def _rows_of(path: Path, settings: DataSettings, on_share: OnShare, rows: Rows) -> Iterator[str]:
    """Yield the rows of a file, without null. Raises ConfigError if the file is unreadable or all its rows are null."""
    read, null = rows.read, rows.null
    try:
        for text in readers_of(settings.corpus)[path.suffix](path, settings.text_field, on_share):
            rows.read += 1
            if text is None:
                rows.null += 1
            else:
                yield text
    except OSError as error:
        raise _unreadable(path, error) from None
    if rows.read - read == rows.null - null > 0:
        found = f"only null in `{settings.text_field}` ({format_count(rows.null - null, 'row')})"
        raise ConfigError(_KEY, f"{path}: found {found}, expected text")


def _bytes_of(files: Sequence[Path]) -> int:
    return max(1, sum(map(_size, files)))


def corpus_bytes(settings: DataSettings) -> int:
    """Return the size of all files of the corpus. Raises ConfigError as `list_corpus`."""
    return _bytes_of(list_corpus(settings).files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or " ".join(str(error).split())
    return ConfigError(_KEY, f"{path}: cannot be read ({reason}), expected a file that the current user may read")


def _within(on_share: OnShare, before: float, part: float, share: float) -> None:
    on_share(before + part * share)


def fingerprint(settings: DataSettings, listing: Listing | None = None) -> str:
    """Return a digest of names, sizes and times of change, which detects a changed corpus without reading it.

    The time of the last change of a file's status is among them: no program can set it back, as editors and
    unpackers do with the modification time. `listing`: the corpus's files, if they are listed already.
    """
    files = (listing or list_corpus(settings)).files
    found = [(str(path), (now := path.stat()).st_size, now.st_mtime_ns, now.st_ctime_ns) for path in files]
    is_docstrings = settings.corpus == DOCSTRINGS
    return hashlib.sha256(json.dumps([is_docstrings, settings.text_field, found]).encode()).hexdigest()


def skipped_files(settings: DataSettings, listing: Listing) -> str:
    """Say in one line how many files of the listing are read and what is skipped; empty if nothing is skipped."""
    summary = listing.summary()
    return f"data.corpus: {settings.corpus}: {summary}" if summary else ""


def list_corpus(settings: DataSettings) -> Listing:
    """Return the files of the corpus, sorted. Raises ConfigError if there is none.

    The listing of an installed corpus counts no skipped files, because the user did not choose its folders.
    """
    corpus, suffixes = settings.corpus, readers_of(settings.corpus).keys()
    if settings.streamed is not None:
        raise ConfigError(
            _KEY, f"found `{corpus}`, expected a corpus that is not streamed, because it is read completely"
        )
    if corpus in INSTALLED:
        # Only some package managers store equal files as hard links, but every host has to read the same files.
        library = [Path(sysconfig.get_path("stdlib")).resolve()]
        roots, skipped = (package_folders(), set[str]()) if corpus == PROSE else (library, _NOT_STANDARD)
        found = [path for root in roots for path in list_files(root, suffixes, skipped, True).files]
        listing = Listing(sorted(found))
    else:
        listing = _named(corpus, suffixes)
    if not listing.files:
        skips = f" ({listing.skips()})" if listing.skips() else ""
        raise ConfigError(_KEY, f"found no usable file at `{corpus}`{skips}, expected {', '.join(suffixes)}")
    return listing


def _named(corpus: str, suffixes: Collection[str]) -> Listing:
    """Return the files of a folder, or the single file, that the user names. Raises ConfigError if it is neither."""
    path = Path(corpus).expanduser()
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        choices = f"{', '.join(f'`{name}`' for name in INSTALLED)} or a path that exists"
        raise ConfigError(_KEY, f"found `{corpus}`, expected {choices}") from None
    except OSError as error:
        raise ConfigError(_KEY, f"{path}: cannot be read ({error.strerror}), expected a file or a folder") from None
    if stat.S_ISDIR(mode):
        return list_files(path.resolve(), suffixes)
    if not stat.S_ISREG(mode):
        raise ConfigError(_KEY, f"found a pipe, socket or device at `{corpus}`, expected a file or a folder")
    if path.suffix not in suffixes:
        raise ConfigError(_KEY, f"found no usable file at `{corpus}`, expected {', '.join(suffixes)}{_hint(path)}")
    return Listing([path.parent.resolve() / path.name])  # use the suffix of a symbolic link, not of its target


def _hint(path: Path) -> str:
    """Return advice on how to read a compressed file; empty if there is none."""
    if tuple(path.suffixes[-2:]) in _STREAMED_ONLY:
        return f"; `corpus: {STREAMED}{path}` streams this file"
    return "; unpack this file" if path.suffix in _COMPRESSED else ""
