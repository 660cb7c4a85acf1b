"""Files that are whole and durable once they have their name: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import errno
import hashlib
import io
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

from hetero_pp.errors import StoreError
from hetero_pp.units import format_bytes

_MODE, _SECRET_MODE = 0o666, 0o600
"""Before the umask takes its bits away."""
PART = ".part"
"""What the name of a file ends in until it is whole."""

SAFETENSORS_PART = ".tmp"
"""What the name of a file begins with while safetensors writes it; a killed process leaves it."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds after which a disk or a store that failed is tried again: at first, and at most."""

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Where paths begin that are not to be replaced, though files may be behind them."""

OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE, errno.ENODEV})
"""Numbers of errors for which a message says how much room the disk has."""

OF_FILES = OF_THE_DISK | {errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR}
"""Numbers of errors of a file that a user can mend: more room, more open files, another path."""

MOST_WAITING = 64 * 2**20
"""Bytes that wait in memory for a disk to take them."""

T = TypeVar("T")


def write_whole(path: Path, data: bytes, is_secret: bool = False) -> None:
    """Write a file of which no reader ever sees a part, and which a crash of the machine does not take back."""
    with whole(path, is_secret) as part:
        part.write_bytes(data)


@contextmanager
def whole(path: Path, is_secret: bool = False) -> Iterator[Path]:
    """A path to write a file at, which becomes `path` if the block ends well. Of several writers the last one wins.

    The umask decides who may read and write the file, whatever the library that writes it does (safetensors lets the
    owner alone). Only the owner may read and write a secret. An OSError names `path`, and leaves nothing beside it. A
    device or a pipe is written to, not replaced.
    """
    if str(path).startswith(_STREAMS) or (path.exists() and not path.is_file()):
        yield path
        return
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
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
        with suppress(OSError):  # it is not there any more, or was never made
            part.unlink()
    with naming(path):
        flush(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of the block name `path`, unless it names another file than one that becomes `path`."""
    try:
        yield
    except OSError as error:
        is_named = error.filename is not None and not str(error.filename).endswith(PART)
        if error.errno is None or is_named:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def remove_parts(folder: Path, name: str = "*") -> None:
    """Remove what writers of such a name that were killed left in a folder and below; nobody else may write there."""
    for part in (*folder.rglob(f"{name}{PART}"), *(folder.rglob(f"{SAFETENSORS_PART}*") if name == "*" else ())):
        part.unlink(missing_ok=True)


def is_part(name: str) -> bool:
    """Whether a file of this name is one that is not whole."""
    return name.endswith(PART) or name.startswith(SAFETENSORS_PART)


def rename_whole(part: Path, path: Path) -> None:
    """Give a file or folder that is written its name, once all of it is on the disk."""
    for found in part.rglob("*"):
        flush(found)
    flush(part)
    with naming(path):
        part.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before anything else is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal digits."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- disks that fail ----


def keep_trying(do: Callable[[], T], say: Callable[[str], object]) -> T:
    """Do what needs a disk or a store, and again until it can be done; `say` each time why it could not.

    FileNotFoundError is an answer, and is raised.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return do()
        except FileNotFoundError:
            raise
        except (StoreError, OSError) as error:
            say(f"{complaint(error)}; trying again")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def complaint(error: StoreError | OSError) -> str:
    """One line: `/runs/x/config.yaml: No space left on device (0 B of 24 MB are free on tmpfs, mounted at /runs)`."""
    if isinstance(error, StoreError) or error.errno is None:
        return str(error)
    named = f"{error.filename}: " if error.filename is not None else ""
    room = free_space(error, Path(os.fsdecode(error.filename))) if error.filename is not None else ""
    return f"{named}{error.strerror}{f' ({room})' if room else ''}"


def free_space(error: OSError, path: Path) -> str:
    """What to say of the disk on which a file is that could not be written: its room, its device, where it is mounted.

    Empty for an error that has nothing to do with the disk, and where the system does not say.
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
    """A file that grows. What the disk does not take waits in memory, and is written before whatever comes later."""

    def __init__(self, path: Path) -> None:
        """An earlier file of this path is written over, once there is something to write, or `flush` is called."""
        self.path = path
        self.failure: OSError | None = None
        """Why something waits; None if nothing does."""
        self.has_gaps = False
        """Whether bytes were dropped, as too many waited."""
        self._file: io.FileIO | None = None
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        """Add bytes; see `failure`."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting += data
        else:
            self.has_gaps = True
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError if that cannot be done yet."""
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
        """Take nothing more. Raises OSError if something still waits, which is lost then."""
        try:
            if self._waiting:
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()


class _Unfailing(io.FileIO):
    """What a process prints to. It drops what the disk behind it does not take."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def print_without_fail() -> None:
    """Have this process go on when its standard output, or error, is a file on a disk that is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None:
            stream.flush()
            raw = io.BufferedWriter(_Unfailing(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
