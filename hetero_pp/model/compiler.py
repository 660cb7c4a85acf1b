"""Compilation of the model's layers where possible: needs a C++ compiler for the CPU, Triton for a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.loss import GradientOfLogits, gradient_of_logits
from hetero_pp.model.transformer import Transformer


@lru_cache(maxsize=4)
def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile works here, by compiling one operation (takes seconds; torch caches it on disk)."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(2, device=device))
    except RuntimeError:  # the base of all compiler errors
        return False
    return True


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile works here."""
    if not can_compile(device):
        needed = "Triton" if device.type == "cuda" else "a C++ compiler"
        raise ConfigError(("compile",), f"found `true` without {needed}, which torch.compile needs; expected `false`")


def compile_layers(models: Iterable[Transformer]) -> None:
    """Compile the layers of models of one shape, and the loss between the logits and their gradient.

    One compilation serves all layers. Compiling the whole model would take longer for no further gain. Boundaries lie
    between layers and are not compiled.
    """
    for model in models:
        model.gradient_of_logits = _compiled_gradient()
        for block in model.layers.values():
            block.compile(dynamic=False)


@lru_cache(maxsize=1)
def _compiled_gradient() -> GradientOfLogits:
    compiled: GradientOfLogits = torch.compile(gradient_of_logits, dynamic=False)
    return compiled
