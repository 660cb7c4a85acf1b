"""Corpora: the files that `data.corpus` names, their documents as a stream, and a quick fingerprint of them.

A folder is listed in the order of the names, without hidden files, and each real file once. The choice of the name and
the order depend on names alone, so both are equal on every host.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count, format_names
from hetero_pp.data.readers import OnShare, readers_of
from hetero_pp.data.settings import DOCSTRINGS, INSTALLED, PROSE, STREAMED, DataSettings

PACKAGES = ("torch", "numpy", "scipy", "sympy", "networkx", "matplotlib")
"""Packages whose docstrings `prose` reads: requirements of hetero-pp, direct or through torch."""

_KEY = ("data", "corpus")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
_STREAMED_ONLY = {(".jsonl", ".gz"), (".jsonl", ".zst"), (".json", ".gz"), (".json", ".zst")}
"""File endings that only a streamed corpus can read."""
_HIDDEN_FILE, _HIDDEN_FOLDER = "hidden file", "hidden folder"
_REPEATED, _BROKEN = "repeated link", "broken link"
_SPECIAL = "special file"  # Named pipe, socket or device. Reading from one may never end.
_EMPTY, _OTHER = "empty file", "other file"
_SUFFIXES_SHOWN = 5


@dataclass
class Listing:
    """Files to read, and the number of skipped entries of each kind."""

    files: list[Path] = field(default_factory=list)
    """Paths in the order of their names.

    Empty files are included, because their names and times belong to the fingerprint.
    """
    skipped: Counter[str] = field(default_factory=Counter)
    other_suffixes: set[str] = field(default_factory=set)  # suffixes of skipped files of other kinds

    def summary(self) -> str:
        """Return `read 12 files; skipped 3 hidden files and 2 repeated links`, or "" if nothing is skipped."""
        read = format_count(len(self.files) - self.skipped[_EMPTY], "file")
        return f"read {read}; {skips}" if (skips := self.skips()) else ""

    def skips(self) -> str:
        """Return `skipped 3 hidden files and 2 repeated links`, or "" if nothing is skipped."""
        parts = [format_count(count, kind) for kind, count in sorted(self.skipped.items()) if count]
        if self.skipped[_OTHER]:
            others = format_count(self.skipped[_OTHER], _OTHER)
            suffixes = format_names(sorted(self.other_suffixes), _SUFFIXES_SHOWN)
            parts = [f"{others} ({suffixes})" if part == others else part for part in parts]
        *most, last = parts or [""]
        return f"skipped {', '.join(most)} and {last}" if most else f"skipped {last}" if last else ""


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


def _documents_of(files: Sequence[Path], settings: DataSettings, on_share: OnShare, rows: Rows) -> Iterator[str]:
    """Yield the documents of the files that are neither null nor blank; call `on_share` between documents.

    Raises ConfigError for a file that cannot be read, and for one whose rows are all null.
    """
    before, whole, readers = 0, _bytes_of(files), readers_of(settings.corpus)
    for path in files:
        size, read, null = _size(path), rows.read, rows.null

        def within(share: float, before: int = before, size: int = size) -> None:
            on_share((before + size * share) / whole)

        try:
            for text in readers[path.suffix](path, settings.text_field, within) if size else ():
                rows.read += 1
                if text is None:
                    rows.null += 1
                elif text.strip():
                    yield text
        except OSError as error:
            raise _unreadable(path, error) from None
        if rows.read - read == rows.null - null > 0:
            found = f"only null in `{settings.text_field}` ({format_count(rows.null - null, 'row')})"
            raise ConfigError(_KEY, f"{path}: found {found}, expected text")
        before += size
        on_share(before / whole)


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
        expected = "expected a corpus that is not streamed, because it is read completely"
        raise ConfigError(_KEY, f"found `{corpus}`, {expected}")
    if corpus in INSTALLED:
        roots, skipped = [Path(sysconfig.get_path("stdlib")).resolve()], _NOT_STANDARD
        if corpus == PROSE:
            roots, skipped = [], set()
            for name in PACKAGES:
                package = find_spec(name)  # imports nothing
                if package is None or not package.submodule_search_locations:
                    expected = f"expected all of {', '.join(PACKAGES)}"
                    raise ConfigError(_KEY, f"found no package {name}, whose docstrings `prose` reads; {expected}")
                roots.append(Path(package.submodule_search_locations[0]).resolve())
        # Only some package managers store equal files as hard links, but every host has to read the same files.
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
        hint = "; unpack this file" if path.suffix in _COMPRESSED else ""
        if tuple(path.suffixes[-2:]) in _STREAMED_ONLY:
            hint = f"; `corpus: {STREAMED}{path}` streams this file"
        raise ConfigError(_KEY, f"found no usable file at `{corpus}`, expected {', '.join(suffixes)}{hint}")
    return Listing([path.parent.resolve() / path.name])  # use the suffix of a symbolic link, not of its target


def list_files(
    root: Path, suffixes: Collection[str], skipped_folders: Collection[str] = (), hard_links_are_copies: bool = False
) -> Listing:
    """List the regular files below `root` with names that end in one of `suffixes`.

    Links to files and folders are followed. A file or folder with several names is read under one of them, and so is a
    file with several hard links, unless `hard_links_are_copies` is set. A link to a folder that contains the link is a
    loop and is skipped. Raises ConfigError if a folder cannot be listed.
    """
    listing, real_root = Listing(), root.resolve()
    skipped, pending, seen = listing.skipped, [(root, real_root)], set[object]([real_root])
    while pending:
        folder, real_folder = pending.pop()
        below = []
        for entry in _entries(folder):
            if entry.name.startswith("."):  # counted if its text would be read without the dot
                if _suffix(entry.name) in suffixes:
                    skipped[_HIDDEN_FILE] += 1
                elif entry.is_dir():
                    skipped[_HIDDEN_FOLDER] += 1
                continue
            try:
                status = entry.stat()
            except PermissionError as error:
                raise _unreadable(folder / entry.name, error) from None
            except OSError:  # no target, or a link to itself
                skipped[_BROKEN] += 1
                continue
            real = os.path.join(real_folder, entry.name)  # noqa: PTH118 (a Path takes several times as long)
            real = os.path.realpath(entry) if entry.is_symlink() else real
            if stat.S_ISDIR(status.st_mode):
                real_path = Path(real)
                if entry.name in skipped_folders:
                    continue
                if real_path in seen or real_folder.is_relative_to(real_path):
                    skipped[_REPEATED] += 1
                    continue
                seen.add(real_path)
                below.append((folder / entry.name, real_path))
            elif not stat.S_ISREG(status.st_mode):
                skipped[_SPECIAL] += 1
            elif (suffix := _suffix(entry.name)) not in suffixes:
                skipped[_OTHER] += 1
                listing.other_suffixes.add(suffix or "no suffix")
            elif (identity := _identity(status, real, hard_links_are_copies)) in seen:
                skipped[_REPEATED] += 1
            else:
                seen.add(identity)
                listing.files.append(folder / entry.name)
                skipped[_EMPTY] += status.st_size == 0
        pending += reversed(below)
    listing.files.sort(key=lambda path: path.parts)
    return listing


def each_once(files: Sequence[str], named: str) -> tuple[list[str], str]:
    """Return each real file of a folder or pattern `named` once, and a text about skipped entries.

    Hidden files and folders are skipped, unless a part of `named` that begins with a dot matches them. Addresses such
    as `hf://...` are kept unchanged.
    """
    kept: dict[object, str] = {}
    skipped: Counter[str] = Counter()
    asked = [part for part in Path(named).expanduser().absolute().parts if part.startswith(".")]
    for file in files:
        path = Path(file)
        if "://" in file:
            kept[file] = file
        elif any(part.startswith(".") and not any(fnmatch(part, one) for one in asked) for part in path.parts):
            skipped[_HIDDEN_FILE] += 1
        elif not path.exists():
            skipped[_BROKEN] += 1
        elif not path.is_file():
            skipped[_SPECIAL] += not path.is_dir()
        elif (identity := _identity(path.stat(), path.resolve(), False)) in kept:
            skipped[_REPEATED] += 1
        else:
            kept[identity] = file
    return list(kept.values()), Listing([Path(file) for file in kept.values()], skipped).summary()


def _suffix(name: str) -> str:
    """Return the last suffix of a name, as `PurePath.suffix` does, which takes several times as long."""
    point = name.rfind(".")
    return name[point:] if 0 < point < len(name) - 1 else ""


def _identity(status: os.stat_result, real: str | Path, hard_links_are_copies: bool) -> object:
    """Return a key that is equal for equal files.

    It is the inode for hard links only: some file systems renumber files.
    """
    if status.st_nlink > 1 and status.st_ino and not hard_links_are_copies:
        return status.st_dev, status.st_ino
    return real


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from None
