"""Parameters that a replica trains beside the synchronized model, always with AdamW, whatever trains the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.learning_rates import LearningRates

_VALUES = "values."


class OwnParameters:
    """Parameters by name, clipped by their own norm. `restore` returns to the values that `remember` kept."""

    def __init__(self, parameters: dict[str, nn.Parameter], inner: InnerSettings, total_steps: int | None) -> None:
        self.parameters = parameters
        adamw = inner.model_copy(update={"optimizer": "adamw", "momentum": None})
        self.optimizer = InnerOptimizer(parameters, adamw, total_steps)
        self._remembered: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> None:
        """Move the parameters to a device, before the first step."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""
        self.optimizer.follow(rates)

    def step(self, step: int) -> None:
        """Take one step with the accumulated gradients, and clear them."""
        self.optimizer.step(step, self.optimizer.gradient_norm())

    def drop(self) -> None:
        """Drop the gradients of an unfinished step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the current values; the optimizer's state is not copied."""
        for name, parameter in self.parameters.items():
            self._remembered.setdefault(name, torch.empty_like(parameter)).copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied values, if there are any."""
        for name, kept in self._remembered.items():
            self.parameters[name].copy_(kept)

    def state(self) -> dict[str, Any]:
        """Return values and moments, as tensors that are still in use."""
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"values": values, "optimizer": self.optimizer.state()}

    def tensors(self) -> dict[str, Tensor]:
        """Return values and moments by name, as tensors that are still in use."""
        values = {f"{_VALUES}{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return values | self.optimizer.moments()

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`. Raises KeyError for a missing value, ValueError for another shape."""
        self.optimizer.load_moments({name: one for name, one in tensors.items() if not name.startswith(_VALUES)})
        for name, parameter in self.parameters.items():
            if (value := tensors[f"{_VALUES}{name}"]).shape != parameter.shape:
                raise ValueError(f"found {name} {list(value.shape)}, expected {list(parameter.shape)}")
            parameter.copy_(value)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`, from parameters of the same shapes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["values"][name])
        self.optimizer.load(state["optimizer"])
