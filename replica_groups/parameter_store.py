"""The parameters that an outer round reads and writes, wherever they are: here, or in shards on many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class ParameterStore(Protocol):
    """Parameters by name. On several ranks every call is made by all of them, in the same order."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The whole shape of every parameter."""

    def read(self, name: str, rows: range) -> Tensor:
        """These rows of a parameter as it is now, fp32; each rank may ask for rows of its own."""

    def read_gradient(self, name: str) -> Tensor:
        """The whole gradient of a parameter, which is then used up; zeros if there is none."""

    def write(self, name: str, whole: Tensor) -> None:
        """Overwrite a parameter; all ranks give the same whole tensor."""

    def finish_writing(self) -> None:
        """All that was to be written has been."""


class LocalParameters:
    """Parameters in this process. Implements ParameterStore."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """See ParameterStore."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def read(self, name: str, rows: range) -> Tensor:
        """See ParameterStore."""
        return self.parameters[name].detach()[rows.start : rows.stop]

    def read_gradient(self, name: str) -> Tensor:
        """See ParameterStore."""
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter) if gradient is None else gradient

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        """See ParameterStore."""
        self.parameters[name].copy_(whole)

    def finish_writing(self) -> None:
        """See ParameterStore."""
