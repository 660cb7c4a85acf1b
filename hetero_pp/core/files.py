"""Atomic and durable file writes: write beside the file, flush to the disk, then rename."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hetero_pp.core.errors import StoreError
from hetero_pp.core.units import format_bytes

_MODE, _SECRET_MODE = 0o666, 0o600  # file modes before the umask applies
PART = ".part"  # suffix of a file's name until it is complete
SAFETENSORS_PART = ".tmp"  # prefix of a file's name while safetensors writes it; a killed process leaves such files

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a failed disk or store is tried again: the first pause, and the longest."""

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Prefixes of paths that must not be replaced, although they may refer to files."""

OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE, errno.ENODEV})
"""Error numbers for which a message shows the free space of the disk."""

OF_FILES = OF_THE_DISK | {errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR}
"""Error numbers of files that a user can correct: more space, more open files, another path."""

MOST_WAITING = 64 * 2**20  # bytes that may wait in memory until a disk takes them

T = TypeVar("T")


def write_whole(path: Path, data: bytes, is_secret: bool = False) -> None:
    """Write a file atomically and durably: readers never see a part of it, and it survives a crash of the machine."""
    with whole(path, is_secret) as part:
        part.write_bytes(data)


def write_json(path: Path | None, value: Any) -> None:
    """Write a value as JSON, as `write_whole` does; without a path do nothing."""
    if path is not None:
        write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


@contextmanager
def whole(path: Path, is_secret: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which becomes `path` if the block succeeds. The last of several writers wins.

    The umask decides about access to the file, regardless of the library that writes it (safetensors allows only
    the owner). Only the owner may read and write a secret. An OSError names `path`, and no partial file is left. A
    device or a pipe is written to, not replaced.
    """
    if str(path).startswith(_STREAMS) or (path.exists() and not path.is_file()):
        yield path
        return
    part = part_of(path)
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.touch(_SECRET_MODE if is_secret else _MODE, exist_ok=False)
            mode = stat.S_IMODE(part.stat().st_mode)
            yield part
            part.chmod(mode)
            flush(part)
            part.replace(path)
    finally:
        with suppress(OSError):  # already renamed, or never created
            part.unlink()
    with naming(path):
        flush(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an OSError of the block name `path`, unless it names another file that is not a partial one."""
    try:
        yield
    except OSError as error:
        is_named = error.filename is not None and not str(error.filename).endswith(PART)
        if error.errno is None or is_named:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def part_of(path: Path) -> Path:
    """Return a new name beside a file, for the time until it is complete."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")


def remove_parts(folder: Path) -> None:
    """Remove the partial files that killed writers left in a folder and below.

    No other process may write there meanwhile.
    """
    for part in (*folder.rglob(f"*{PART}"), *folder.rglob(f"{SAFETENSORS_PART}*")):
        part.unlink(missing_ok=True)


def is_part(name: str) -> bool:
    """Return whether this is the name of a partial file."""
    return name.endswith(PART) or name.startswith(SAFETENSORS_PART)


def rename_whole(part: Path, path: Path) -> None:
    """Rename a complete file or folder to its final name, after flushing all of it to the disk."""
    for found in part.rglob("*"):
        flush(found)
    flush(part)
    with naming(path):
        part.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk before returning."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal digits."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- disks that fail ----


def keep_trying(do: Callable[[], T], say: Callable[[str], object]) -> T:
    """Call `do` until the disk or the store works; pass the reason of each failure to `say`.

    FileNotFoundError is a valid answer, and is raised.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return do()
        except FileNotFoundError:
            raise
        except (StoreError, OSError) as error:
            say(f"{complaint(error)}; retrying")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def complaint(error: StoreError | OSError) -> str:
    """Return one line: `/runs/x/log: No space left on device (0 B of 24 MB are free on tmpfs, mounted at /runs)`."""
    if isinstance(error, StoreError) or error.errno is None:
        return str(error)
    named = f"{error.filename}: " if error.filename is not None else ""
    room = free_space(error, Path(os.fsdecode(error.filename))) if error.filename is not None else ""
    return f"{named}{error.strerror}{f' ({room})' if room else ''}"


def free_space(error: OSError, path: Path) -> str:
    """Describe the disk of a file that could not be written: its free space, its device, its mount point.

    Returns an empty text for an error unrelated to the disk, and if the system does not provide this.
    """
    if error.errno not in OF_THE_DISK:
        return ""
    with suppress(OSError):
        folder = path.absolute()
        while not folder.is_dir():
            folder = folder.parent
        disk = os.statvfs(folder)
        while not folder.is_mount():
            folder = folder.parent
        devices = {one.mountpoint: one.device for one in psutil.disk_partitions(all=True)}
        free, total = (format_bytes(blocks * disk.f_frsize) for blocks in (disk.f_bavail, disk.f_blocks))
        files = "" if disk.f_favail or not disk.f_files else ", and no file more"
        return f"{free} of {total}{files} are free on {devices.get(str(folder)) or 'the disk'}, mounted at {folder}"
    return ""


class LastingLog:
    """Append-only file. Bytes that the disk does not take wait in memory, and are written before any later bytes."""

    def __init__(self, path: Path) -> None:
        """Prepare to write to `path`. An earlier file is overwritten at the first write or `flush`."""
        self.path = path
        self.failure: OSError | None = None  # reason why bytes wait; None if none do
        self.has_gaps = False  # whether bytes were dropped because too many waited
        self._file: io.FileIO | None = None
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        """Append bytes; `failure` shows whether they still wait."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting += data
        else:
            self.has_gaps = True
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write the waiting bytes. Raises OSError if the disk still fails."""
        try:
            with naming(self.path):
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self.path.open("wb", buffering=0)
                while self._waiting:
                    written = self._file.write(self._waiting)
                    del self._waiting[:written]
        except OSError as error:
            self.failure = error
            raise
        self.failure = None

    def close(self) -> None:
        """Close the file. Raises OSError if bytes still wait; they are lost."""
        try:
            if self._waiting:
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()


class _Unfailing(io.FileIO):
    """Output stream of a process that drops bytes which the disk does not take."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def print_without_fail() -> None:
    """Let this process continue if its standard output or error is a file on a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None:
            stream.flush()
            raw = io.BufferedWriter(_Unfailing(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
