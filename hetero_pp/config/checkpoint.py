"""Run checkpoint: all parameters, the subspace's basis U and the outer momentum after a round, in one safetensors file.

Run checkpoint 0 has the initial weights, random or those of a LLaMA checkpoint, and U. Neither is ever drawn again,
because random numbers and QR may differ between machines.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile, StoreError
from hetero_pp.core.files import whole
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.tensor_files import read_at, save_tensors
from hetero_pp.hugging_face.reading import read_parameters, require_checkpoint
from hetero_pp.model.transformer import EMBEDDING, ModelShape, Shapes, Transformer, initialise, materialise, shapes_of
from hetero_pp.outer.step import parameter_of, parameter_sha256, parameters_sha256
from hetero_pp.pipeline.subspace import random_basis

BASIS = "subspace.basis"
MOMENTUM = "outer.momentum."

ROUND, DIGEST = "round", "tensors_sha256"  # keys of the file's metadata

_PIECE_BYTES = 1 << 20
_ROUND_DIGITS_MAX = 18


@dataclass(frozen=True)
class RunCheckpoint:
    """Parameters by name in fp32, the basis [D, K] (None if no boundary is compressed), and the round that they follow.

    `momentum` is the outer optimizer's, by parameter; empty if the method has none.
    """

    round: int
    parameters: Mapping[str, Tensor]
    basis: Tensor | None
    momentum: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        basis = {} if self.basis is None else {BASIS: self.basis}
        momentum = {MOMENTUM + name: tensor for name, tensor in self.momentum.items()}
        return {**self.parameters, **basis, **momentum}

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.tensors())

    def tensor(self, name: str) -> Tensor:
        return self.tensors()[name]

    def pieces(self, name: str) -> Iterator[memoryview | bytes]:
        yield self.tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy().data


def require_weights(spec: RunSpec) -> Sequence[str]:
    """Raise ConfigError if the initial weights are missing or do not have the run's shape; reads headers only.

    Returns notes on what changes when they are read.
    """
    folder = spec.config.model.weights
    if folder is None or not require_checkpoint(Path(folder), spec.shape, spec.parameter_shapes).is_tied:
        return ()
    added = math.prod(spec.parameter_shapes[EMBEDDING])
    return (
        f"model.weights: {folder} ties its head to its token embedding; from here on they train apart, which makes "
        f"{added:,} more parameters",
    )


def first_checkpoint(spec: RunSpec, on_progress: OnProgress = untold) -> RunCheckpoint:
    """Return the first run checkpoint of a run, with random weights or those in the folder of `model.weights`.

    The basis U is random in both cases. If boundaries are compressed, the embedding of the checkpoint is split by it.
    That of a rehearsal has no tensors.
    """
    if spec.config.rehearsal is not None:
        return RunCheckpoint(0, {}, None)
    require_weights(spec)
    weights, parameters = spec.config.model.weights, None
    if weights is not None:
        parameters = read_parameters(Path(weights), spec.parameter_shapes, on_progress)
    return initial_checkpoint(spec.shape, spec.largest_rank, spec.config.seed, parameters)


def initial_checkpoint(
    shape: ModelShape, rank: int | None, seed: int, parameters: Mapping[str, Tensor] | None = None
) -> RunCheckpoint:
    """Return the run checkpoint that a run starts from.

    `rank` is the largest of its boundaries; `parameters` replace random ones.
    """
    if parameters is None:
        with torch.device("meta"):
            model = Transformer(shape)
        materialise(model, torch.device("cpu"))
        initialise(model, seed)
        parameters = {name: parameter.detach() for name, parameter in sorted(model.named_parameters())}
    return RunCheckpoint(0, parameters, None if rank is None else random_basis(shape.width, rank, seed))


def save_checkpoint(checkpoint: RunCheckpoint, path: Path) -> None:
    """Write a run checkpoint atomically, with the digest of its parameters and the digest of all its tensors."""
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors().items()}
    hashes = {name: parameter_sha256(tensor) for name, tensor in tensors.items()}
    of_parameters = parameters_sha256({name: hashes[name] for name in checkpoint.parameters})
    metadata = {
        "format": "pt",
        ROUND: str(checkpoint.round),
        "parameters_sha256": of_parameters.hex(),
        DIGEST: _digest(str(checkpoint.round), hashes),
    }
    with whole(path) as part:
        save_tensors(tensors, part, metadata)


class OpenCheckpoint:
    """A run checkpoint in a file, read one tensor at a time. It stays readable after the file was removed."""

    def __init__(self, path: Path, called: str) -> None:
        """Errors call it `called`. Raises OSError, or the errors of safetensors; the digest is not compared."""
        self._called = called
        with safe_open(path, "np") as file:  # checks the whole header
            names, self.metadata = file.keys(), file.metadata() or {}
        self._descriptor = os.open(path, os.O_RDONLY)
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        header = json.loads(os.pread(self._descriptor, length, 8))
        if any(header[name]["dtype"] != "F32" for name in names):
            raise ValueError("a tensor is not in fp32")
        self.starts = {name: 8 + length + header[name]["data_offsets"][0] for name in names}
        """First byte of each tensor in the file."""
        self.hashes: Mapping[str, bytes] = {}
        """sha256 of each tensor's bytes, if they were compared with the digest (`open_checkpoint`)."""
        self.shapes: Shapes = {name: tuple(header[name]["shape"]) for name in sorted(names, key=_kind)}
        """Shapes of all tensors by name: parameters, the basis, the momentum."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which also happens when this object is no longer used."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def round(self) -> int:
        """Round that the run checkpoint follows. Raises DamagedFile: a forged file may have a valid digest."""
        text = self.metadata.get(ROUND, "")
        if not text.isdecimal() or len(text) > _ROUND_DIGITS_MAX:
            raise DamagedFile(f"{self._called} is damaged: its round is not a number")
        return int(text)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in new memory. Raises StoreError if the disk fails."""
        with _reading(self._called):
            return read_at(self._descriptor, torch.empty(self.shapes[name], dtype=torch.float32), self.starts[name])

    def pieces(self, name: str) -> Iterator[memoryview | bytes]:
        """Yield the bytes of a tensor. Raises StoreError if the disk fails."""
        start = self.starts[name]
        stop = start + 4 * math.prod(self.shapes[name])
        while start < stop:
            with _reading(self._called):
                piece = os.pread(self._descriptor, min(_PIECE_BYTES, stop - start), start)
            if not piece:
                raise StoreError(f"{self._called}: cannot be read (it has become shorter)")
            yield piece
            start += len(piece)

    def checkpoint(self) -> RunCheckpoint:
        """Return all of it in memory."""
        tensors = {name: self.tensor(name) for name in self.shapes}
        basis = tensors.pop(BASIS, None)
        momentum = {name.removeprefix(MOMENTUM): tensors.pop(name) for name in list(tensors) if _kind(name) == 2}
        return RunCheckpoint(self.round, tensors, basis, momentum)


