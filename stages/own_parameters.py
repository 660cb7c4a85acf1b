"""What a replica trains beside the synced model: parameters that are no part of it, and the AdamW that trains them.

That is so whatever trains the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.inner import InnerOptimizer, InnerSettings
from hetero_pp.learning_rates import LearningRates


class OwnParameters:
    """Parameters by name, clipped by their own norm. What `remember` kept can be gone back to with `restore`."""

    def __init__(self, parameters: dict[str, nn.Parameter], inner: InnerSettings, total_steps: int | None) -> None:
        self.parameters = parameters
        adamw = inner.model_copy(update={"optimizer": "adamw", "momentum": None})
        self.optimizer = InnerOptimizer(parameters, adamw, total_steps)
        self._remembered: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> None:
        """Onto a device, before the first step."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    def follow(self, rates: LearningRates) -> None:
        """From the next step on other learning rates."""
        self.optimizer.follow(rates)

    def step(self, step: int) -> None:
        """One step of the gradients that have gathered, which are then gone."""
        self.optimizer.step(step, self.optimizer.gradient_norm())

    def drop(self) -> None:
        """Forget the gradients of a step that does not end."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def remember(self) -> None:
        """Keep what they are now; what the optimizer keeps is not copied."""
        for name, parameter in self.parameters.items():
            self._remembered.setdefault(name, torch.empty_like(parameter)).copy_(parameter)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to what was kept, if something was."""
        for name, kept in self._remembered.items():
            self.parameters[name].copy_(kept)

    def state(self) -> dict[str, Any]:
        """Values and moments, as tensors that are still in use."""
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"values": values, "optimizer": self.optimizer.state()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, of parameters of the same sizes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["values"][name])
        self.optimizer.load(state["optimizer"])
