"""Parameters that an outer round reads and writes, held in this process or sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class ParameterStore(Protocol):
    """Parameters by name. On several ranks, all ranks make every call in the same order."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The whole shape of every parameter."""

    def read(self, name: str, rows: range) -> Tensor:
        """Return these rows of a parameter's current value, fp32; ranks may ask for different rows."""

    def read_gradient(self, name: str) -> Tensor:
        """Return and clear the whole gradient of a parameter; zeros if there is none."""

    def write(self, name: str, whole: Tensor) -> None:
        """Overwrite a parameter; all ranks pass the same whole tensor."""

    def finish_writing(self) -> None:
        """Complete a series of writes."""


class LocalParameters:
    """Parameters in this process. Implements ParameterStore."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def read(self, name: str, rows: range) -> Tensor:
        return self.parameters[name].detach()[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter) if gradient is None else gradient

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        self.parameters[name].copy_(whole)

    def finish_writing(self) -> None:
        """Do nothing: writes take effect immediately."""
