"""Lists the files of a corpus folder: each real file once, in the order of the names, without hidden ones."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count, format_names

_KEY = ("data", "corpus")
_HIDDEN_FILE, _HIDDEN_FOLDER = "hidden file", "hidden folder"
_REPEATED, _BROKEN = "repeated link", "broken link"
_SPECIAL = "special file"
"""Named pipe, socket or device. Reading from one may never end."""
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
    other_suffixes: set[str] = field(default_factory=set)
    """Suffixes of skipped files of other kinds."""

    def summary(self) -> str:
        """Return `read 12 files; skipped 3 hidden files and 2 repeated links`, or "" if nothing is skipped."""
        return _summary(len(self.files) - self.skipped[_EMPTY], self.skips())

    def skips(self) -> str:
        """Return `skipped 3 hidden files and 2 repeated links`, or "" if nothing is skipped."""
        return _skips(self.skipped, f" ({format_names(sorted(self.other_suffixes), _SUFFIXES_SHOWN)})")


def list_files(
    root: Path, suffixes: Collection[str], skipped_folders: Collection[str] = (), hard_links_are_copies: bool = False
) -> Listing:
    """List the regular files below `root` with names that end in one of `suffixes`.

    Links to files and folders are followed. A file or folder with several names is read under one of them, and so is a
    file with several hard links, unless `hard_links_are_copies` is set. A link to a folder that contains the link is a
    loop and is skipped. The choice of the name and the order depend on names alone, so both are equal on every host.
    Raises ConfigError if a folder cannot be listed.
    """
    walk = _Walk(suffixes, skipped_folders, hard_links_are_copies)
    walk.below(root, root.resolve())
    walk.listing.files.sort(key=lambda path: path.parts)
    return walk.listing


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
    return list(kept.values()), _summary(len(kept), _skips(skipped))


class _Walk:
    def __init__(self, suffixes: Collection[str], skipped_folders: Collection[str], hard_links_are_copies: bool):
        self.listing = Listing()
        self._suffixes, self._skipped_folders = suffixes, skipped_folders
        self._hard_links_are_copies = hard_links_are_copies
        self._seen: set[object] = set()

    def below(self, root: Path, real_root: Path) -> None:
        """Visit a folder and all folders below it, in the order of their names."""
        pending = [(root, real_root)]
        self._seen.add(real_root)
        while pending:
            folder, real = pending.pop()
            found = [self._visit(entry, folder, real) for entry in _entries(folder)]
            pending += [one for one in reversed(found) if one is not None]

    def _visit(self, entry: os.DirEntry[str], folder: Path, real_folder: Path) -> tuple[Path, Path] | None:
        """Add a file to the listing, or return a folder to enter and its real path."""
        if entry.name.startswith("."):
            self._skip_hidden(entry)
            return None
        try:
            status = entry.stat()
        except PermissionError as error:
            raise _unreadable(folder / entry.name, error) from None
        except OSError:  # no target, or a link to itself
            self.listing.skipped[_BROKEN] += 1
            return None
        real = os.path.join(real_folder, entry.name)  # noqa: PTH118 (a Path takes several times as long)
        real = os.path.realpath(entry) if entry.is_symlink() else real
        if stat.S_ISDIR(status.st_mode):
            return self._folder(folder / entry.name, Path(real), real_folder)
        self._file(folder, entry.name, real, status)
        return None

    def _folder(self, path: Path, real: Path, holder: Path) -> tuple[Path, Path] | None:
        """Return the folder, unless it was visited before or contains the link to it."""
        if path.name in self._skipped_folders:
            return None
        if real in self._seen or holder.is_relative_to(real):
            self.listing.skipped[_REPEATED] += 1
            return None
        self._seen.add(real)
        return path, real

    def _file(self, folder: Path, name: str, real: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            self.listing.skipped[_SPECIAL] += 1
        elif (suffix := _suffix(name)) not in self._suffixes:
            self.listing.skipped[_OTHER] += 1
            self.listing.other_suffixes.add(suffix or "no suffix")
        elif (identity := _identity(status, real, self._hard_links_are_copies)) in self._seen:
            self.listing.skipped[_REPEATED] += 1
        else:
            self._seen.add(identity)
            self.listing.files.append(folder / name)
            self.listing.skipped[_EMPTY] += status.st_size == 0

    def _skip_hidden(self, entry: os.DirEntry[str]) -> None:
        """Count a hidden entry if its text would be read without the dot."""
        if _suffix(entry.name) in self._suffixes:
            self.listing.skipped[_HIDDEN_FILE] += 1
        elif entry.is_dir():
            self.listing.skipped[_HIDDEN_FOLDER] += 1


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


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        _KEY, f"{path}: cannot be read ({error.strerror}), expected files that the current user may read"
    )


def _summary(read: int, skips: str) -> str:
    return f"read {format_count(read, 'file')}; {skips}" if skips else ""


def _skips(skipped: Mapping[str, int], of_others: str = "") -> str:
    """Describe the skipped entries; `of_others` is appended to the count of files of other kinds."""
    parts = [
        f"{format_count(count, kind)}{of_others if kind == _OTHER else ''}"
        for kind, count in sorted(skipped.items())
        if count
    ]
    return f"skipped {' and '.join([', '.join(parts[:-1]), parts[-1]][len(parts) == 1 :])}" if parts else ""
