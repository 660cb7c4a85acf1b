"""A snapshot: all parameters, the subspace's basis U and the outer momentum after a round, one safetensors file.

Snapshot 0 carries the initial weights and U; neither is ever drawn again, as random numbers and QR may differ
between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_pp.model import ModelShape, Transformer, initialise
from hetero_pp.subspace import random_basis

BASIS = "subspace.basis"
MOMENTUM = "outer.momentum."


@dataclass(frozen=True)
class Snapshot:
    """Parameters by name in fp32, the basis [D, K] (None if no boundary is compressed), and the round they follow.

    `momentum` is the outer optimizer's, by parameter; empty if the method has none.
    """

    round: int
    parameters: Mapping[str, Tensor]
    basis: Tensor | None
    momentum: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name."""
        basis = {} if self.basis is None else {BASIS: self.basis}
        momentum = {MOMENTUM + name: tensor for name, tensor in self.momentum.items()}
        return {**self.parameters, **basis, **momentum}


def initial_snapshot(
    shape: ModelShape, rank: int | None, seed: int, parameters: Mapping[str, Tensor] | None = None
) -> Snapshot:
    """The snapshot every run starts from; `rank` is the largest of its boundaries, `parameters` replace drawn ones."""
    if parameters is None:
        model = Transformer(shape)
        initialise(model, seed)
        parameters = {name: parameter.detach() for name, parameter in sorted(model.named_parameters())}
    return Snapshot(0, parameters, None if rank is None else random_basis(shape.width, rank, seed))


def save_snapshot(snapshot: Snapshot, path: Path, parameters_sha256: bytes) -> None:
    """Write a snapshot so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.tensors().items()}
    metadata = {"round": str(snapshot.round), "parameters_sha256": parameters_sha256.hex(), "format": "pt"}
    save_file(tensors, temporary, metadata)
    temporary.replace(path)


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot back."""
    with safe_open(path, "pt") as file:
        round_ = int(file.metadata()["round"])
    tensors = load_file(path)
    basis = tensors.pop(BASIS, None)
    momentum = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MOMENTUM)}
    return Snapshot(round_, tensors, basis, {name.removeprefix(MOMENTUM): b for name, b in momentum.items()})
