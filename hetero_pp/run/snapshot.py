"""Snapshot: all parameters, the subspace's basis U and the outer momentum after a round, in one safetensors file.

Snapshot 0 has the initial weights and U. Neither is ever drawn again, because random numbers and QR may differ between
machines.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.core.bounded import INTEGER_DIGITS_MAX
from hetero_pp.core.errors import DamagedFile, StoreError
from hetero_pp.core.files import whole
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.model.transformer import ModelShape, Transformer, initialise
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.pipeline.subspace import random_basis

BASIS = "subspace.basis"
MOMENTUM = "outer.momentum."

ROUND, DIGEST = "round", "tensors_sha256"
"""Keys of the file's metadata."""


@dataclass(frozen=True)
class Snapshot:
    """Parameters by name in fp32, the basis [D, K] (None if no boundary is compressed), and the round that they follow.

    `momentum` is the outer optimizer's, by parameter; empty if the method has none.
    """

    round: int
    parameters: Mapping[str, Tensor]
    basis: Tensor | None
    momentum: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        basis = {} if self.basis is None else {BASIS: self.basis}
        momentum = {MOMENTUM + name: tensor for name, tensor in self.momentum.items()}
        return {**self.parameters, **basis, **momentum}


def initial_snapshot(
    shape: ModelShape, rank: int | None, seed: int, parameters: Mapping[str, Tensor] | None = None
) -> Snapshot:
    """Return the snapshot that a run starts from.

    `rank` is the largest of its boundaries; `parameters` replace random ones.
    """
    if parameters is None:
        model = Transformer(shape)
        initialise(model, seed)
        parameters = {name: parameter.detach() for name, parameter in sorted(model.named_parameters())}
    return Snapshot(0, parameters, None if rank is None else random_basis(shape.width, rank, seed))


def save_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot atomically, with the digest of its parameters and the digest of all its tensors."""
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.tensors().items()}
    hashes = {name: parameter_sha256(tensor) for name, tensor in tensors.items()}
    of_parameters = parameters_sha256({name: hashes[name] for name in snapshot.parameters})
    metadata = {
        "format": "pt",
        ROUND: str(snapshot.round),
        "parameters_sha256": of_parameters.hex(),
        DIGEST: _digest(str(snapshot.round), hashes),
    }
    with whole(path) as part:
        save_tensors(tensors, part, metadata)


def load_snapshot(path: Path, called: str = "") -> Snapshot:
    """Read a snapshot. Errors call it `called`, by default its path.

    Raises DamagedFile if it is not as written, StoreError if the disk cannot read it.
    """
    with open_snapshot(path, called) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        round_ = _round_of(file.metadata(), called or str(path))
    basis = tensors.pop(BASIS, None)
    momentum = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENTUM)}
    return Snapshot(round_, tensors, basis, {name.removeprefix(MOMENTUM): b for name, b in momentum.items()})


def _round_of(metadata: Mapping[str, str], called: str) -> int:
    """Return the round in the metadata. Raises DamagedFile: a forged file may have a valid digest."""
    text = metadata.get(ROUND, "")
    if not text.isdecimal() or len(text) > INTEGER_DIGITS_MAX:
        raise DamagedFile(f"{called} is damaged: its round is not a number")
    return int(text)


@contextmanager
def open_snapshot(path: Path, called: str = "") -> Iterator[safe_open]:
    """Open a snapshot to read tensors one at a time. Raises the errors of `load_snapshot`."""
    called = called or str(path)
    try:
        with safe_open(path, "pt") as file:
            hashes = {name: parameter_sha256(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), called) from None
    except OSError as error:  # the file may be intact, and a later attempt may succeed
        raise StoreError(f"{called}: cannot be read ({error.strerror or error})") from None
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:  # also for types that torch cannot compute
        raise DamagedFile(f"{called} is damaged: {error}") from None
    if metadata.get(DIGEST) != _digest(metadata.get(ROUND, ""), hashes):
        raise DamagedFile(f"{called} is damaged: its tensors do not match its digest")
    with safe_open(path, "pt") as file:
        yield file


def _digest(round_: str, hashes: Mapping[str, bytes]) -> str:
    """Return the digest of the round and of every tensor's name and content, in hexadecimal digits."""
    return parameters_sha256({**hashes, ROUND: round_.encode()}).hex()
