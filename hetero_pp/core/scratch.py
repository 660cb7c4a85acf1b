"""Tensors that one process keeps on disk, so that they take none of its memory, and that vanish when it ends."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor


class Scratch:
    """Tensors by key in one file without a name. A tensor that the disk does not take stays in memory.

    Nothing is flushed. While the system has free memory, it keeps the file in its page cache, and reads come from
    there; otherwise it writes pages to the disk and drops them. Not thread-safe.
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
            self._write(key, own)
        except OSError:
            self._in_memory[key] = own.clone()
        else:
            self._in_memory.pop(key, None)

    def read(self, key: Hashable) -> Tensor:
        """Return a copy of the tensor in new CPU memory."""
        if key in self._in_memory:
            return self._in_memory[key].clone()
        offset, shape, dtype = self._places[key]
        tensor = torch.empty(shape, dtype=dtype)
        assert self._file is not None
        descriptor = self._file.fileno()
        _move_all(lambda part, at: os.preadv(descriptor, [part], at), tensor, offset)
        return tensor

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as this object)
        place = self._places.get(key)
        if place is None or place[1:] != (tensor.shape, tensor.dtype):
            place = self._places[key] = self._end, tensor.shape, tensor.dtype
            self._end += tensor.nbytes
        descriptor = self._file.fileno()
        _move_all(lambda part, at: os.pwrite(descriptor, part, at), tensor, place[0])


def _move_all(move: Callable[[memoryview, int], int], tensor: Tensor, offset: int) -> None:
    """Call `move` until all bytes of a tensor are moved: one call of the system moves at most 2 GiB."""
    left = tensor.reshape(-1).view(torch.uint8).numpy().data
    while len(left):
        moved = move(left, offset)
        if not moved:
            raise OSError(errno.EIO, "the file of copies is shorter than it was written")
        left, offset = left[moved:], offset + moved
