"""Tensors as files. A disk failure is an OSError that names the file, for every library that writes it."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from hetero_pp.core.files import naming


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError if the disk fails."""
    try:
        with naming(path):
            safetensors.torch.save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_at(descriptor: int, tensor: Tensor, offset: int) -> Tensor:
    """Fill a dense CPU tensor with bytes of an open file, and return it. Raises OSError, also for a file too short."""
    _move_all(lambda part, at: os.preadv(descriptor, [part], at), tensor, offset)
    return tensor


def _move_all(move: Callable[[memoryview, int], int], tensor: Tensor, offset: int) -> None:
    """Call `move` until all bytes of a tensor are moved: one call of the system moves at most 2 GiB."""
    left = tensor.reshape(-1).view(torch.uint8).numpy().data
    while len(left):
        moved = move(left, offset)
        if not moved:
            raise OSError(errno.EIO, "the file is too short")
        left, offset = left[moved:], offset + moved


def save_object(content: object, path: Path) -> None:
    """Write an object with torch.save. Raises OSError if the disk fails."""
    with naming(path), path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch reports a failed write only as a changed file length
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno or errno.EIO, cause.strerror, str(path)) from error
            raise


class Scratch:
    """Tensors by key in one file without a name, which vanish when the process ends. They take none of its memory.

    A tensor that the disk does not take stays in memory. Nothing is flushed. While the system has free memory, it keeps
    the file in its page cache, and reads come from there; otherwise it writes pages to the disk and drops them. Not
    thread-safe.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` holds the file; None: the folder of Python's `tempfile`."""
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._places: dict[Hashable, tuple[int, torch.Size, torch.dtype]] = {}
        """Key -> offset in the file, shape and dtype."""
        self._end = 0
        self._in_memory: dict[Hashable, Tensor] = {}

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        """Copy a tensor from any device; it replaces an earlier one of this key."""
        own = tensor.detach().cpu().contiguous()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as this object)
                weakref.finalize(self, self._file.close)
            place = self._places.get(key)
            if place is None or place[1:] != (own.shape, own.dtype):
                place = self._places[key] = self._end, own.shape, own.dtype
                self._end += own.nbytes
            _move_all(partial(os.pwrite, self._file.fileno()), own, place[0])
        except OSError:
            self._in_memory[key] = own.clone()
        else:
            self._in_memory.pop(key, None)

    def read(self, key: Hashable) -> Tensor:
        """Return a copy of the tensor in new CPU memory."""
        if key in self._in_memory:
            return self._in_memory[key].clone()
        offset, shape, dtype = self._places[key]
        assert self._file is not None
        return read_at(self._file.fileno(), torch.empty(shape, dtype=dtype), offset)
