"""Tensors as files. A disk failure is an OSError that names the file, for every library that writes it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
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
