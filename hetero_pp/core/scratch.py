"""Tensors that one process keeps on disk, so that they take none of its memory, and that vanish when it ends."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from hetero_pp.core.tensor_files import read_at, write_at


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
        assert self._file is not None
        return read_at(self._file.fileno(), torch.empty(shape, dtype=dtype), offset)

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as this object)
            weakref.finalize(self, self._file.close)
        place = self._places.get(key)
        if place is None or place[1:] != (tensor.shape, tensor.dtype):
            place = self._places[key] = self._end, tensor.shape, tensor.dtype
            self._end += tensor.nbytes
        write_at(self._file.fileno(), tensor, place[0])
