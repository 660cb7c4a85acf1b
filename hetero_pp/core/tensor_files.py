"""Tensors as files. A disk failure is an OSError that names the file, for every library that writes it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

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


def write_at(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write the bytes of a dense CPU tensor to an open file. Raises OSError."""
    _move_all(lambda part, at: os.pwrite(descriptor, part, at), tensor, offset)


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