def _kind(name: str) -> int:
    """Return 0 for a parameter, 1 for the basis, 2 for a momentum."""
    return 2 if name.startswith(MOMENTUM) else int(name == BASIS)


def momentum_of(names: Sequence[str], parameters: Collection[str]) -> list[str]:
    """Return the tensors of a run checkpoint that are the outer optimizer's states of these parameters."""
    return [
        name for name in names if name.startswith(MOMENTUM) and parameter_of(name.removeprefix(MOMENTUM)) in parameters
    ]


@contextmanager
def _reading(called: str) -> Iterator[None]:
    """Raise StoreError for an OSError: the file may be intact, and a later attempt may succeed."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{called}: cannot be read ({error.strerror or error})") from None


def open_checkpoint(path: Path, called: str = "") -> OpenCheckpoint:
    """Open a run checkpoint to read tensors one at a time, after comparing all with the digest.

    Errors call it `called`, by default its path. Raises DamagedFile if it is not as written, StoreError if the disk
    cannot read it.
    """
    called = called or str(path)
    try:
        with _reading(called):
            file = OpenCheckpoint(path, called)
            file.hashes = {name: parameter_sha256(file.tensor(name)) for name in file.shapes}
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), called) from None
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:  # also for types that torch cannot compute
        raise DamagedFile(f"{called} is damaged: {error}") from None
    if file.metadata.get(DIGEST) != _digest(file.metadata.get(ROUND, ""), file.hashes):
        raise DamagedFile(f"{called} is damaged: its tensors do not match its digest")
    return file


def _digest(round_: str, hashes: Mapping[str, bytes]) -> str:
    """Return the digest of the round and of every tensor's name and content, in hexadecimal digits."""
    return parameters_sha256({**hashes, ROUND: round_.encode()}).hex()
