"""Compiling the model's layers, where this machine can: a C++ compiler for the CPU, Triton for a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from hetero_pp.model import Transformer


@lru_cache(maxsize=4)
def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here, found out by compiling one operation (seconds; kept on disk by torch)."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(2, device=device))
    except RuntimeError:  # what every error of the compiler is
        return False
    return True


def compile_layers(models: Iterable[Transformer]) -> None:
    """Compile the layers of models that have one shape: one compilation serves all of them.

    The whole model would take longer to compile and gains no more; boundaries lie between layers and stay as they are.
    """
    for model in models:
        for block in model.layers.values():
            block.compile(dynamic=False)
