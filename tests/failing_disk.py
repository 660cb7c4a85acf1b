"""A disk on which one operation, or every operation from one on, fails: each write, flush, rename and read in a folder.

The method is SQLite's: fail the first operation, then the second, ... until the tested code finishes without a failure.
Python's own calls are patched while the block runs, so new writers are tested without changes here. Writes by libraries
(safetensors) count as one operation, as does everything that torch.save writes to one Python file.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from safetensors import SafetensorError

import hetero_pp.config.checkpoint


class FailingDisk:
    """Counts operations on files below a folder from 1; raises OSError for selected ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.count = self.failures = 0
        self._first = 0
        self._lasts = False
        self._numbers: tuple[int, ...] = (errno.ENOSPC,)
        self._share, self._dice = 0.0, random.Random(1)

    def fail(self, first: int, lasts: bool, number: int = errno.ENOSPC) -> None:
        """Let operation number `first` fail from now on. With `lasts`, all later ones fail too, until `mend`."""
        with self._lock:
            self._first, self._lasts, self._numbers = first, lasts, (number,)
            self.count = self.failures = 0

    def fail_by_chance(self, share: float, *numbers: int) -> None:
        """Let this share of the operations outside the main thread fail, with these errors in turn.

        The operations are drawn with a fixed seed.
        """
        with self._lock:
            self._share, self._numbers, self._dice = share, numbers, random.Random(1)
            self.count = self.failures = 0

    def mend(self) -> None:
        """Let all operations succeed again."""
        with self._lock:
            self._first, self._share = 0, 0.0

    def operate(self, path: Any, is_named: bool = False) -> None:
        """Count an operation on a file. With `is_named`, an error contains the file name."""
        if not self.has(path) or (self._share and threading.current_thread() is threading.main_thread()):
            return
        with self._lock:
            self.count += 1
            fails = self.count == self._first or (self._lasts and 0 < self._first <= self.count)
            fails = fails or (self._share > 0 and self._dice.random() < self._share)
            self.failures += fails
            number = self._numbers[self.failures % len(self._numbers)]
        if fails:
            raise OSError(number, os.strerror(number), *([os.fspath(path)] if is_named else []))

    def has(self, path: Any) -> bool:
        """Return whether a path or file descriptor is below the folder."""
        try:
            found = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(os.fsdecode(path))
            return found.absolute().is_relative_to(self._folder)
        except (OSError, TypeError):
            return False


class _File:
    """A file that counts each write and read as an operation. A failing write has written half of its data."""

    def __init__(self, file: Any, disk: FailingDisk, path: Any) -> None:
        self._file, self._disk, self._path = file, disk, path

    def write(self, data: Any) -> Any:
        try:
            self._disk.operate(self._path)
        except OSError:
            half = self._file.write(data[: len(data) // 2])
            if half and isinstance(self._file, io.RawIOBase):
                return half  # as the system does: the caller writes the rest with another call
            raise
        return self._file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def read(self, *arguments: Any) -> Any:
        self._disk.operate(self._path)
        return self._file.read(*arguments)

    def readinto(self, buffer: Any) -> Any:
        self._disk.operate(self._path)
        return self._file.readinto(buffer)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    """Patch file operations below the folder while the block runs; yield the disk that controls their failures."""
    disk = FailingDisk(folder)
    with patched(disk):
        yield disk


@contextmanager
def patched(disk: FailingDisk) -> Iterator[None]:
    """Let this disk see the file operations below its folder while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        _replace_files(patch, disk)
        fsync = os.fsync
        # Tests do not crash the machine, so data need not reach the disk.
        patch.setattr(os, "fsync", lambda file: disk.operate(file) if disk.has(file) else fsync(file))
        for name in ("mkdir", "open", "scandir", "sendfile"):
            _count(patch, disk, os, name, lambda arguments: arguments[0] if arguments else ".")
        for name in ("replace", "rename", "link"):
            _count(patch, disk, os, name, lambda arguments: arguments[1])
        _replace_libraries(patch, disk)
        yield


def each_operation(disk: FailingDisk, step: int = 1) -> Iterator[int]:
    """Yield 1, 1 + step, 1 + 2 * step, ... for `fail`, until the block finishes without a failure."""
    n = 1
    yield n
    while disk.failures:
        n += step
        yield n
        disk.mend()
    assert n > 2


def _count(
    patch: pytest.MonkeyPatch, disk: FailingDisk, module: Any, name: str, path_of: Callable[[tuple[Any, ...]], Any]
) -> None:
    real = getattr(module, name)

    def operation(*arguments: Any, **options: Any) -> Any:
        path = path_of(arguments)
        disk.operate(path, is_named=not isinstance(path, int))
        return real(*arguments, **options)

    patch.setattr(module, name, operation)


def _replace_files(patch: pytest.MonkeyPatch, disk: FailingDisk) -> None:
    real = io.open

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not disk.has(path):
            return real(path, mode, *arguments, **options)
        disk.operate(path, is_named=True)
        return _File(real(path, mode, *arguments, **options), disk, path)

    patch.setattr(io, "open", opened)
    patch.setattr(builtins, "open", opened)


def _replace_libraries(patch: pytest.MonkeyPatch, disk: FailingDisk) -> None:
    serialize = safetensors.torch.serialize_file

    def saved(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
        try:
            disk.operate(path)
        except OSError as error:
            said = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            raise SafetensorError(said) from None
        serialize(tensors, path, *arguments, **options)

    patch.setattr(safetensors.torch, "serialize_file", saved)
    _count(patch, disk, hetero_pp.config.checkpoint, "safe_open", lambda arguments: arguments[0])
    _count(patch, disk, np, "load", lambda arguments: arguments[0])
